//! Draws a plot as PNG, with a font that is part of the program.

use std::io::{self, Write as _};

use flate2::write::ZlibEncoder;
use flate2::{Compression, Crc};
use tiny_skia::{
    FillRule, LineJoin, Mask, Paint, Path, PathBuilder, Pixmap, Rect, Stroke, Transform,
};
use ttf_parser::{Face, OutlineBuilder};

use super::layout::{
    Anchor, BACKGROUND, CURVES, Color, HEIGHT, LETTERS, Label, Rectangle, SCALE, Shape, WIDTH,
};

/// DejaVu Sans with Latin, Greek and Cyrillic letters. `DejaVuSans-LICENSE.txt` is its licence.
const FONT: &[u8] = include_bytes!("DejaVuSans-subset.ttf");
/// First bytes of every PNG file.
const SIGNATURE: [u8; 8] = *b"\x89PNG\r\n\x1a\n";

/// Returns a PNG file with these shapes.
pub(super) fn render(shapes: &[Shape]) -> io::Result<Vec<u8>> {
    let image = draw(shapes).ok_or_else(|| io::Error::other("the image cannot be drawn"))?;
    encode(&image)
}

/// Draws the shapes. Returns `None` if the font or the size of the image is not valid.
fn draw(shapes: &[Shape]) -> Option<Pixmap> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small constant")]
    let pixels = |units: f64| (units as f32 * SCALE) as u32;
    let mut image = Pixmap::new(pixels(WIDTH), pixels(HEIGHT))?;
    image.fill(skia_color(BACKGROUND));
    let mut area = Mask::new(image.width(), image.height())?;
    let to_pixels = Transform::from_scale(SCALE, SCALE);
    area.fill_path(&PathBuilder::from_rect(skia_rect(CURVES)?), FillRule::Winding, true, to_pixels);
    let face = Face::parse(FONT, 0).ok()?;
    for shape in shapes {
        match shape {
            Shape::Box { area, color } => {
                image.fill_rect(skia_rect(*area)?, &paint(*color), to_pixels, None);
            }
            Shape::Stroke { from, to, color } => {
                let line = polyline(&[*from, *to]);
                stroke(&mut image, line.as_ref(), *color, 1.0, None);
            }
            Shape::Curve { points, color, width } => {
                let line = polyline(points);
                stroke(&mut image, line.as_ref(), *color, *width, Some(&area));
            }
            Shape::Dot { center, radius, color } => {
                let disc =
                    PathBuilder::from_circle(single(center.0), single(center.1), single(*radius));
                if let Some(disc) = disc {
                    let paint = paint(*color);
                    image.fill_path(&disc, &paint, FillRule::Winding, to_pixels, Some(&area));
                }
            }
            Shape::Label(label) => {
                let text = TextOutline::new(&face, &label.text);
                let Some(path) = text.builder.finish() else { continue };
                let placed = place(label, text.width, f32::from(face.units_per_em()));
                image.fill_path(&path, &paint(LETTERS), FillRule::Winding, placed, None);
            }
        }
    }
    Some(image)
}

fn stroke(image: &mut Pixmap, path: Option<&Path>, color: Color, width: f64, mask: Option<&Mask>) {
    // A line of one point has no path.
    let Some(path) = path else { return };
    let stroke = Stroke { width: single(width), line_join: LineJoin::Round, ..Stroke::default() };
    let to_pixels = Transform::from_scale(SCALE, SCALE);
    image.stroke_path(path, &paint(color), &stroke, to_pixels, mask);
}

fn polyline(points: &[(f64, f64)]) -> Option<Path> {
    let mut builder = PathBuilder::new();
    for (index, (x, y)) in points.iter().enumerate() {
        if index == 0 {
            builder.move_to(single(*x), single(*y));
        } else {
            builder.line_to(single(*x), single(*y));
        }
    }
    builder.finish()
}

fn paint(color: Color) -> Paint<'static> {
    let mut paint = Paint::default();
    paint.set_color(skia_color(color));
    paint
}

fn skia_color(Color(rgb): Color) -> tiny_skia::Color {
    let [_, red, green, blue] = rgb.to_be_bytes();
    tiny_skia::Color::from_rgba8(red, green, blue, u8::MAX)
}

fn skia_rect(area: Rectangle) -> Option<Rect> {
    Rect::from_xywh(single(area.x), single(area.y), single(area.width), single(area.height))
}

/// Converts a coordinate to the precision of the renderer.
#[expect(clippy::cast_possible_truncation, reason = "coordinates are small")]
fn single(value: f64) -> f32 {
    value as f32
}

/// Outline of a line of text in the units of the font, with y upwards.
struct TextOutline {
    builder: PathBuilder,
    /// Sum of the advances of all letters.
    width: f32,
}

impl TextOutline {
    /// Places the letters side by side. A letter that the font does not have is a box.
    fn new(face: &Face<'_>, text: &str) -> Self {
        let mut outline = Self { builder: PathBuilder::new(), width: 0.0 };
        for letter in text.chars().filter(|letter| !letter.is_control()) {
            let Some(glyph) = face.glyph_index(letter) else {
                outline.add_box(f32::from(face.units_per_em()));
                continue;
            };
            face.outline_glyph(glyph, &mut outline);
            outline.width += f32::from(face.glyph_hor_advance(glyph).unwrap_or_default());
        }
        outline
    }

    /// Adds the box for a missing letter, in a font of `em` units.
    fn add_box(&mut self, em: f32) {
        let right = 0.5 * em;
        let top = 0.7 * em;
        let line = 0.08 * em;
        self.move_to(line, 0.0);
        self.line_to(right, 0.0);
        self.line_to(right, top);
        self.line_to(line, top);
        self.close();
        // The inner edge runs in the other direction, so that the area inside is empty.
        self.move_to(2.0 * line, line);
        self.line_to(2.0 * line, top - line);
        self.line_to(right - line, top - line);
        self.line_to(right - line, line);
        self.close();
        self.width += right + line;
    }
}

impl OutlineBuilder for TextOutline {
    fn move_to(&mut self, x: f32, y: f32) {
        self.builder.move_to(self.width + x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        self.builder.line_to(self.width + x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        self.builder.quad_to(self.width + x1, y1, self.width + x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let start = self.width;
        self.builder.cubic_to(start + x1, y1, start + x2, y2, start + x, y);
    }

    fn close(&mut self) {
        self.builder.close();
    }
}

/// Returns the transformation of an outline of `width` units of the font to pixels.
fn place(label: &Label, width: f32, units_per_em: f32) -> Transform {
    let offset = match label.anchor {
        Anchor::Start => 0.0,
        Anchor::Middle => -width / 2.0,
        Anchor::End => -width,
    };
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let size = label.size as f32 / units_per_em;
    let angle = if label.upwards { -90.0 } else { 0.0 };
    Transform::from_translate(offset, 0.0)
        .post_scale(size, -size)
        .post_concat(Transform::from_rotate(angle))
        .post_translate(single(label.x), single(label.y))
        .post_scale(SCALE, SCALE)
}

/// Writes an opaque image as a PNG file with 8 bits per channel.
fn encode(image: &Pixmap) -> io::Result<Vec<u8>> {
    let mut compressed = ZlibEncoder::new(Vec::new(), Compression::default());
    let row_bytes = image.data().len() / image.height() as usize;
    for row in image.data().chunks_exact(row_bytes) {
        // Each row starts with the number of its filter: 0 for none.
        let mut bytes = vec![0];
        // The image is opaque, so that the colors are not multiplied and alpha is not needed.
        bytes.extend(row.chunks_exact(4).flat_map(|pixel| &pixel[..3]));
        compressed.write_all(&bytes)?;
    }
    let mut header = Vec::new();
    header.extend(image.width().to_be_bytes());
    header.extend(image.height().to_be_bytes());
    // 8 bits per channel, colors without alpha, and the only methods of compression, filtering and
    // interlacing.
    header.extend([8, 2, 0, 0, 0]);
    let mut file = SIGNATURE.to_vec();
    write_chunk(&mut file, *b"IHDR", &header)?;
    write_chunk(&mut file, *b"IDAT", &compressed.finish()?)?;
    write_chunk(&mut file, *b"IEND", &[])?;
    Ok(file)
}

fn write_chunk(file: &mut Vec<u8>, kind: [u8; 4], data: &[u8]) -> io::Result<()> {
    let length = u32::try_from(data.len()).map_err(io::Error::other)?;
    let mut crc = Crc::new();
    crc.update(&kind);
    crc.update(data);
    file.extend(length.to_be_bytes());
    file.extend(kind);
    file.extend(data);
    file.extend(crc.sum().to_be_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::ZlibDecoder;

    use super::super::layout::shapes;
    use super::super::tests::plot_of;
    use super::*;

    /// Returns the number of dark pixels in a part of the image. Bounds are in units of the plot.
    fn dark_pixels(image: &Pixmap, left: u32, top: u32, width: u32, height: u32) -> usize {
        let scale = 2;
        let rows = top * scale..(top + height) * scale;
        let columns = || left * scale..(left + width) * scale;
        let dark = |x, y| image.pixel(x, y).is_some_and(|pixel| pixel.red() < 128);
        rows.map(|y| columns().filter(|x| dark(*x, y)).count()).sum()
    }

    #[test]
    fn the_image_has_text_and_a_curve() {
        let image = draw(&shapes(&plot_of(&[4.0, 3.0, 2.0, 1.0]))).unwrap();
        assert_eq!((image.width(), image.height()), (1600, 920));
        let title = dark_pixels(&image, 76, 10, 80, 24);
        assert!(title > 100, "the title is drawn: {title}");
        assert!(dark_pixels(&image, 8, 150, 30, 200) > 100, "the title of the axis is drawn");
        assert!(dark_pixels(&image, 80, 80, 680, 300) > 100, "the curve is drawn");
        let empty = draw(&shapes(&plot_of(&[]))).unwrap();
        assert!(dark_pixels(&empty, 300, 80, 400, 200) == 0, "no curve");
    }

    #[test]
    fn every_run_can_be_drawn_and_letters_outside_of_the_font_are_boxes() {
        let mut plot = plot_of(&[4e37, 0.0, 1.0]);
        plot.title = "損失\u{1b}".to_owned();
        let image = draw(&shapes(&plot)).unwrap();
        assert!(dark_pixels(&image, 76, 10, 80, 24) > 20, "two boxes");
    }

    #[test]
    fn the_file_contains_the_pixels() {
        let image = draw(&shapes(&plot_of(&[2.0, 1.0]))).unwrap();
        let file = encode(&image).unwrap();
        assert!(file.starts_with(&SIGNATURE));
        assert_eq!(file[16..24], [0, 0, 6, 64, 0, 0, 3, 152], "1600 × 920");
        let data = &file[file.windows(4).position(|four| four == b"IDAT").unwrap() + 4..];
        let mut pixels = Vec::new();
        ZlibDecoder::new(data).read_to_end(&mut pixels).unwrap();
        assert_eq!(pixels.len(), 920 * (1 + 3 * 1600));
        assert_eq!(pixels[..4], [0, 255, 255, 255], "no filter, white");
        // The end is the same in every PNG file, with its checksum.
        assert!(file.ends_with(b"\0\0\0\0IEND\xaeB`\x82"));
    }
}
