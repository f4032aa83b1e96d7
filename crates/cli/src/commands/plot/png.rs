//! Renders the SVG as PNG, with a font that is part of the program.

use std::io;

use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree};

use super::svg::SCALE;

/// DejaVu Sans with Latin, Greek and Cyrillic letters. `DejaVuSans-LICENSE.txt` is its licence.
const FONT: &[u8] = include_bytes!("DejaVuSans-subset.ttf");
/// Name of the font in [`FONT`].
const FAMILY: &str = "DejaVu Sans";

pub(super) fn render(svg: &str) -> io::Result<Vec<u8>> {
    let mut options = Options { font_family: FAMILY.to_owned(), ..Options::default() };
    let fonts = options.fontdb_mut();
    fonts.load_font_data(FONT.to_vec());
    fonts.set_sans_serif_family(FAMILY);
    let tree = Tree::from_str(svg, &options).map_err(io::Error::other)?;
    let too_large = || io::Error::other("the image is too large");
    let size = tree.size().to_int_size().scale_by(SCALE).ok_or_else(too_large)?;
    let mut pixels = Pixmap::new(size.width(), size.height()).ok_or_else(too_large)?;
    resvg::render(&tree, Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
    pixels.encode_png().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use resvg::tiny_skia::PixmapRef;

    use super::super::{svg, tests::plot_of};
    use super::*;

    fn decode(bytes: &[u8]) -> Pixmap {
        Pixmap::decode_png(bytes).unwrap()
    }

    /// Returns the number of dark pixels in a part of the image. Bounds are in units of the SVG.
    fn dark_pixels(image: PixmapRef<'_>, left: u32, top: u32, width: u32, height: u32) -> usize {
        let scale = 2;
        let rows = top * scale..(top + height) * scale;
        let columns = || left * scale..(left + width) * scale;
        let dark = |x, y| image.pixel(x, y).is_some_and(|pixel| pixel.red() < 128);
        rows.map(|y| columns().filter(|x| dark(*x, y)).count()).sum()
    }

    #[test]
    fn the_image_has_text_and_a_curve() {
        let image = decode(&render(&svg::render(&plot_of(&[4.0, 3.0, 2.0, 1.0]))).unwrap());
        assert_eq!((image.width(), image.height()), (1600, 920));
        let title = dark_pixels(image.as_ref(), 76, 10, 80, 24);
        assert!(title > 100, "the title is drawn: {title}");
        assert!(
            dark_pixels(image.as_ref(), 8, 150, 30, 200) > 100,
            "the title of the axis is drawn"
        );
        assert!(dark_pixels(image.as_ref(), 80, 80, 680, 300) > 100, "the curve is drawn");
        let empty = decode(&render(&svg::render(&plot_of(&[]))).unwrap());
        assert!(dark_pixels(empty.as_ref(), 300, 80, 400, 200) == 0, "no curve");
    }
}
