//! A picture as text.

use std::fmt::Write as _;

use super::{Anchor, Colour, HEIGHT, INK, Shape, WIDTH};

/// The picture as SVG.
pub(super) fn picture(shapes: &[Shape]) -> String {
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" fill=\"{}\">\n",
        hex(INK)
    );
    for shape in shapes {
        // A String takes all that is written to it.
        let _ = match shape {
            Shape::Line { points, colour, width } => {
                let places = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}"));
                let places = places.collect::<Vec<_>>().join(" ");
                let colour = hex(*colour);
                writeln!(
                    text,
                    "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" \
                     points=\"{places}\"/>"
                )
            }
            Shape::Dot { at: (x, y), radius, colour } => writeln!(
                text,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{}\"/>",
                hex(*colour)
            ),
            Shape::Bar { at: (x, y), size: (width, height), colour } => writeln!(
                text,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{}\"/>",
                hex(*colour)
            ),
            Shape::Text { at: (x, y), anchor, size, text: words } => {
                let anchor = match anchor {
                    Anchor::Start => "start",
                    Anchor::Middle => "middle",
                    Anchor::End => "end",
                };
                writeln!(
                    text,
                    "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" \
                     text-anchor=\"{anchor}\">{}</text>",
                    escaped(words)
                )
            }
        };
    }
    text + "</svg>\n"
}

fn hex([red, green, blue]: Colour) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::{shapes, tests::record};
    use super::*;

    #[test]
    fn words_cannot_break_the_picture() {
        let text = picture(&shapes(&record(&[2.0, 1.0]), "a <b> & c"));
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"), "{text}");
        assert!(text.contains(">a &lt;b&gt; &amp; c</text>"), "{text}");
        assert!(text.contains("stroke=\"#1f5fa8\" stroke-width=\"2\" points=\""), "{text}");
    }
}
