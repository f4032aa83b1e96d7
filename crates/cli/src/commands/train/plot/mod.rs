//! The loss of a run as a picture.
//!
//! What is drawn is decided here, in units of a picture of one size; `svg` writes it down and `png`
//! paints it, so both show the same.

mod png;
mod svg;

use std::path::{Path, PathBuf};

use crate::error::CommandError;

use super::metrics_log::MetricsLog;

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 440.0;
/// Room for the axes.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 48.0;
/// Pixels in a unit, of a picture that has pixels.
const SCALE: f64 = 2.0;
/// What fits beside the legend.
const LONGEST_TITLE: usize = 50;

/// Red, green and blue.
type Colour = [u8; 3];

const WHITE: Colour = [0xff; 3];
const GRID: Colour = [0xdd; 3];
const INK: Colour = [0x33; 3];
const TRAINING_NOISE: Colour = [0x9d, 0xb8, 0xd9];
const TRAINING: Colour = [0x1f, 0x5f, 0xa8];
const HELD_OUT: Colour = [0xc8, 0x55, 0x1b];

type Point = (f64, f64);

/// Something that is drawn. Later ones cover earlier ones.
enum Shape {
    Line { points: Vec<Point>, colour: Colour, width: f64 },
    Dot { at: Point, radius: f64, colour: Colour },
    Bar { at: Point, size: Point, colour: Colour },
    Text { at: Point, anchor: Anchor, size: f64, text: String },
}

/// Which part of a text stands at its place.
#[derive(Clone, Copy)]
enum Anchor {
    Start,
    Middle,
    End,
}

/// The forms a picture can have.
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

/// The name of a file that can be drawn to.
pub(super) fn file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match ImageKind::of(&path) {
        Some(_) => Ok(path),
        None => Err("give a name that ends in .svg or .png".to_owned()),
    }
}

/// Draws the loss of a run into a file, all or nothing. Its name says how.
pub(super) fn draw(record: &MetricsLog, title: &str, path: &Path) -> Result<(), CommandError> {
    let shapes = shapes(record, title);
    let picture = match ImageKind::of(path) {
        Some(ImageKind::Png) => png::picture(&shapes),
        Some(ImageKind::Svg) | None => Ok(svg::picture(&shapes).into_bytes()),
    };
    let written = picture.and_then(|bytes| tinkex_files::write(path, bytes));
    written.map_err(|why| CommandError::file("written", &path.display().to_string(), &why))
}

/// What the picture of a run shows.
#[expect(clippy::cast_precision_loss, reason = "places in a picture")]
fn shapes(record: &MetricsLog, title: &str) -> Vec<Shape> {
    let finite = |points: Vec<Point>| -> Vec<Point> {
        points.into_iter().filter(|(_, loss)| loss.is_finite()).collect()
    };
    let steps = record.steps.iter().map(|line| (line.step as f64, line.loss));
    let steps = finite(steps.collect());
    let evals = record.evals.iter().map(|line| (line.step as f64, line.eval_loss));
    let evals = finite(evals.collect());
    let all = || steps.iter().chain(&evals);
    let last = all().map(|(step, _)| *step).fold(1.0, f64::max);
    let most = all().map(|(_, loss)| *loss).fold(f64::MIN_POSITIVE, f64::max);
    let ticks = ticks(most);
    let top = ticks.last().copied().unwrap_or(most).max(most);
    let x = |step: f64| LEFT + (WIDTH - LEFT - RIGHT) * step / last;
    let y = |loss: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / top;

    let text = |x, y, anchor, text| Shape::Text { at: (x, y), anchor, size: 12.0, text };
    let mut shapes = vec![
        Shape::Bar { at: (0.0, 0.0), size: (WIDTH, HEIGHT), colour: WHITE },
        Shape::Text { at: (LEFT, 24.0), anchor: Anchor::Start, size: 15.0, text: cut(title) },
    ];
    for tick in ticks {
        let points = vec![(LEFT, y(tick)), (WIDTH - RIGHT, y(tick))];
        shapes.push(Shape::Line { points, colour: GRID, width: 1.0 });
        shapes.push(text(LEFT - 8.0, y(tick) + 4.0, Anchor::End, short(tick)));
    }
    let mut marks: Vec<f64> = (0..=4).map(|part| (last * f64::from(part) / 4.0).round()).collect();
    marks.dedup();
    for step in marks {
        shapes.push(text(x(step), HEIGHT - BOTTOM + 20.0, Anchor::Middle, step.to_string()));
    }
    let middle = WIDTH.midpoint(LEFT - RIGHT);
    shapes.push(text(middle, HEIGHT - 10.0, Anchor::Middle, "steps".to_owned()));

    let line = |points: &[Point], colour, width| {
        let places: Vec<Point> = points.iter().map(|(step, loss)| (x(*step), y(*loss))).collect();
        Shape::Line { points: thin(&places), colour, width }
    };
    shapes.push(line(&steps, TRAINING_NOISE, 1.0));
    shapes.push(line(&smooth(&steps), TRAINING, 2.0));
    shapes.push(line(&evals, HELD_OUT, 2.0));
    for (step, loss) in &evals {
        shapes.push(Shape::Dot { at: (x(*step), y(*loss)), radius: 3.5, colour: HELD_OUT });
    }
    let legend =
        [(TRAINING, "training loss", true), (HELD_OUT, "held-out loss", !evals.is_empty())];
    for (at, (colour, label, _)) in legend.into_iter().filter(|(.., shown)| *shown).enumerate() {
        let at = WIDTH - RIGHT - 120.0 * (2 - at) as f64;
        shapes.push(Shape::Bar { at: (at, 16.0), size: (14.0, 4.0), colour });
        shapes.push(text(at + 20.0, 23.0, Anchor::Start, label.to_owned()));
    }
    shapes
}

/// Round numbers from 0 to at least `most`.
fn ticks(most: f64) -> Vec<f64> {
    let rough = most / 5.0;
    let power = 10_f64.powf(rough.log10().floor());
    let fits = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|part| part * power >= rough);
    let step = fits.unwrap_or(10.0) * power;
    let mut ticks = vec![0.0];
    while let Some(last) = ticks.last().copied().filter(|last| *last < most && ticks.len() < 12) {
        ticks.push(last + step);
    }
    ticks
}

/// A mean that forgets, so that the way down is seen through the noise.
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

/// What can be seen of a line: of all points in a column of pixels the first, the highest, the
/// lowest and the last. A long run has many more.
fn thin(points: &[Point]) -> Vec<Point> {
    let column = |point: &Point| (point.0 * SCALE).floor();
    let seen = |group: &[Point]| {
        let by_height = |a: &&Point, b: &&Point| a.1.total_cmp(&b.1);
        let mut ends: Vec<Point> = group
            .iter()
            .min_by(by_height)
            .into_iter()
            .chain(group.iter().max_by(by_height))
            .copied()
            .collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut kept: Vec<Point> =
            group.first().copied().into_iter().chain(ends).chain(group.last().copied()).collect();
        kept.dedup();
        kept
    };
    points.chunk_by(|a, b| column(a) == column(b)).flat_map(seen).collect()
}

fn short(number: f64) -> String {
    let text = format!("{number:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn cut(title: &str) -> String {
    if title.chars().count() <= LONGEST_TITLE {
        return title.to_owned();
    }
    title.chars().take(LONGEST_TITLE - 3).chain("...".chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::metrics_log::{EvalLine, StepLine};
    use super::*;

    pub(super) fn record(losses: &[f64]) -> MetricsLog {
        let line = |(step, loss): (usize, &f64)| StepLine {
            step: step as u64 + 1,
            epoch: 0.0,
            loss: *loss,
            learning_rate: 0.0,
            tokens: 1,
            tokens_per_second: 1.0,
        };
        let evals = vec![EvalLine { step: 1, eval_loss: 2.0 }];
        MetricsLog {
            steps: losses.iter().enumerate().map(line).collect(),
            evals,
            ..MetricsLog::default()
        }
    }

    #[test]
    fn every_point_is_within_the_picture() {
        for losses in [vec![], vec![0.0], vec![3.2, 1.5, f64::NAN, 0.2], vec![1e-9; 3], vec![4e7]] {
            for shape in shapes(&record(&losses), "a title") {
                let Shape::Line { points, .. } = shape else { continue };
                for (x, y) in points {
                    assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{x} of {losses:?}");
                    assert!((TOP - 1.0..=HEIGHT - BOTTOM).contains(&y), "{y} of {losses:?}");
                }
            }
        }
    }

    #[test]
    fn ticks_are_round_and_reach_the_top() {
        assert_eq!(ticks(4.3), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert!(*ticks(0.037).last().unwrap() >= 0.037);
    }

    #[test]
    fn a_long_run_keeps_what_can_be_seen_of_it() {
        let long: Vec<Point> = (0..100_000)
            .map(|at| (f64::from(at) / 200.0, if at == 777 { 9.0 } else { f64::from(at % 7) }))
            .collect();
        let thin = thin(&long);
        assert!(thin.len() <= 4 * 1000, "{}", thin.len());
        assert!(thin.contains(&long[777]), "the peak stays");
        assert_eq!((thin.first(), thin.last()), (long.first(), long.last()));
        assert!(thin.is_sorted_by(|a, b| a.0 <= b.0));
    }

    #[test]
    fn names_say_the_form() {
        assert_eq!(ImageKind::of(Path::new("a/b.PNG")), Some(ImageKind::Png));
        assert_eq!(ImageKind::of(Path::new("b.x.svg")), Some(ImageKind::Svg));
        for wrong in ["loss.jpg", "loss", "png", ".svg"] {
            assert!(file(wrong).is_err(), "{wrong}");
        }
    }
}
