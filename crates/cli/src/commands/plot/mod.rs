//! Plots of the numbers of a run, as an image and in the terminal.
//!
//! | Module | Contents |
//! |---|---|
//! | `scale` | ticks, the range of the vertical axis, and smoothing |
//! | `layout` | the shapes of the image |
//! | `svg` | the image as text |
//! | `png` | the image as pixels |
//! | `terminal` | the plot made of characters |

mod layout;
mod png;
mod scale;
mod svg;
mod terminal;

use std::path::{Path, PathBuf};

use crate::context::CommandContext;
use crate::error::CommandError;

pub(crate) use terminal::TerminalPlot;

/// Number of a step, and a value at that step.
pub(crate) type PlotPoint = (f64, f64);

/// Titles and values of a plot.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plot {
    pub(crate) title: String,
    /// Name of the vertical axis, such as `loss per token`.
    pub(crate) y_title: &'static str,
    /// Values of all steps.
    pub(crate) training: Vec<PlotPoint>,
    /// Values of the held-out data.
    pub(crate) held_out: Vec<PlotPoint>,
}

impl Plot {
    /// Creates a plot. Values that are not finite are omitted.
    pub(crate) fn new(
        title: String,
        y_title: &'static str,
        training: impl Iterator<Item = PlotPoint>,
        held_out: impl Iterator<Item = PlotPoint>,
    ) -> Self {
        let is_finite = |(_, value): &PlotPoint| value.is_finite();
        Self {
            title,
            y_title,
            training: training.filter(is_finite).collect(),
            held_out: held_out.filter(is_finite).collect(),
        }
    }

    /// Replaces the image file atomically. The extension selects the format; the default is SVG.
    pub(crate) fn write(&self, path: &Path) -> Result<(), CommandError> {
        let shapes = layout::shapes(self);
        let image = match ImageKind::of(path) {
            Some(ImageKind::Png) => png::render(&shapes),
            Some(ImageKind::Svg) | None => Ok(svg::render(&shapes).into_bytes()),
        };
        let written = image.and_then(|bytes| tinkex_files::write(path, bytes));
        written.map_err(|error| CommandError::file("write", path.display(), &error))
    }

    /// Returns the last step, at least 1.
    fn last_step(&self) -> f64 {
        let points = self.training.iter().chain(&self.held_out);
        points.map(|(step, _)| *step).fold(1.0, f64::max)
    }
}

/// Draws numbers, the first of which belongs to step 1, for standard output.
pub(crate) fn draw_numbers(
    context: &CommandContext<'_>,
    y_title: &'static str,
    numbers: &[f64],
) -> String {
    let steps = (1_u32..).map(f64::from);
    let points = steps.zip(numbers.iter().copied());
    let plot = Plot::new(String::new(), y_title, points, std::iter::empty());
    TerminalPlot::for_output(context).draw(&plot)
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
pub(crate) fn parse_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match ImageKind::of(&path) {
        Some(_) => Ok(path),
        None => Err("expected a name that ends in .svg or .png".to_owned()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a plot of these losses with one held-out value.
    pub(super) fn plot_of(losses: &[f64]) -> Plot {
        #[expect(clippy::cast_precision_loss, reason = "a few steps")]
        let points = losses.iter().enumerate().map(|(step, loss)| (step as f64 + 1.0, *loss));
        Plot::new("a title".to_owned(), "loss per token", points, [(1.0, 2.0)].into_iter())
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
