//! Renders the plot as SVG.

use std::fmt::Write as _;

use super::{Color, HEIGHT, INK, PlotShape, TextAnchor, WIDTH};

pub(super) fn render(shapes: &[PlotShape]) -> String {
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" fill=\"{}\">\n",
        hex(INK)
    );
    for shape in shapes {
        // Writing to a String cannot fail.
        let _ = match shape {
            PlotShape::Line { points, color, width } => {
                let positions = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}"));
                let positions = positions.collect::<Vec<_>>().join(" ");
                let color = hex(*color);
                writeln!(
                    text,
                    "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"{width}\" \
                     points=\"{positions}\"/>"
                )
            }
            PlotShape::Dot { at: (x, y), radius, color } => writeln!(
                text,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{}\"/>",
                hex(*color)
            ),
            PlotShape::Rectangle { at: (x, y), size: (width, height), color } => writeln!(
                text,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{}\"/>",
                hex(*color)
            ),
            PlotShape::Text { at: (x, y), anchor, size, text: label } => {
                let anchor = match anchor {
                    TextAnchor::Start => "start",
                    TextAnchor::Middle => "middle",
                    TextAnchor::End => "end",
                };
                writeln!(
                    text,
                    "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" \
                     text-anchor=\"{anchor}\">{}</text>",
                    escape(label)
                )
            }
        };
    }
    text + "</svg>\n"
}

fn hex([red, green, blue]: Color) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::{shapes, tests::metrics_with};
    use super::*;

    #[test]
    fn text_is_escaped() {
        let text = render(&shapes(&metrics_with(&[2.0, 1.0]), "a <b> & c"));
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"), "{text}");
        assert!(text.contains(">a &lt;b&gt; &amp; c</text>"), "{text}");
        assert!(text.contains("stroke=\"#1f5fa8\" stroke-width=\"2\" points=\""), "{text}");
    }
}
