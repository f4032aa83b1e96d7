//! Writes a plot as SVG.

use std::fmt::Write as _;

use super::layout::{Anchor, BACKGROUND, CURVES, HEIGHT, LETTERS, Label, Rectangle, Shape, WIDTH};

/// Returns an SVG document with these shapes.
pub(super) fn render(shapes: &[Shape]) -> String {
    let Rectangle { x, y, width, height } = CURVES;
    let mut document = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" fill=\"{LETTERS}\">\n\
         <clipPath id=\"area\"><rect x=\"{x}\" y=\"{y}\" width=\"{width}\" \
         height=\"{height}\"/></clipPath>\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"{BACKGROUND}\"/>\n"
    );
    let is_curve = |shape: &Shape| matches!(shape, Shape::Curve { .. } | Shape::Dot { .. });
    for group in shapes.chunk_by(|a, b| is_curve(a) == is_curve(b)) {
        let elements: String = group.iter().map(element).collect();
        if is_curve(&group[0]) {
            let _ = write!(document, "<g clip-path=\"url(#area)\">\n{elements}</g>\n");
        } else {
            document.push_str(&elements);
        }
    }
    document + "</svg>\n"
}

/// Writes a shape as an element on a line.
fn element(shape: &Shape) -> String {
    match shape {
        Shape::Box { area: Rectangle { x, y, width, height }, color } => format!(
            "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" \
             fill=\"{color}\"/>\n"
        ),
        Shape::Stroke { from, to, color } => format!(
            "<path d=\"M{:.1} {:.1}L{:.1} {:.1}\" stroke=\"{color}\"/>\n",
            from.0, from.1, to.0, to.1
        ),
        Shape::Label(label) => text(label),
        Shape::Curve { points, color, width } => {
            let positions = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}"));
            format!(
                "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"{width}\" \
                 stroke-linejoin=\"round\" points=\"{}\"/>\n",
                positions.collect::<Vec<_>>().join(" ")
            )
        }
        Shape::Dot { center: (x, y), radius, color } => {
            format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{color}\"/>\n")
        }
    }
}

fn text(label: &Label) -> String {
    let Label { x, y, anchor, size, upwards, text } = label;
    let position = if *upwards {
        format!("transform=\"translate({x} {y:.1}) rotate(-90)\"")
    } else {
        format!("x=\"{x:.1}\" y=\"{y:.1}\"")
    };
    let anchor = match anchor {
        Anchor::Start => "start",
        Anchor::Middle => "middle",
        Anchor::End => "end",
    };
    let text = escape(text);
    format!("<text {position} font-size=\"{size}\" text-anchor=\"{anchor}\">{text}</text>\n")
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    // XML allows no control characters.
    text.chars().filter(|letter| !letter.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::layout::shapes;
    use super::super::{Plot, tests::plot_of};

    fn render(plot: &Plot) -> String {
        super::render(&shapes(plot))
    }

    #[test]
    fn text_is_escaped_and_axes_have_titles() {
        let plot = Plot { title: "a <b>\u{1b} & c".to_owned(), ..plot_of(&[2.0, 1.0]) };
        let text = render(&plot);
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"), "{text}");
        for part in [">a &lt;b&gt; &amp; c</text>", ">step</text>", ">loss per token</text>"] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        assert!(text.contains("stroke=\"#1f5fa8\" stroke-width=\"2\""), "{text}");
        assert!(!text.contains("smoothed"), "two points are not smoothed");
    }

    #[test]
    fn the_legend_names_the_raw_and_the_smoothed_line() {
        let mut losses = vec![2.0; 50];
        losses[20] = 1e9;
        let text = render(&plot_of(&losses));
        for part in [">training</text>", ">training, smoothed</text>", ">held out</text>"] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        assert!(text.contains(">1 value outside the range</text>"), "{text}");
    }

    #[test]
    fn every_run_can_be_drawn() {
        for losses in [vec![], vec![0.0], vec![3.2, 1.5, f64::NAN, 0.2], vec![1e-9; 3], vec![4e7]] {
            let text = render(&plot_of(&losses));
            assert!(!text.contains("NaN") && !text.contains("inf"), "{losses:?}: {text}");
        }
    }
}
