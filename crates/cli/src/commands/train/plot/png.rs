//! Renders the plot as PNG: anti-aliased lines, and text in a small bitmap font.

use std::io;

use super::{Color, HEIGHT, INK, PlotShape, Point, SCALE, TextAnchor, WHITE, WIDTH};

/// Bitmap font: printable ASCII from the space on, 16 glyphs per band, each 5 dots wide with 1 dot
/// between. The last glyph replaces all other characters.
const LETTERS: &str = include_str!("letters.txt");
/// Number of glyphs per band.
const LETTERS_IN_BAND: usize = 16;
/// Width of a glyph in dots, without the space after it.
const LETTER_WIDTH: usize = 5;
/// Height of a glyph in dots.
const LETTER_ROWS: usize = 8;
/// Rows above the baseline; the last row is for descenders.
const ROWS_ABOVE_BASELINE: usize = 7;

pub(super) fn render(shapes: &[PlotShape]) -> io::Result<Vec<u8>> {
    let mut canvas = Canvas::new();
    for shape in shapes {
        canvas.draw(shape);
    }
    let size = |pixels: usize| u32::try_from(pixels).map_err(io::Error::other);
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, size(canvas.width)?, size(canvas.height)?);
    encoder.set_color(png::ColorType::Rgb);
    // The image is replaced often during a run, so speed matters more than size.
    encoder.set_compression(png::Compression::Fast);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(canvas.pixels.as_flattened())?;
    writer.finish()?;
    Ok(bytes)
}

struct Canvas {
    width: usize,
    height: usize,
    pixels: Vec<Color>,
}

/// Rectangle of pixels; `right` and `bottom` are exclusive.
struct PixelArea {
    left: usize,
    right: usize,
    top: usize,
    bottom: usize,
}

impl Canvas {
    fn new() -> Self {
        let (width, height) = (whole(WIDTH * SCALE), whole(HEIGHT * SCALE));
        Self { width, height, pixels: vec![WHITE; width * height] }
    }

    fn draw(&mut self, shape: &PlotShape) {
        match shape {
            PlotShape::Line { points, color, width } => {
                let points: Vec<Point> = points.iter().map(|point| scaled(*point)).collect();
                self.line(&points, *color, width * SCALE / 2.0);
            }
            PlotShape::Dot { at, radius, color } => {
                let at = scaled(*at);
                // A line of length 0 with round ends is a circle.
                self.line(&[at, at], *color, radius * SCALE);
            }
            PlotShape::Rectangle { at, size, color } => {
                let (from, size) = (scaled(*at), scaled(*size));
                let area = self.area(from, (from.0 + size.0, from.1 + size.1), 0.0);
                for y in area.top..area.bottom {
                    self.pixels[y * self.width..][area.left..area.right].fill(*color);
                }
            }
            PlotShape::Text { at, anchor, size, text } => {
                self.text(scaled(*at), *anchor, *size, text);
            }
        }
    }

    /// Draws a line through points. `half_width` is in pixels.
    fn line(&mut self, points: &[Point], color: Color, half_width: f64) {
        let minimum = |least: Point, point: &Point| (least.0.min(point.0), least.1.min(point.1));
        let low = points.iter().fold((f64::MAX, f64::MAX), minimum);
        let maximum = |most: Point, point: &Point| (most.0.max(point.0), most.1.max(point.1));
        let high = points.iter().fold((0.0, 0.0), maximum);
        let all = self.area(low, high, half_width + 1.0);
        let row = all.right.saturating_sub(all.left);
        // Coverage of each pixel. The maximum, not the sum: segments overlap where they meet.
        let mut covered = vec![0.0_f64; row * all.bottom.saturating_sub(all.top)];
        for pair in points.windows(2) {
            let (from, to) = (pair[0], pair[1]);
            let low = (from.0.min(to.0), from.1.min(to.1));
            let high = (from.0.max(to.0), from.1.max(to.1));
            let area = self.area(low, high, half_width + 1.0);
            for y in area.top..area.bottom {
                for x in area.left..area.right {
                    let distance = distance_to_segment(pixel_center(x, y), from, to);
                    let cover = &mut covered[(y - all.top) * row + x - all.left];
                    *cover = cover.max((half_width + 0.5 - distance).clamp(0.0, 1.0));
                }
            }
        }
        for (at, cover) in covered.into_iter().enumerate().filter(|(_, cover)| *cover > 0.0) {
            let (x, y) = (all.left + at % row, all.top + at / row);
            let pixel = &mut self.pixels[y * self.width + x];
            for (under, over) in pixel.iter_mut().zip(color) {
                let mixed = f64::from(*under) * (1.0 - cover) + f64::from(over) * cover;
                *under = u8::try_from(whole(mixed)).unwrap_or(u8::MAX);
            }
        }
    }

    fn text(&mut self, at: Point, anchor: TextAnchor, size: f64, text: &str) {
        // Glyphs are scaled by whole pixels to stay sharp.
        let dot = whole(size * SCALE / 10.0).max(1);
        let letters = text.chars().count();
        let text_width = (letters * (LETTER_WIDTH + 1)).saturating_sub(1) * dot;
        let offset = match anchor {
            TextAnchor::Start => 0,
            TextAnchor::Middle => text_width / 2,
            TextAnchor::End => text_width,
        };
        let left = whole(at.0).saturating_sub(offset);
        let top = whole(at.1).saturating_sub(ROWS_ABOVE_BASELINE * dot);
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

    /// Returns the pixels between two corners, extended by `margin` and clipped to the canvas.
    fn area(&self, low: Point, high: Point, margin: f64) -> PixelArea {
        PixelArea {
            left: whole((low.0 - margin).floor()).min(self.width),
            right: whole((high.0 + margin).ceil()).min(self.width),
            top: whole((low.1 - margin).floor()).min(self.height),
            bottom: whole((high.1 + margin).ceil()).min(self.height),
        }
    }
}

/// Returns the dots of a glyph as column and row.
fn dots<'a>(table: &'a [&[u8]], letter: char) -> impl Iterator<Item = (usize, usize)> + 'a {
    let glyph = match u8::try_from(letter) {
        Ok(code @ b' '..=b'~') => usize::from(code - b' '),
        _ => usize::from(b'~' - b' ') + 1,
    };
    let (band, column) = (glyph / LETTERS_IN_BAND, glyph % LETTERS_IN_BAND);
    let positions = (0..LETTER_ROWS).flat_map(|y| (0..LETTER_WIDTH).map(move |x| (x, y)));
    positions.filter(move |(x, y)| {
        let row = table.get(band * LETTER_ROWS + y);
        let dot = row.and_then(|row| row.get(column * (LETTER_WIDTH + 1) + x));
        dot == Some(&b'#')
    })
}

fn scaled((x, y): Point) -> Point {
    (x * SCALE, y * SCALE)
}

#[expect(clippy::cast_precision_loss, reason = "pixels of a small image")]
fn pixel_center(x: usize, y: usize) -> Point {
    (x as f64 + 0.5, y as f64 + 0.5)
}

/// Rounds to the nearest whole number, at least 0.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn whole(number: f64) -> usize {
    number.round() as usize
}

/// Returns the distance of a point from a line segment.
fn distance_to_segment(point: Point, from: Point, to: Point) -> f64 {
    let along = (to.0 - from.0, to.1 - from.1);
    let off = (point.0 - from.0, point.1 - from.1);
    let length = along.0.powi(2) + along.1.powi(2);
    let part = if length > 0.0 { (off.0 * along.0 + off.1 * along.1) / length } else { 0.0 };
    let part = part.clamp(0.0, 1.0);
    let (x, y) = (off.0 - part * along.0, off.1 - part * along.1);
    // `hypot` would take twice as long to avoid an overflow that cannot occur here.
    (x * x + y * y).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::{HELD_OUT, TRAINING, shapes, tests::metrics_with};
    use super::*;

    /// Decodes an image.
    fn pixels(bytes: &[u8]) -> (usize, usize, Vec<Color>) {
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.color_type, info.bit_depth), (png::ColorType::Rgb, png::BitDepth::Eight));
        let pixels = pixels.as_chunks().0.to_vec();
        (info.width as usize, info.height as usize, pixels)
    }

    #[test]
    fn curves_and_dots_are_at_their_coordinates() {
        let losses: Vec<f64> = (0..40_i32).map(|step| 4.0 * 0.95_f64.powi(step)).collect();
        let shapes = shapes(&metrics_with(&losses), "tinkex/tiny on examples.jsonl");
        let (width, height, pixels) = pixels(&render(&shapes).unwrap());
        assert_eq!((width, height, pixels.len()), (1600, 880, 1600 * 880));
        let at = |(x, y): Point| pixels[whole(y * SCALE) * width + whole(x * SCALE)];
        let (mut curve, mut dots) = (0, 0);
        for shape in &shapes {
            match shape {
                PlotShape::Line { points, color, .. } if *color == TRAINING => {
                    // The evaluation's dot covers the first points.
                    for point in points.iter().skip(2) {
                        assert_eq!(at(*point), TRAINING, "{point:?}");
                        for off in [-15.0, 15.0] {
                            assert_ne!(at((point.0, point.1 + off)), TRAINING, "{point:?}");
                        }
                        curve += 1;
                    }
                }
                PlotShape::Dot { at: center, .. } => {
                    assert_eq!(at(*center), HELD_OUT);
                    assert_eq!(at((center.0 - 3.0, center.1)), HELD_OUT, "dots are filled circles");
                    dots += 1;
                }
                _ => {}
            }
        }
        assert_eq!((curve, dots), (38, 1));
    }

    #[test]
    fn lines_are_anti_aliased() {
        let mut canvas = Canvas::new();
        canvas.line(&[(10.0, 10.0), (90.0, 50.0)], [0; 3], 1.0);
        let shades = canvas.pixels.iter().filter(|pixel| pixel[0] > 0 && pixel[0] < 255).count();
        assert!(shades > 100, "{shades}");
        // The ink equals the area of the line.
        let ink: f64 = canvas.pixels.iter().map(|pixel| 1.0 - f64::from(pixel[0]) / 255.0).sum();
        let expected = 80_f64.hypot(40.0) * 2.0;
        assert!((ink / expected - 1.0).abs() < 0.05, "{ink} and {expected}");
    }

    #[test]
    fn every_printable_character_has_a_glyph() {
        let table: Vec<&[u8]> = LETTERS.lines().map(str::as_bytes).collect();
        assert_eq!(table.len(), 6 * LETTER_ROWS);
        let wide = LETTERS_IN_BAND * (LETTER_WIDTH + 1) - 1;
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
    fn text_is_aligned_to_its_baseline_and_anchor() {
        let mut canvas = Canvas::new();
        canvas.text((300.0, 100.0), TextAnchor::End, 12.0, "0.25");
        let inked = |(at, _): &(usize, &Color)| (at % canvas.width, at / canvas.width);
        let ink = canvas.pixels.iter().enumerate().filter(|(_, pixel)| **pixel == INK);
        let positions: Vec<_> = ink.map(|pixel| inked(&pixel)).collect();
        assert_eq!(positions.iter().map(|position| position.0).max(), Some(299));
        assert_eq!(positions.iter().map(|position| position.1).max(), Some(99));
        assert_eq!(positions.iter().map(|position| position.1).min(), Some(100 - 7 * 2));
    }
}
