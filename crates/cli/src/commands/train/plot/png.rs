//! A picture as pixels: lines with smooth edges, and letters from a small table.

use std::io;

use super::{Anchor, Colour, HEIGHT, INK, Point, SCALE, Shape, WIDTH};

/// The letters from space on, 16 beside each other, each 5 wide with 1 between; the last one stands
/// for those that are not there.
const LETTERS: &str = include_str!("letters.txt");
const LETTERS_IN_ROW: usize = 16;
const LETTER_WIDTH: usize = 5;
const LETTER_ROWS: usize = 8;
/// The last row is for what hangs below the line.
const ROWS_ABOVE_LINE: usize = 7;

/// The picture as PNG.
pub(super) fn picture(shapes: &[Shape]) -> io::Result<Vec<u8>> {
    let mut canvas = Canvas::new();
    for shape in shapes {
        canvas.draw(shape);
    }
    let size = |pixels: usize| u32::try_from(pixels).map_err(io::Error::other);
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, size(canvas.width)?, size(canvas.height)?);
    encoder.set_color(png::ColorType::Rgb);
    // It is drawn while a run goes on, and not for long.
    encoder.set_compression(png::Compression::Fast);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(canvas.pixels.as_flattened())?;
    writer.finish()?;
    Ok(bytes)
}

struct Canvas {
    width: usize,
    height: usize,
    pixels: Vec<Colour>,
}

/// Pixels from `left` to before `right`, and so on.
struct Area {
    left: usize,
    right: usize,
    top: usize,
    bottom: usize,
}

impl Canvas {
    fn new() -> Self {
        let (width, height) = (whole(WIDTH * SCALE), whole(HEIGHT * SCALE));
        Self { width, height, pixels: vec![[0xff; 3]; width * height] }
    }

    fn draw(&mut self, shape: &Shape) {
        match shape {
            Shape::Line { points, colour, width } => {
                let points: Vec<Point> = points.iter().map(|point| scaled(*point)).collect();
                self.line(&points, *colour, width * SCALE / 2.0);
            }
            Shape::Dot { at, radius, colour } => {
                let at = scaled(*at);
                // A line from a point to itself has round ends.
                self.line(&[at, at], *colour, radius * SCALE);
            }
            Shape::Bar { at, size, colour } => {
                let (from, size) = (scaled(*at), scaled(*size));
                let area = self.area(from, (from.0 + size.0, from.1 + size.1), 0.0);
                for y in area.top..area.bottom {
                    self.pixels[y * self.width..][area.left..area.right].fill(*colour);
                }
            }
            Shape::Text { at, anchor, size, text } => self.text(scaled(*at), *anchor, *size, text),
        }
    }

    /// A line through points, so wide to each side of it.
    fn line(&mut self, points: &[Point], colour: Colour, reach: f64) {
        let ends = |least: Point, point: &Point| (least.0.min(point.0), least.1.min(point.1));
        let low = points.iter().fold((f64::MAX, f64::MAX), ends);
        let ends = |most: Point, point: &Point| (most.0.max(point.0), most.1.max(point.1));
        let high = points.iter().fold((0.0, 0.0), ends);
        let all = self.area(low, high, reach + 1.0);
        let row = all.right.saturating_sub(all.left);
        // How much of each pixel is covered. Where parts of the line meet it counts once.
        let mut covered = vec![0.0_f64; row * all.bottom.saturating_sub(all.top)];
        for pair in points.windows(2) {
            let (from, to) = (pair[0], pair[1]);
            let low = (from.0.min(to.0), from.1.min(to.1));
            let high = (from.0.max(to.0), from.1.max(to.1));
            let area = self.area(low, high, reach + 1.0);
            for y in area.top..area.bottom {
                for x in area.left..area.right {
                    let far = distance(middle(x, y), from, to);
                    let cover = &mut covered[(y - all.top) * row + x - all.left];
                    *cover = cover.max((reach + 0.5 - far).clamp(0.0, 1.0));
                }
            }
        }
        for (at, cover) in covered.into_iter().enumerate().filter(|(_, cover)| *cover > 0.0) {
            let (x, y) = (all.left + at % row, all.top + at / row);
            let pixel = &mut self.pixels[y * self.width + x];
            for (under, over) in pixel.iter_mut().zip(colour) {
                let mixed = f64::from(*under) * (1.0 - cover) + f64::from(over) * cover;
                *under = u8::try_from(whole(mixed)).unwrap_or(u8::MAX);
            }
        }
    }

    fn text(&mut self, at: Point, anchor: Anchor, size: f64, text: &str) {
        // Whole pixels keep letters sharp.
        let dot = whole(size * SCALE / 10.0).max(1);
        let letters = text.chars().count();
        let wide = (letters * (LETTER_WIDTH + 1)).saturating_sub(1) * dot;
        let back = match anchor {
            Anchor::Start => 0,
            Anchor::Middle => wide / 2,
            Anchor::End => wide,
        };
        let left = whole(at.0).saturating_sub(back);
        let top = whole(at.1).saturating_sub(ROWS_ABOVE_LINE * dot);
        let table: Vec<&[u8]> = LETTERS.lines().map(str::as_bytes).collect();
        for (number, letter) in text.chars().enumerate() {
            let left = left + number * (LETTER_WIDTH + 1) * dot;
            for (x, y) in dots(&table, letter) {
                self.square(left + x * dot, top + y * dot, dot);
            }
        }
    }

    fn square(&mut self, left: usize, top: usize, side: usize) {
        let right = (left + side).min(self.width);
        for y in top..(top + side).min(self.height) {
            self.pixels[y * self.width..][left.min(right)..right].fill(INK);
        }
    }

    /// The pixels between two corners and so much around them, as far as there are any.
    fn area(&self, low: Point, high: Point, around: f64) -> Area {
        Area {
            left: whole((low.0 - around).floor()).min(self.width),
            right: whole((high.0 + around).ceil()).min(self.width),
            top: whole((low.1 - around).floor()).min(self.height),
            bottom: whole((high.1 + around).ceil()).min(self.height),
        }
    }
}

/// The dots of a letter, by column and row.
fn dots<'a>(table: &'a [&[u8]], letter: char) -> impl Iterator<Item = (usize, usize)> + 'a {
    let place = match u8::try_from(letter) {
        Ok(code @ b' '..=b'~') => usize::from(code - b' '),
        _ => usize::from(b'~' - b' ') + 1,
    };
    let (band, column) = (place / LETTERS_IN_ROW, place % LETTERS_IN_ROW);
    let places = (0..LETTER_ROWS).flat_map(|y| (0..LETTER_WIDTH).map(move |x| (x, y)));
    places.filter(move |(x, y)| {
        let row = table.get(band * LETTER_ROWS + y);
        let dot = row.and_then(|row| row.get(column * (LETTER_WIDTH + 1) + x));
        dot == Some(&b'#')
    })
}

fn scaled((x, y): Point) -> Point {
    (x * SCALE, y * SCALE)
}

/// The middle of a pixel.
#[expect(clippy::cast_precision_loss, reason = "pixels of a small picture")]
fn middle(x: usize, y: usize) -> Point {
    (x as f64 + 0.5, y as f64 + 0.5)
}

/// The nearest whole number, none below 0.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
fn whole(number: f64) -> usize {
    number.round() as usize
}

/// How far a place is from a line between two others.
fn distance(place: Point, from: Point, to: Point) -> f64 {
    let along = (to.0 - from.0, to.1 - from.1);
    let off = (place.0 - from.0, place.1 - from.1);
    let length = along.0.powi(2) + along.1.powi(2);
    let part = if length > 0.0 { (off.0 * along.0 + off.1 * along.1) / length } else { 0.0 };
    let part = part.clamp(0.0, 1.0);
    let (x, y) = (off.0 - part * along.0, off.1 - part * along.1);
    // Not `hypot`, which is exact where that matters and takes twice as long.
    (x * x + y * y).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::{HELD_OUT, TRAINING, shapes, tests::record};
    use super::*;

    /// A picture as others read it.
    fn pixels(bytes: &[u8]) -> (usize, usize, Vec<Colour>) {
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let about = reader.next_frame(&mut pixels).unwrap();
        assert_eq!(
            (about.color_type, about.bit_depth),
            (png::ColorType::Rgb, png::BitDepth::Eight)
        );
        let pixels = pixels.as_chunks().0.to_vec();
        (about.width as usize, about.height as usize, pixels)
    }

    #[test]
    fn curves_are_where_the_figures_are() {
        let losses: Vec<f64> = (0..40_i32).map(|step| 4.0 * 0.95_f64.powi(step)).collect();
        let shapes = shapes(&record(&losses), "tinkex/tiny on talks.jsonl");
        let (width, height, pixels) = pixels(&picture(&shapes).unwrap());
        assert_eq!((width, height, pixels.len()), (1600, 880, 1600 * 880));
        let at = |(x, y): Point| pixels[whole(y * SCALE) * width + whole(x * SCALE)];
        let (mut curve, mut dots) = (0, 0);
        for shape in &shapes {
            match shape {
                Shape::Line { points, colour, .. } if *colour == TRAINING => {
                    // The dot of the evaluation covers the first of them.
                    for point in points.iter().skip(2) {
                        assert_eq!(at(*point), TRAINING, "{point:?}");
                        for off in [-15.0, 15.0] {
                            assert_ne!(at((point.0, point.1 + off)), TRAINING, "{point:?}");
                        }
                        curve += 1;
                    }
                }
                Shape::Dot { at: place, .. } => {
                    assert_eq!(at(*place), HELD_OUT);
                    assert_eq!(at((place.0 - 3.0, place.1)), HELD_OUT, "dots are round and full");
                    dots += 1;
                }
                _ => {}
            }
        }
        assert_eq!((curve, dots), (38, 1));
    }

    #[test]
    fn edges_of_lines_are_smooth() {
        let mut canvas = Canvas::new();
        canvas.line(&[(10.0, 10.0), (90.0, 50.0)], [0; 3], 1.0);
        let shades = canvas.pixels.iter().filter(|pixel| pixel[0] > 0 && pixel[0] < 255).count();
        assert!(shades > 100, "{shades}");
        // As dark as a line of that length and width.
        let ink: f64 = canvas.pixels.iter().map(|pixel| 1.0 - f64::from(pixel[0]) / 255.0).sum();
        let expected = 80_f64.hypot(40.0) * 2.0;
        assert!((ink / expected - 1.0).abs() < 0.05, "{ink} and {expected}");
    }

    #[test]
    fn there_is_a_letter_for_every_sign() {
        let table: Vec<&[u8]> = LETTERS.lines().map(str::as_bytes).collect();
        assert_eq!(table.len(), 6 * LETTER_ROWS);
        let wide = LETTERS_IN_ROW * (LETTER_WIDTH + 1) - 1;
        assert!(table.iter().all(|line| line.len() == wide));
        let drawn = |letter| dots(&table, letter).collect::<Vec<_>>();
        let all: Vec<_> = ('!'..='~').map(drawn).collect();
        assert!(all.iter().all(|letter| !letter.is_empty()));
        let mut different = all.clone();
        different.sort();
        different.dedup();
        assert_eq!(different.len(), all.len());
        assert!(drawn(' ').is_empty());
        assert_eq!(drawn('é'), drawn('日'));
        assert_eq!(drawn('1').iter().filter(|(x, _)| *x == 2).count(), 7);
    }

    #[test]
    fn letters_stand_on_their_line_and_end_where_they_should() {
        let mut canvas = Canvas::new();
        canvas.text((300.0, 100.0), Anchor::End, 12.0, "0.25");
        let inked = |(at, _): &(usize, &Colour)| (at % canvas.width, at / canvas.width);
        let ink = canvas.pixels.iter().enumerate().filter(|(_, pixel)| **pixel == INK);
        let places: Vec<_> = ink.map(|pixel| inked(&pixel)).collect();
        assert_eq!(places.iter().map(|place| place.0).max(), Some(299));
        assert_eq!(places.iter().map(|place| place.1).max(), Some(99));
        assert_eq!(places.iter().map(|place| place.1).min(), Some(100 - 7 * 2));
    }
}
