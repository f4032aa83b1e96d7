//! What the caller sends along with the targets of a datum.

use super::settings::Loss;
use crate::{Error, Result};

/// What the caller sent along for one datum; each slice is aligned with the targets.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inputs<'a> {
    /// What each target counts; 1 if absent.
    pub weights: Option<&'a [f32]>,
    /// The log-probabilities that the targets were sampled with.
    pub logprobs: Option<&'a [f32]>,
    /// How much better than expected each target was.
    pub advantages: Option<&'a [f32]>,
    /// Lower bounds, in place of the loss's own.
    pub clip_low: Option<&'a [f32]>,
    /// Upper bounds, in place of the loss's own.
    pub clip_high: Option<&'a [f32]>,
    /// Nonzero where a token counts for the ratio of the datum.
    pub sequence_ratio_mask: Option<&'a [f32]>,
    /// Nonzero where a token was sampled; only `stable_reinforce` reads it.
    pub sampled_mask: Option<&'a [f32]>,
}

impl Loss {
    /// Whether a datum with targets of this shape and these inputs can be run.
    ///
    /// Asked before a model runs, so that a bad request costs nothing.
    ///
    /// # Errors
    /// [`Error::Shape`] for several targets per position where the loss takes one,
    /// [`Error::MissingInput`], [`Error::Length`], [`Error::NonFiniteInput`], or [`Error::Invalid`]
    /// for bounds that cross.
    pub fn check(&self, target_shape: &[usize], inputs: &Inputs<'_>) -> Result<()> {
        let count = match (self, target_shape) {
            (_, &[count]) => count,
            (Self::CrossEntropy, &[rows, columns]) => rows * columns,
            (_, shape) => {
                return Err(Error::Shape {
                    what: format!("target_tokens of {}", self.name()),
                    expected: shape.first().map(|&rows| vec![rows]).unwrap_or_default(),
                    got: shape.to_vec(),
                });
            }
        };
        let needs: &[(&str, Option<&[f32]>)] = match self {
            Self::CrossEntropy => &[],
            Self::Gspo(_) => &[
                ("logprobs", inputs.logprobs),
                ("advantages", inputs.advantages),
                ("sequence_ratio_mask", inputs.sequence_ratio_mask),
            ],
            Self::StableReinforce { .. } => &[
                ("logprobs", inputs.logprobs),
                ("advantages", inputs.advantages),
                ("sampled_mask", inputs.sampled_mask),
            ],
            _ => &[("logprobs", inputs.logprobs), ("advantages", inputs.advantages)],
        };
        for (field, given) in needs {
            if given.is_none() {
                let what = self.name().to_owned();
                return Err(Error::MissingInput { what, field: (*field).to_owned() });
            }
        }
        for (field, values) in self.reads(inputs) {
            let Some(values) = values else { continue };
            if values.len() != count {
                let field = field.to_owned();
                return Err(Error::Length { field, expected: count, got: values.len() });
            }
            if let Some(index) = values.iter().position(|value| !value.is_finite()) {
                // A token that never counts may say that it had no chance.
                let idle = |at: usize| inputs.advantages.is_some_and(|a| a.get(at) == Some(&0.0));
                let excused = |at: usize| values[at] == f32::NEG_INFINITY && idle(at);
                let bad = |at: &usize| !values[*at].is_finite() && !excused(*at);
                let first =
                    if field == "logprobs" { (index..values.len()).find(bad) } else { Some(index) };
                if let Some(index) = first {
                    let (field, value) = (field.to_owned(), values[index]);
                    return Err(Error::NonFiniteInput { field, index, value });
                }
            }
        }
        self.check_bounds(count, inputs)
    }

    /// The inputs that this loss reads.
    fn reads<'a>(
        &self,
        inputs: &Inputs<'a>,
    ) -> impl Iterator<Item = (&'static str, Option<&'a [f32]>)> {
        let rl = !matches!(self, Self::CrossEntropy);
        let clips = self.clip().is_some();
        [
            (true, "weights", inputs.weights),
            (rl, "logprobs", inputs.logprobs),
            (rl, "advantages", inputs.advantages),
            (clips, "clip_low_threshold", inputs.clip_low),
            (clips, "clip_high_threshold", inputs.clip_high),
            (matches!(self, Self::Gspo(_)), "sequence_ratio_mask", inputs.sequence_ratio_mask),
            (matches!(self, Self::StableReinforce { .. }), "sampled_mask", inputs.sampled_mask),
        ]
        .into_iter()
        .filter_map(|(read, field, values)| read.then_some((field, values)))
    }

    fn check_bounds(&self, count: usize, inputs: &Inputs<'_>) -> Result<()> {
        let Some(clip) = self.clip() else { return Ok(()) };
        if inputs.clip_low.is_none() && inputs.clip_high.is_none() {
            return Ok(());
        }
        for at in 0..count {
            let low = inputs.clip_low.map_or(clip.low, |low| f64::from(low[at]));
            let high = inputs.clip_high.map_or(clip.high, |high| f64::from(high[at]));
            if !(0.0 <= low && low <= high) {
                let why = format!("{low} to {high} at position {at} is not a range of ratios");
                return Err(Error::invalid("clip_low_threshold, clip_high_threshold", why));
            }
        }
        Ok(())
    }
}
