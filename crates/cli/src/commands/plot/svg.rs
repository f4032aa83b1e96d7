//! Lays out a plot as SVG.

use std::fmt::Write as _;

use super::scale::{Axis, robust_range, smooth};
use super::{Plot, PlotPoint};

/// Size of the image in units.
const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 460.0;
/// Number of pixels per unit in the PNG format.
pub(super) const SCALE: f32 = 2.0;
/// Margins for the title, the legend and the axes, in units.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 28.0;
const TOP: f64 = 72.0;
const BOTTOM: f64 = 60.0;
/// Maximum length of the title in characters.
const MAX_TITLE: usize = 80;
/// Mean width of a character of the legend, in units.
const LETTER: f64 = 6.9;

const GRID: &str = "#dddddd";
const AXIS: &str = "#888888";
const NOISE: &str = "#a9c1dd";
const TRAINING: &str = "#1f5fa8";
const HELD_OUT: &str = "#c8551b";

/// Returns the plot as an SVG document.
pub(super) fn render(plot: &Plot) -> String {
    let (low, high) = robust_range(&[&plot.training, &plot.held_out]);
    let smoothed = smooth(&plot.training, (low, high));
    let y_axis = Axis::covering(low, high, 5);
    let x_axis = Axis::of_steps(plot.last_step(), 8);
    let mut canvas = Canvas::new(x_axis, y_axis);
    canvas.axes(plot.y_title);
    canvas.text(LEFT, 28.0, "start", 16, &truncate(&plot.title));

    let mut legend = Vec::new();
    let mut curves = String::new();
    if let Some(smoothed) = &smoothed {
        curves += &canvas.line(&plot.training, NOISE, 1.0);
        curves += &canvas.line(smoothed, TRAINING, 2.0);
        legend.push((NOISE, "training"));
        legend.push((TRAINING, "training, smoothed"));
    } else {
        curves += &canvas.line(&plot.training, TRAINING, 2.0);
        legend.push((TRAINING, "training"));
    }
    if !plot.held_out.is_empty() {
        curves += &canvas.line(&plot.held_out, HELD_OUT, 2.0);
        for point in &plot.held_out {
            let (x, y) = canvas.place(*point);
            let _ = writeln!(
                curves,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{HELD_OUT}\"/>"
            );
        }
        legend.push((HELD_OUT, "held out"));
    }
    let _ = write!(canvas.text, "<g clip-path=\"url(#area)\">\n{curves}</g>\n");
    canvas.legend(&legend);
    let top = canvas.y_axis.high;
    let bottom = canvas.y_axis.low;
    let outside = plot.training.iter().chain(&plot.held_out);
    let outside = outside.filter(|(_, value)| *value > top || *value < bottom).count();
    if outside > 0 {
        let values = if outside == 1 { "value" } else { "values" };
        let note = format!("{outside} {values} outside the range");
        canvas.text(WIDTH - RIGHT, 50.0, "end", 12, &note);
    }
    canvas.text + "</svg>\n"
}

/// SVG document with axes.
struct Canvas {
    text: String,
    x_axis: Axis,
    y_axis: Axis,
}

impl Canvas {
    fn new(x_axis: Axis, y_axis: Axis) -> Self {
        let (width, height) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
        // The clip area is 4 units larger on each side, so that dots on the axes are not cut.
        let (x, y, width, height) = (LEFT - 4.0, TOP - 4.0, width + 8.0, height + 8.0);
        let text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" fill=\"#333333\">\n\
             <clipPath id=\"area\"><rect x=\"{x}\" y=\"{y}\" width=\"{width}\" \
             height=\"{height}\"/></clipPath>\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
        );
        Self { text, x_axis, y_axis }
    }

    /// Returns the coordinates of a point.
    fn place(&self, (step, value): PlotPoint) -> (f64, f64) {
        let x = LEFT + (WIDTH - LEFT - RIGHT) * self.x_axis.position(step);
        let y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * self.y_axis.position(value);
        // Renderers use 32-bit numbers, which overflow for extreme values. The clip path hides
        // everything outside the axes anyway.
        (x, y.clamp(-HEIGHT, 2.0 * HEIGHT))
    }

    fn axes(&mut self, y_title: &str) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in self.y_axis.ticks.clone() {
            let (_, y) = self.place((0.0, tick));
            self.stroke((LEFT, y), (right, y), GRID);
            let label = self.y_axis.label(tick);
            self.text(LEFT - 8.0, y + 4.0, "end", 12, &label);
        }
        for tick in self.x_axis.ticks.clone() {
            let (x, _) = self.place((tick, 0.0));
            self.stroke((x, bottom), (x, bottom + 5.0), AXIS);
            let label = self.x_axis.label(tick);
            self.text(x, bottom + 20.0, "middle", 12, &label);
        }
        self.stroke((LEFT, bottom), (right, bottom), AXIS);
        self.text(LEFT.midpoint(right), HEIGHT - 14.0, "middle", 13, "step");
        let (x, y) = (22.0, TOP.midpoint(bottom));
        let _ = writeln!(
            self.text,
            "<text transform=\"translate({x} {y:.1}) rotate(-90)\" font-size=\"13\" \
             text-anchor=\"middle\">{}</text>",
            escape(y_title)
        );
    }

    fn legend(&mut self, entries: &[(&str, &str)]) {
        let mut x = LEFT;
        for (color, label) in entries {
            let _ = writeln!(
                self.text,
                "<rect x=\"{x:.1}\" y=\"44\" width=\"20\" height=\"3\" fill=\"{color}\"/>"
            );
            self.text(x + 26.0, 50.0, "start", 12, label);
            #[expect(clippy::cast_precision_loss, reason = "a short text")]
            let width = label.chars().count() as f64 * LETTER;
            x += 26.0 + width + 22.0;
        }
    }

    fn stroke(&mut self, from: PlotPoint, to: PlotPoint, color: &str) {
        let _ = writeln!(
            self.text,
            "<path d=\"M{:.1} {:.1}L{:.1} {:.1}\" stroke=\"{color}\"/>",
            from.0, from.1, to.0, to.1
        );
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, size: u32, text: &str) {
        let _ = writeln!(
            self.text,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" \
             text-anchor=\"{anchor}\">{}</text>",
            escape(text)
        );
    }

    /// Returns a line through points.
    fn line(&self, points: &[PlotPoint], color: &str, width: f64) -> String {
        let placed: Vec<PlotPoint> = points.iter().map(|point| self.place(*point)).collect();
        let positions = visible_points(&placed).into_iter().map(|(x, y)| format!("{x:.1},{y:.1}"));
        format!(
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"{width}\" \
             stroke-linejoin=\"round\" points=\"{}\"/>\n",
            positions.collect::<Vec<_>>().join(" ")
        )
    }
}

/// Reduces the points to those that are visible: in each column of pixels the first, the highest,
/// the lowest and the last.
fn visible_points(points: &[PlotPoint]) -> Vec<PlotPoint> {
    let column = |point: &PlotPoint| (point.0 * f64::from(SCALE)).floor();
    let reduce = |group: &[PlotPoint]| {
        let by_height = |a: &&PlotPoint, b: &&PlotPoint| a.1.total_cmp(&b.1);
        let mut ends: Vec<PlotPoint> = group
            .iter()
            .min_by(by_height)
            .into_iter()
            .chain(group.iter().max_by(by_height))
            .copied()
            .collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut visible: Vec<PlotPoint> =
            group.first().copied().into_iter().chain(ends).chain(group.last().copied()).collect();
        visible.dedup();
        visible
    };
    points.chunk_by(|a, b| column(a) == column(b)).flat_map(reduce).collect()
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    // XML allows no control characters.
    text.chars().filter(|letter| !letter.is_control()).collect()
}

fn truncate(title: &str) -> String {
    if title.chars().count() <= MAX_TITLE {
        return title.to_owned();
    }
    title.chars().take(MAX_TITLE - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::plot_of;
    use super::*;

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

    #[test]
    fn a_long_run_is_reduced_to_its_visible_points() {
        let long: Vec<PlotPoint> = (0..100_000)
            .map(|at| (f64::from(at) / 200.0, if at == 777 { 9.0 } else { f64::from(at % 7) }))
            .collect();
        let thin = visible_points(&long);
        assert!(thin.len() <= 4 * 1000, "{}", thin.len());
        assert!(thin.contains(&long[777]), "the peak is kept");
        assert_eq!((thin.first(), thin.last()), (long.first(), long.last()));
        assert!(thin.is_sorted_by(|a, b| a.0 <= b.0));
    }
}
