//! Plot of the loss of a run.
//!
//! This module computes the shapes of the plot, in SVG user units. `svg` and `png` render the shapes,
//! so that both formats show the same plot.

mod png;
mod svg;

use std::path::{Path, PathBuf};

use crate::error::CommandError;

use super::metrics_log::MetricsLog;

/// Size of the plot in units.
const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 440.0;
/// Margins for the title and the axes, in units.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 48.0;
/// Number of pixels per unit in the PNG format.
const SCALE: f64 = 2.0;
/// Maximum length of the title in characters; the legend is next to it.
const MAX_TITLE: usize = 50;

/// Red, green and blue.
type Color = [u8; 3];

const WHITE: Color = [0xff; 3];
const GRID: Color = [0xdd; 3];
/// Color of text.
const INK: Color = [0x33; 3];
/// Color of the unsmoothed training loss.
const TRAINING_NOISE: Color = [0x9d, 0xb8, 0xd9];
const TRAINING: Color = [0x1f, 0x5f, 0xa8];
const HELD_OUT: Color = [0xc8, 0x55, 0x1b];

type Point = (f64, f64);

/// Element of the plot. Later shapes cover earlier ones.
enum PlotShape {
    Line { points: Vec<Point>, color: Color, width: f64 },
    Dot { at: Point, radius: f64, color: Color },
    Rectangle { at: Point, size: Point, color: Color },
    Text { at: Point, anchor: TextAnchor, size: f64, text: String },
}

/// Part of a text that its coordinates refer to.
#[derive(Clone, Copy)]
enum TextAnchor {
    Start,
    Middle,
    End,
}

/// Format of the image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ImageKind {
    Svg,
    Png,
}

impl ImageKind {
    fn of(path: &Path) -> Option<Self> {
        let end = path.extension()?.to_str()?.to_ascii_lowercase();
        match end.as_str() {
            "svg" => Some(Self::Svg),
            "png" => Some(Self::Png),
            _ => None,
        }
    }
}

/// Parses the name of an image file.
pub(super) fn parse_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match ImageKind::of(&path) {
        Some(_) => Ok(path),
        None => Err("expected a name that ends in .svg or .png".to_owned()),
    }
}

/// Replaces the image file atomically. The extension selects the format; the default is SVG.
pub(super) fn draw(metrics: &MetricsLog, title: &str, path: &Path) -> Result<(), CommandError> {
    let shapes = shapes(metrics, title);
    let image = match ImageKind::of(path) {
        Some(ImageKind::Png) => png::render(&shapes),
        Some(ImageKind::Svg) | None => Ok(svg::render(&shapes).into_bytes()),
    };
    let written = image.and_then(|bytes| tinkex_files::write(path, bytes));
    written.map_err(|error| CommandError::file("write", path.display(), &error))
}

/// Lays out the plot.
#[expect(clippy::cast_precision_loss, reason = "coordinates of a plot")]
fn shapes(metrics: &MetricsLog, title: &str) -> Vec<PlotShape> {
    let finite = |points: Vec<Point>| -> Vec<Point> {
        points.into_iter().filter(|(_, loss)| loss.is_finite()).collect()
    };
    let steps = metrics.steps.iter().map(|line| (line.step as f64, line.loss));
    let steps = finite(steps.collect());
    let evals = metrics.evals.iter().map(|line| (line.step as f64, line.eval_loss));
    let evals = finite(evals.collect());
    let all = || steps.iter().chain(&evals);
    let last = all().map(|(step, _)| *step).fold(1.0, f64::max);
    let highest = all().map(|(_, loss)| *loss).fold(f64::MIN_POSITIVE, f64::max);
    let ticks = ticks(highest);
    let top = ticks.last().copied().unwrap_or(highest).max(highest);
    let x = |step: f64| LEFT + (WIDTH - LEFT - RIGHT) * step / last;
    let y = |loss: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / top;

    let text = |x, y, anchor, text| PlotShape::Text { at: (x, y), anchor, size: 12.0, text };
    let mut shapes = vec![
        PlotShape::Rectangle { at: (0.0, 0.0), size: (WIDTH, HEIGHT), color: WHITE },
        PlotShape::Text {
            at: (LEFT, 24.0),
            anchor: TextAnchor::Start,
            size: 15.0,
            text: truncate(title),
        },
    ];
    for tick in ticks {
        let points = vec![(LEFT, y(tick)), (WIDTH - RIGHT, y(tick))];
        shapes.push(PlotShape::Line { points, color: GRID, width: 1.0 });
        shapes.push(text(LEFT - 8.0, y(tick) + 4.0, TextAnchor::End, tick_label(tick)));
    }
    let mut marks: Vec<f64> = (0..=4).map(|part| (last * f64::from(part) / 4.0).round()).collect();
    marks.dedup();
    for step in marks {
        shapes.push(text(x(step), HEIGHT - BOTTOM + 20.0, TextAnchor::Middle, step.to_string()));
    }
    let middle = WIDTH.midpoint(LEFT - RIGHT);
    shapes.push(text(middle, HEIGHT - 10.0, TextAnchor::Middle, "steps".to_owned()));

    let line = |points: &[Point], color, width| {
        let positions: Vec<Point> =
            points.iter().map(|(step, loss)| (x(*step), y(*loss))).collect();
        PlotShape::Line { points: visible_points(&positions), color, width }
    };
    shapes.push(line(&steps, TRAINING_NOISE, 1.0));
    shapes.push(line(&smooth(&steps), TRAINING, 2.0));
    shapes.push(line(&evals, HELD_OUT, 2.0));
    for (step, loss) in &evals {
        shapes.push(PlotShape::Dot { at: (x(*step), y(*loss)), radius: 3.5, color: HELD_OUT });
    }
    let legend =
        [(TRAINING, "training loss", true), (HELD_OUT, "held-out loss", !evals.is_empty())];
    for (at, (color, label, _)) in legend.into_iter().filter(|(.., shown)| *shown).enumerate() {
        let at = WIDTH - RIGHT - 120.0 * (2 - at) as f64;
        shapes.push(PlotShape::Rectangle { at: (at, 16.0), size: (14.0, 4.0), color });
        shapes.push(text(at + 20.0, 23.0, TextAnchor::Start, label.to_owned()));
    }
    shapes
}

/// Returns evenly spaced round numbers from 0 to at least `highest`.
fn ticks(highest: f64) -> Vec<f64> {
    let rough = highest / 5.0;
    let power = 10_f64.powf(rough.log10().floor());
    let fits = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|part| part * power >= rough);
    let step = fits.unwrap_or(10.0) * power;
    let mut ticks = vec![0.0];
    while let Some(last) = ticks.last().copied().filter(|last| *last < highest && ticks.len() < 12)
    {
        ticks.push(last + step);
    }
    ticks
}

/// Returns the exponential moving average, which shows the trend through the noise.
fn smooth(points: &[Point]) -> Vec<Point> {
    #[expect(clippy::cast_precision_loss, reason = "a count of points")]
    let keep = 1.0 - 1.0 / (points.len() as f64 / 20.0).clamp(1.0, 20.0);
    let mut mean = None;
    let next = |(step, loss): &Point| {
        let now = mean.map_or(*loss, |before: f64| before * keep + loss * (1.0 - keep));
        mean = Some(now);
        (*step, now)
    };
    points.iter().map(next).collect()
}

/// Reduces the points to those that are visible: in each column of pixels the first, the highest,
/// the lowest and the last.
fn visible_points(points: &[Point]) -> Vec<Point> {
    let column = |point: &Point| (point.0 * SCALE).floor();
    let reduce = |group: &[Point]| {
        let by_height = |a: &&Point, b: &&Point| a.1.total_cmp(&b.1);
        let mut ends: Vec<Point> = group
            .iter()
            .min_by(by_height)
            .into_iter()
            .chain(group.iter().max_by(by_height))
            .copied()
            .collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut visible: Vec<Point> =
            group.first().copied().into_iter().chain(ends).chain(group.last().copied()).collect();
        visible.dedup();
        visible
    };
    points.chunk_by(|a, b| column(a) == column(b)).flat_map(reduce).collect()
}

fn tick_label(number: f64) -> String {
    let text = format!("{number:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn truncate(title: &str) -> String {
    if title.chars().count() <= MAX_TITLE {
        return title.to_owned();
    }
    title.chars().take(MAX_TITLE - 3).chain("...".chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::metrics_log::{EvalLine, StepLine, StepMetrics};
    use super::*;

    /// Returns metrics with these losses and one evaluation.
    pub(super) fn metrics_with(losses: &[f64]) -> MetricsLog {
        let line = |(step, loss): (usize, &f64)| StepLine {
            step: step as u64 + 1,
            epoch: 0.0,
            loss: *loss,
            learning_rate: 0.0,
            tokens: 1,
            tokens_per_second: 1.0,
            metrics: StepMetrics::new(),
        };
        let evals = vec![EvalLine { step: 1, eval_loss: 2.0, metrics: StepMetrics::new() }];
        MetricsLog {
            steps: losses.iter().enumerate().map(line).collect(),
            evals,
            ..MetricsLog::default()
        }
    }

    #[test]
    fn every_point_is_inside_the_axes() {
        for losses in [vec![], vec![0.0], vec![3.2, 1.5, f64::NAN, 0.2], vec![1e-9; 3], vec![4e7]] {
            for shape in shapes(&metrics_with(&losses), "a title") {
                let PlotShape::Line { points, .. } = shape else { continue };
                for (x, y) in points {
                    assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{x} of {losses:?}");
                    assert!((TOP - 1.0..=HEIGHT - BOTTOM).contains(&y), "{y} of {losses:?}");
                }
            }
        }
    }

    #[test]
    fn ticks_are_round_numbers_and_reach_the_highest_value() {
        assert_eq!(ticks(4.3), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert!(*ticks(0.037).last().unwrap() >= 0.037);
    }

    #[test]
    fn a_long_run_is_reduced_to_its_visible_points() {
        let long: Vec<Point> = (0..100_000)
            .map(|at| (f64::from(at) / 200.0, if at == 777 { 9.0 } else { f64::from(at % 7) }))
            .collect();
        let thin = visible_points(&long);
        assert!(thin.len() <= 4 * 1000, "{}", thin.len());
        assert!(thin.contains(&long[777]), "the peak is kept");
        assert_eq!((thin.first(), thin.last()), (long.first(), long.last()));
        assert!(thin.is_sorted_by(|a, b| a.0 <= b.0));
    }

    #[test]
    fn the_extension_selects_the_format() {
        assert_eq!(ImageKind::of(Path::new("a/b.PNG")), Some(ImageKind::Png));
        assert_eq!(ImageKind::of(Path::new("b.x.svg")), Some(ImageKind::Svg));
        for wrong in ["loss.jpg", "loss", "png", ".svg"] {
            assert!(parse_file(wrong).is_err(), "{wrong}");
        }
    }
}
