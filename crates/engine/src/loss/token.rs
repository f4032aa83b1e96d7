//! Evaluation of the built-in losses, token by token.
//!
//! Log-probabilities are `f32`. Terms are computed and summed in `f64`: the cost is negligible next
//! to the model, and the order of summation has no effect at the precision of `f32`.

use super::inputs::LossInputs;
use super::settings::{ClipBounds, Loss};
use crate::{Error, Result};

/// Loss and weights of one datum, summed over its targets.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSums {
    /// Loss, summed over the datum's targets.
    pub loss: f64,
    /// Sum of the weights.
    pub weight: f64,
    /// For losses with clipping bounds: the fraction of tokens whose ratio is outside the bounds,
    /// among the tokens with a nonzero weight and a nonzero advantage.
    pub clipped_fraction: Option<f64>,
}

/// Term of one token, and its derivative with respect to `p`.
type TokenTerm = (f64, f64);

impl Loss {
    /// Computes the loss of a datum whose targets have the log-probabilities `p`, and writes its
    /// derivative with respect to each log-probability to `gradient`.
    ///
    /// `inputs` must have passed [`check`](Loss::check). Several targets per position are adjacent.
    /// A token with weight 0 contributes exactly 0. So does a token with advantage 0, whatever its
    /// ratio, except in `dro` and `stable_reinforce`, whose quadratic penalty remains.
    ///
    /// # Errors
    /// [`Error::NonFiniteResult`] if a term or its derivative is not finite, [`Error::Length`] if
    /// `gradient` or an input has another length than `p`, [`Error::MissingInput`] if a required
    /// input is missing. The content of `gradient` is then unspecified.
    pub fn evaluate(
        &self,
        inputs: &LossInputs<'_>,
        p: &[f32],
        gradient: &mut [f32],
    ) -> Result<LossSums> {
        let check_len = |field: &str, got: usize| {
            if got == p.len() {
                Ok(())
            } else {
                Err(Error::Length { field: field.to_owned(), expected: p.len(), got })
            }
        };
        check_len("gradient", gradient.len())?;
        let weights = inputs.weights;
        if let Some(weights) = weights {
            check_len("weights", weights.len())?;
        }
        let required = |field: &str, values| {
            let missing =
                || Error::MissingInput { what: self.name().to_owned(), field: field.to_owned() };
            let values: &[f32] = Option::ok_or_else(values, missing)?;
            check_len(field, values.len())?;
            Ok::<_, Error>(values)
        };
        let (q, advantages) = match self {
            // Cross-entropy reads neither, so any list serves as a placeholder.
            Self::CrossEntropy => (p, p),
            _ => {
                (required("logprobs", inputs.logprobs)?, required("advantages", inputs.advantages)?)
            }
        };
        let advantage = |at: usize| f64::from(advantages[at]);
        let difference = |at: usize| f64::from(p[at]) - f64::from(q[at]);
        for (field, values) in
            [("clip_low_threshold", inputs.clip_low), ("clip_high_threshold", inputs.clip_high)]
        {
            if let Some(values) = values {
                check_len(field, values.len())?;
            }
        }
        let mut clipping = ClippingCounts::default();
        let mut out = match *self {
            Self::CrossEntropy => self.sum(p, weights, gradient, |at| (-f64::from(p[at]), -1.0)),
            Self::ImportanceSampling => self.sum(p, weights, gradient, |at| {
                let term = times(advantage(at), difference(at).exp());
                (-term, -term)
            }),
            Self::Ppo(clip) => self.sum(p, weights, gradient, |at| {
                let ratio = difference(at).exp();
                let clip = inputs.clip_bounds(at, clip);
                clipping.add(advantage(at), ratio, clip);
                clipped_term(ratio, advantage(at), clip)
            }),
            Self::Cispo(clip) => self.sum(p, weights, gradient, |at| {
                let ratio = difference(at).exp();
                let clip = inputs.clip_bounds(at, clip);
                clipping.add(advantage(at), ratio, clip);
                let clipped = times(advantage(at), ratio.clamp(clip.low, clip.high));
                (-times(clipped, f64::from(p[at])), -clipped)
            }),
            Self::Dro { beta } => self.sum(p, weights, gradient, |at| {
                let a = advantage(at);
                let d = difference(at);
                let penalty_slope = times(beta, d);
                (
                    -(times(a, f64::from(p[at])) - times(penalty_slope, d) / 2.0),
                    -(a - penalty_slope),
                )
            }),
            Self::Gspo(clip) => {
                let mask = required("sequence_ratio_mask", inputs.sequence_ratio_mask)?;
                // A token with advantage 0 may have any log-probability.
                let counts = |at: usize| advantage(at) != 0.0 || difference(at).is_finite();
                let ratio = sequence_ratio(mask, counts, difference);
                self.sum(p, weights, gradient, |at| {
                    let clip = inputs.clip_bounds(at, clip);
                    clipping.add(advantage(at), ratio, clip);
                    clipped_term(ratio, advantage(at), clip)
                })
            }
            Self::StableReinforce { kl_coeff } => {
                let sampled = required("sampled_mask", inputs.sampled_mask)?;
                self.sum(p, weights, gradient, |at| {
                    if sampled[at] == 0.0 {
                        return (0.0, 0.0);
                    }
                    let d = difference(at);
                    let clipped = times(advantage(at), d.exp().min(1.0));
                    let penalty_slope = times(kl_coeff, d);
                    (
                        -times(clipped, f64::from(p[at])) + times(penalty_slope, d) / 2.0,
                        -clipped + penalty_slope,
                    )
                })
            }
        }?;
        if self.clip().is_some() {
            out.clipped_fraction = Some(clipping.fraction());
        }
        Ok(out)
    }

    /// Sums the terms of the tokens with a nonzero weight.
    fn sum(
        &self,
        p: &[f32],
        weights: Option<&[f32]>,
        gradient: &mut [f32],
        mut term: impl FnMut(usize) -> TokenTerm,
    ) -> Result<LossSums> {
        let mut out = LossSums::default();
        for (at, slope) in gradient.iter_mut().enumerate() {
            if p[at].is_nan() {
                return Err(Error::NonFiniteResult {
                    what: "the log-probability of the target".to_owned(),
                    index: at,
                    value: f64::NAN,
                    hint: "the weights are too large; load an earlier checkpoint, or check the files of the \
                           base model",
                });
            }
            let weight = weights.map_or(1.0, |weights| f64::from(weights[at]));
            out.weight += weight;
            *slope = 0.0;
            if weight == 0.0 {
                continue;
            }
            let (loss, derivative) = term(at);
            let loss = times(loss, weight);
            #[expect(clippy::cast_possible_truncation, reason = "checked to be finite below")]
            let derivative = times(derivative, weight) as f32;
            if !(loss.is_finite() && derivative.is_finite()) {
                return Err(
                    self.overflow(at, if loss.is_finite() { f64::from(derivative) } else { loss })
                );
            }
            out.loss += loss;
            *slope = derivative;
        }
        Ok(out)
    }

    /// Returns the error for a term or derivative that is not finite.
    fn overflow(&self, index: usize, value: f64) -> Error {
        Error::NonFiniteResult {
            what: format!("the {} loss or its gradient", self.name()),
            index,
            value,
            hint: "the policy is too far from the one that sampled the data; \
                   sample with newer weights, or set the weight of the token to 0",
        }
    }
}

/// Returns `a · b`, where 0 · ∞ is 0.
fn times(a: f64, b: f64) -> f64 {
    if a == 0.0 || b == 0.0 { 0.0 } else { a * b }
}

/// Computes `-min(r A, clip(r) A)` and its derivative. A ratio equal to a bound is not clipped, so
/// its derivative is not 0.
fn clipped_term(ratio: f64, advantage: f64, clip: ClipBounds) -> TokenTerm {
    let unclipped = times(advantage, ratio);
    let clipped = times(advantage, ratio.clamp(clip.low, clip.high));
    let inside = (clip.low..=clip.high).contains(&ratio);
    if inside || unclipped < clipped { (-unclipped, -unclipped) } else { (-clipped, 0.0) }
}

/// Returns the ratio of a datum: the exponential of the mean `difference` over the tokens with a
/// nonzero mask for which `counts` returns true, or 1 if there are none.
fn sequence_ratio(
    mask: &[f32],
    counts: impl Fn(usize) -> bool,
    difference: impl Fn(usize) -> f64,
) -> f64 {
    let mut count = 0.0;
    let mut total = 0.0;
    for (at, _) in mask.iter().enumerate().filter(|(at, mask)| **mask != 0.0 && counts(*at)) {
        count += 1.0;
        total += difference(at);
    }
    if count == 0.0 { 1.0 } else { (total / count).exp() }
}

/// Number of tokens with a nonzero advantage, and how many of these tokens have a ratio outside the
/// bounds.
#[derive(Default)]
struct ClippingCounts {
    total: f64,
    outside: f64,
}

impl ClippingCounts {
    fn add(&mut self, advantage: f64, ratio: f64, clip: ClipBounds) {
        if advantage != 0.0 {
            self.total += 1.0;
            if !(clip.low..=clip.high).contains(&ratio) {
                self.outside += 1.0;
            }
        }
    }

    fn fraction(&self) -> f64 {
        if self.total == 0.0 { 0.0 } else { self.outside / self.total }
    }
}
