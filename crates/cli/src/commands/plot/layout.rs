//! Lays out a plot: computes the shapes that `svg` and `png` draw.

use std::fmt;

use super::scale::{Axis, robust_range, smooth};
use super::{Plot, PlotPoint};

/// Size of the image in units.
pub(super) const WIDTH: f64 = 800.0;
pub(super) const HEIGHT: f64 = 460.0;
/// Number of pixels per unit in the PNG format.
pub(super) const SCALE: f32 = 2.0;
/// Margins for the title, the legend and the axes, in units.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 28.0;
const TOP: f64 = 72.0;
const BOTTOM: f64 = 60.0;
/// Distance by which curves may leave the area between the axes, so that dots on the axes are whole.
const OVERHANG: f64 = 4.0;
/// Maximum length of the title in characters.
const MAX_TITLE: usize = 80;
/// Mean width of a character of the legend, in units.
const LETTER: f64 = 6.9;

pub(super) const BACKGROUND: Color = Color(0xff_ff_ff);
pub(super) const LETTERS: Color = Color(0x33_33_33);
const GRID: Color = Color(0xdd_dd_dd);
const AXIS: Color = Color(0x88_88_88);
const NOISE: Color = Color(0xa9_c1_dd);
const TRAINING: Color = Color(0x1f_5f_a8);
const HELD_OUT: Color = Color(0xc8_55_1b);

/// Opaque color: red, green and blue in the lower three bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Color(pub(super) u32);

impl fmt::Display for Color {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{:06x}", self.0)
    }
}

/// Part of a text that is at its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// Rectangle in units.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rectangle {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

/// Text on a baseline that starts, is centered or ends at `(x, y)`.
#[derive(Clone, Debug)]
pub(super) struct Label {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) anchor: Anchor,
    /// Size of the font in units.
    pub(super) size: u32,
    /// Whether the text runs from bottom to top.
    pub(super) upwards: bool,
    pub(super) text: String,
}

/// Shape to draw.
#[derive(Clone, Debug)]
pub(super) enum Shape {
    Box {
        area: Rectangle,
        color: Color,
    },
    /// Line of width 1.
    Stroke {
        from: PlotPoint,
        to: PlotPoint,
        color: Color,
    },
    Label(Label),
    /// Line through points, of which the part inside of [`CURVES`] is drawn.
    Curve {
        points: Vec<PlotPoint>,
        color: Color,
        width: f64,
    },
    /// Disc, of which the part inside of [`CURVES`] is drawn.
    Dot {
        center: PlotPoint,
        radius: f64,
        color: Color,
    },
}

/// Area in which curves and dots are visible.
pub(super) const CURVES: Rectangle = Rectangle {
    x: LEFT - OVERHANG,
    y: TOP - OVERHANG,
    width: WIDTH - LEFT - RIGHT + 2.0 * OVERHANG,
    height: HEIGHT - TOP - BOTTOM + 2.0 * OVERHANG,
};

/// Returns the shapes of a plot in the order in which they are drawn. Curves and dots are adjacent.
pub(super) fn shapes(plot: &Plot) -> Vec<Shape> {
    let (low, high) = robust_range(&[&plot.training, &plot.held_out]);
    let smoothed = smooth(&plot.training, (low, high));
    let y_axis = Axis::covering(low, high, 5);
    let x_axis = Axis::of_steps(plot.last_step(), 8);
    let mut canvas = Canvas { shapes: Vec::new(), x_axis, y_axis };
    canvas.axes(plot.y_title);
    canvas.text(LEFT, 28.0, Anchor::Start, 16, &truncate(&plot.title));

    let mut legend = Vec::new();
    if let Some(smoothed) = &smoothed {
        canvas.curve(&plot.training, NOISE, 1.0);
        canvas.curve(smoothed, TRAINING, 2.0);
        legend.push((NOISE, "training"));
        legend.push((TRAINING, "training, smoothed"));
    } else {
        canvas.curve(&plot.training, TRAINING, 2.0);
        legend.push((TRAINING, "training"));
    }
    if !plot.held_out.is_empty() {
        canvas.curve(&plot.held_out, HELD_OUT, 2.0);
        for point in &plot.held_out {
            let center = canvas.place(*point);
            canvas.shapes.push(Shape::Dot { center, radius: 3.5, color: HELD_OUT });
        }
        legend.push((HELD_OUT, "held out"));
    }
    canvas.legend(&legend);
    let top = canvas.y_axis.high;
    let bottom = canvas.y_axis.low;
    let outside = plot.training.iter().chain(&plot.held_out);
    let outside = outside.filter(|(_, value)| *value > top || *value < bottom).count();
    if outside > 0 {
        let values = if outside == 1 { "value" } else { "values" };
        let note = format!("{outside} {values} outside the range");
        canvas.text(WIDTH - RIGHT, 50.0, Anchor::End, 12, &note);
    }
    canvas.shapes
}

/// Shapes of a plot with its axes.
struct Canvas {
    shapes: Vec<Shape>,
    x_axis: Axis,
    y_axis: Axis,
}

impl Canvas {
    /// Returns the coordinates of a point.
    fn place(&self, (step, value): PlotPoint) -> PlotPoint {
        let x = LEFT + (WIDTH - LEFT - RIGHT) * self.x_axis.position(step);
        let y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * self.y_axis.position(value);
        // Renderers use 32-bit numbers, which overflow for extreme values. Curves are clipped to the
        // axes anyway.
        (x, y.clamp(-HEIGHT, 2.0 * HEIGHT))
    }

    fn axes(&mut self, y_title: &str) {
        let right = WIDTH - RIGHT;
        let bottom = HEIGHT - BOTTOM;
        for tick in self.y_axis.ticks.clone() {
            let (_, y) = self.place((0.0, tick));
            self.stroke((LEFT, y), (right, y), GRID);
            let label = self.y_axis.label(tick);
            self.text(LEFT - 8.0, y + 4.0, Anchor::End, 12, &label);
        }
        for tick in self.x_axis.ticks.clone() {
            let (x, _) = self.place((tick, 0.0));
            self.stroke((x, bottom), (x, bottom + 5.0), AXIS);
            let label = self.x_axis.label(tick);
            self.text(x, bottom + 20.0, Anchor::Middle, 12, &label);
        }
        self.stroke((LEFT, bottom), (right, bottom), AXIS);
        self.text(LEFT.midpoint(right), HEIGHT - 14.0, Anchor::Middle, 13, "step");
        self.shapes.push(Shape::Label(Label {
            x: 22.0,
            y: TOP.midpoint(bottom),
            anchor: Anchor::Middle,
            size: 13,
            upwards: true,
            text: y_title.to_owned(),
        }));
    }

    fn legend(&mut self, entries: &[(Color, &str)]) {
        let mut x = LEFT;
        for (color, label) in entries {
            let area = Rectangle { x, y: 44.0, width: 20.0, height: 3.0 };
            self.shapes.push(Shape::Box { area, color: *color });
            self.text(x + 26.0, 50.0, Anchor::Start, 12, label);
            #[expect(clippy::cast_precision_loss, reason = "a short text")]
            let width = label.chars().count() as f64 * LETTER;
            x += 26.0 + width + 22.0;
        }
    }

    fn stroke(&mut self, from: PlotPoint, to: PlotPoint, color: Color) {
        self.shapes.push(Shape::Stroke { from, to, color });
    }

    fn text(&mut self, x: f64, y: f64, anchor: Anchor, size: u32, text: &str) {
        let text = text.to_owned();
        self.shapes.push(Shape::Label(Label { x, y, anchor, size, upwards: false, text }));
    }

    fn curve(&mut self, points: &[PlotPoint], color: Color, width: f64) {
        let placed: Vec<PlotPoint> = points.iter().map(|point| self.place(*point)).collect();
        self.shapes.push(Shape::Curve { points: visible_points(&placed), color, width });
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

fn truncate(title: &str) -> String {
    if title.chars().count() <= MAX_TITLE {
        return title.to_owned();
    }
    title.chars().take(MAX_TITLE - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
