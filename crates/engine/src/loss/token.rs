//! The formulas, token by token.
//!
//! Log-probabilities come in f32; a token's term is computed in f64 from them, because that costs
//! nothing beside a model and makes sums independent of their order to well below f32.

use super::inputs::Inputs;
use super::settings::{Clip, Loss};
use crate::{Error, Result};

/// What a loss says about one datum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluated {
    /// The loss, summed over the datum's targets.
    pub sum: f64,
    /// The sum of the weights.
    pub weight: f64,
    /// For losses with bounds: the share of counted tokens whose ratio was outside.
    pub clipped: Option<f64>,
}

/// A token's term and its slope by `p`.
type Term = (f64, f64);

impl Loss {
    /// The loss of a datum whose targets have the log-probabilities `p`, and its slope by each.
    ///
    /// `inputs` must have passed [`check`](Loss::check); several targets per position lie next to
    /// each other. A token of weight 0 or advantage 0 gives exactly 0, whatever its ratio.
    ///
    /// # Errors
    /// [`Error::NonFiniteResult`] if a term or slope is not a finite f32, [`Error::Length`] if
    /// `slope` or an input is not as long as `p`, [`Error::MissingInput`]. `slope` then holds
    /// nothing of use.
    pub fn evaluate(&self, inputs: &Inputs<'_>, p: &[f32], slope: &mut [f32]) -> Result<Evaluated> {
        let len = |field: &str, got: usize| match got == p.len() {
            true => Ok(()),
            false => Err(Error::Length { field: field.to_owned(), expected: p.len(), got }),
        };
        len("slope", slope.len())?;
        let weights = inputs.weights;
        if let Some(weights) = weights {
            len("weights", weights.len())?;
        }
        let needed = |field: &str, values| {
            let missing =
                || Error::MissingInput { what: self.name().to_owned(), field: field.to_owned() };
            let values: &[f32] = Option::ok_or_else(values, missing)?;
            len(field, values.len())?;
            Ok::<_, Error>(values)
        };
        let (q, advantages) = match self {
            Self::CrossEntropy => (p, p),
            _ => (needed("logprobs", inputs.logprobs)?, needed("advantages", inputs.advantages)?),
        };
        let advantage = |at: usize| f64::from(advantages[at]);
        let difference = |at: usize| f64::from(p[at]) - f64::from(q[at]);
        let bounds = |at: usize, clip: Clip| Clip {
            low: inputs.clip_low.map_or(clip.low, |low| f64::from(low[at])),
            high: inputs.clip_high.map_or(clip.high, |high| f64::from(high[at])),
        };
        for (field, values) in
            [("clip_low_threshold", inputs.clip_low), ("clip_high_threshold", inputs.clip_high)]
        {
            if let Some(values) = values {
                len(field, values.len())?;
            }
        }
        let mut counted = Counted::default();
        let mut out = match *self {
            Self::CrossEntropy => self.sum(p, weights, slope, |at| (-f64::from(p[at]), -1.0)),
            Self::ImportanceSampling => self.sum(p, weights, slope, |at| {
                let term = times(advantage(at), difference(at).exp());
                (-term, -term)
            }),
            Self::Ppo(clip) => self.sum(p, weights, slope, |at| {
                let ratio = difference(at).exp();
                let clip = bounds(at, clip);
                counted.see(advantage(at), ratio, clip);
                clipped_term(ratio, advantage(at), clip)
            }),
            Self::Cispo(clip) => self.sum(p, weights, slope, |at| {
                let ratio = difference(at).exp();
                let clip = bounds(at, clip);
                counted.see(advantage(at), ratio, clip);
                let held = times(advantage(at), ratio.clamp(clip.low, clip.high));
                (-times(held, f64::from(p[at])), -held)
            }),
            Self::Dro { beta } => self.sum(p, weights, slope, |at| {
                let (a, d) = (advantage(at), difference(at));
                let pull = times(beta, d);
                (-(times(a, f64::from(p[at])) - times(pull, d) / 2.0), -(a - pull))
            }),
            Self::Gspo(clip) => {
                let mask = needed("sequence_ratio_mask", inputs.sequence_ratio_mask)?;
                let ratio = sequence_ratio(mask, difference);
                self.sum(p, weights, slope, |at| {
                    let clip = bounds(at, clip);
                    counted.see(advantage(at), ratio, clip);
                    clipped_term(ratio, advantage(at), clip)
                })
            }
            Self::StableReinforce { kl_coeff } => {
                let sampled = needed("sampled_mask", inputs.sampled_mask)?;
                self.sum(p, weights, slope, |at| {
                    if sampled[at] == 0.0 {
                        return (0.0, 0.0);
                    }
                    let d = difference(at);
                    let held = times(advantage(at), d.exp().min(1.0));
                    let pull = times(kl_coeff, d);
                    (-times(held, f64::from(p[at])) + times(pull, d) / 2.0, -held + pull)
                })
            }
        }?;
        if self.clip().is_some() {
            out.clipped = Some(counted.share());
        }
        Ok(out)
    }

    /// Adds up the terms of the tokens that count.
    fn sum(
        &self,
        p: &[f32],
        weights: Option<&[f32]>,
        slope: &mut [f32],
        mut term: impl FnMut(usize) -> Term,
    ) -> Result<Evaluated> {
        let mut out = Evaluated::default();
        for (at, slope) in slope.iter_mut().enumerate() {
            if p[at].is_nan() {
                return Err(Error::NonFiniteResult {
                    what: "the log-probability of the target".to_owned(),
                    index: at,
                    value: f64::NAN,
                    hint: "the weights no longer compute numbers; load an earlier checkpoint",
                });
            }
            let weight = weights.map_or(1.0, |weights| f64::from(weights[at]));
            out.weight += weight;
            *slope = 0.0;
            if weight == 0.0 {
                continue;
            }
            let (loss, by_p) = term(at);
            let loss = times(loss, weight);
            #[expect(clippy::cast_possible_truncation, reason = "checked to be finite below")]
            let by_p = times(by_p, weight) as f32;
            if !(loss.is_finite() && by_p.is_finite()) {
                return Err(
                    self.overflow(at, if loss.is_finite() { f64::from(by_p) } else { loss })
                );
            }
            out.sum += loss;
            *slope = by_p;
        }
        Ok(out)
    }

    fn overflow(&self, index: usize, value: f64) -> Error {
        Error::NonFiniteResult {
            what: format!("the {} loss or its gradient", self.name()),
            index,
            value,
            hint: "the log-probabilities are too far from those of sampling; \
                   sample with newer weights, or give the token the weight 0",
        }
    }
}

/// A product in which zero wins over infinity.
fn times(a: f64, b: f64) -> f64 {
    if a == 0.0 || b == 0.0 { 0.0 } else { a * b }
}

/// `-min(r A, clip(r) A)`. A ratio on a bound is inside: its slope passes.
fn clipped_term(ratio: f64, advantage: f64, clip: Clip) -> Term {
    let free = times(advantage, ratio);
    let held = times(advantage, ratio.clamp(clip.low, clip.high));
    let inside = (clip.low..=clip.high).contains(&ratio);
    if inside || free < held { (-free, -free) } else { (-held, 0.0) }
}

/// The one ratio of a datum: the exponential of the mean difference over the mask, 1 if it is empty.
fn sequence_ratio(mask: &[f32], difference: impl Fn(usize) -> f64) -> f64 {
    let mut count = 0.0;
    let mut total = 0.0;
    for (at, _) in mask.iter().enumerate().filter(|(_, mask)| **mask != 0.0) {
        count += 1.0;
        total += difference(at);
    }
    if count == 0.0 { 1.0 } else { (total / count).exp() }
}

/// How many tokens with an advantage there were, and how many of them outside the bounds.
#[derive(Default)]
struct Counted {
    all: f64,
    outside: f64,
}

impl Counted {
    fn see(&mut self, advantage: f64, ratio: f64, clip: Clip) {
        if advantage != 0.0 {
            self.all += 1.0;
            if !(clip.low..=clip.high).contains(&ratio) {
                self.outside += 1.0;
            }
        }
    }

    fn share(&self) -> f64 {
        if self.all == 0.0 { 0.0 } else { self.outside / self.all }
    }
}
