//! Inputs of a loss besides the log-probabilities, and their validation.

use super::settings::{ClipBounds, Loss};
use crate::{Error, Result};

/// Loss inputs of one datum. Every slice has one value per target token.
#[derive(Clone, Copy, Debug, Default)]
pub struct LossInputs<'a> {
    /// Weight of each target; 1 if absent.
    pub weights: Option<&'a [f32]>,
    /// Log-probabilities under the policy that sampled the targets.
    pub logprobs: Option<&'a [f32]>,
    /// Advantage of each target.
    pub advantages: Option<&'a [f32]>,
    /// Lower clipping bound of each target; overrides the setting of the loss.
    pub clip_low: Option<&'a [f32]>,
    /// Upper clipping bound of each target; overrides the setting of the loss.
    pub clip_high: Option<&'a [f32]>,
    /// Nonzero for tokens that contribute to the sequence ratio of `gspo`.
    pub sequence_ratio_mask: Option<&'a [f32]>,
    /// Nonzero for sampled tokens; read only by `stable_reinforce`.
    pub sampled_mask: Option<&'a [f32]>,
}

impl LossInputs<'_> {
    /// Returns the clipping bounds of target `at`: its own bounds, where given, or the bounds of the
    /// loss.
    pub(super) fn clip_bounds(&self, at: usize, loss: ClipBounds) -> ClipBounds {
        ClipBounds {
            low: self.clip_low.map_or(loss.low, |low| f64::from(low[at])),
            high: self.clip_high.map_or(loss.high, |high| f64::from(high[at])),
        }
    }
}

impl Loss {
    /// Checks the shape of the targets and the inputs of one datum. Called before the model runs,
    /// so that an invalid request costs no computation.
    ///
    /// # Errors
    /// - [`Error::Shape`] for several targets per position if the loss accepts only one.
    /// - [`Error::MissingInput`] if a required input is missing.
    /// - [`Error::Length`] if an input does not have one value per target.
    /// - [`Error::NonFiniteInput`] if an input contains NaN or an infinity. `logprobs` may be -∞
    ///   where the advantage is 0.
    /// - [`Error::Invalid`] if a lower clipping bound is negative or exceeds the upper one.
    pub fn check(&self, target_shape: &[usize], inputs: &LossInputs<'_>) -> Result<()> {
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
        let required: &[(&str, Option<&[f32]>)] = match self {
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
        for (field, values) in required {
            if values.is_none() {
                let what = self.name().to_owned();
                return Err(Error::MissingInput { what, field: (*field).to_owned() });
            }
        }
        for (field, values) in self.used_inputs(inputs) {
            let Some(values) = values else { continue };
            if values.len() != count {
                let field = field.to_owned();
                return Err(Error::Length { field, expected: count, got: values.len() });
            }
            if let Some(index) = values.iter().position(|value| !value.is_finite()) {
                // The ratio of a token with advantage 0 is not used, so its log-probability may be
                // -∞.
                let ignored = |i: usize| inputs.advantages.is_some_and(|a| a.get(i) == Some(&0.0));
                let allowed = |i: usize| values[i] == f32::NEG_INFINITY && ignored(i);
                let invalid = |i: &usize| !values[*i].is_finite() && !allowed(*i);
                let first = match field {
                    "logprobs" => (index..values.len()).find(invalid),
                    _ => Some(index),
                };
                if let Some(index) = first {
                    let field = field.to_owned();
                    let value = values[index];
                    return Err(Error::NonFiniteInput { field, index, value });
                }
            }
        }
        self.check_bounds(count, inputs)
    }

    /// Returns the inputs that this loss reads, with their names in the API.
    fn used_inputs<'a>(
        &self,
        inputs: &LossInputs<'a>,
    ) -> impl Iterator<Item = (&'static str, Option<&'a [f32]>)> {
        let policy_gradient = !matches!(self, Self::CrossEntropy);
        let clips = self.clip().is_some();
        [
            (true, "weights", inputs.weights),
            (policy_gradient, "logprobs", inputs.logprobs),
            (policy_gradient, "advantages", inputs.advantages),
            (clips, "clip_low_threshold", inputs.clip_low),
            (clips, "clip_high_threshold", inputs.clip_high),
            (matches!(self, Self::Gspo(_)), "sequence_ratio_mask", inputs.sequence_ratio_mask),
            (matches!(self, Self::StableReinforce { .. }), "sampled_mask", inputs.sampled_mask),
        ]
        .into_iter()
        .filter_map(|(used, field, values)| used.then_some((field, values)))
    }

    /// Checks the clipping bounds of every target.
    fn check_bounds(&self, count: usize, inputs: &LossInputs<'_>) -> Result<()> {
        let Some(clip) = self.clip() else { return Ok(()) };
        if inputs.clip_low.is_none() && inputs.clip_high.is_none() {
            return Ok(());
        }
        for at in 0..count {
            let ClipBounds { low, high } = inputs.clip_bounds(at, clip);
            if !(0.0 <= low && low <= high) {
                let reason = format!("{low} and {high} at position {at}, expected 0 ≤ low ≤ high");
                return Err(Error::invalid("clip_low_threshold, clip_high_threshold", reason));
            }
        }
        Ok(())
    }
}
