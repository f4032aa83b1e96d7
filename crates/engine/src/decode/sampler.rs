//! [`TokenSampler`]: samples a token by temperature, top-k and top-p.

use super::histogram::{MassHistogram, weight};
use super::select::{Candidate, Crossing, best_first, find_crossing, top_k};
use crate::{Error, Result};

/// Lowest temperature that is distinguished from lower ones. Any two different logits have
/// probabilities of 1 and 0 at it, so lower temperatures give the same distribution; dividing logits
/// by them could overflow.
const MIN_TEMPERATURE: f64 = 1e-30;

/// Parameters of token sampling, applied in this order: temperature, top-k, top-p.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodingParams {
    /// Divisor of the logits; finite and at least 0. Defaults to 1. At 0 the most probable token is
    /// chosen (of equal ones the lowest), and the other parameters have no effect.
    pub temperature: f64,
    /// Number of most probable tokens to sample from; -1 (the default) or 0 means all.
    pub top_k: i64,
    /// Cumulative probability in (0, 1]: sampling is restricted to the smallest set of most
    /// probable tokens that reaches it. Defaults to 1, which means all tokens.
    pub top_p: f64,
}

impl Default for DecodingParams {
    /// Returns temperature 1 without top-k and top-p.
    fn default() -> Self {
        Self { temperature: 1.0, top_k: -1, top_p: 1.0 }
    }
}

impl DecodingParams {
    /// Checks the ranges of the parameters.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the first parameter that is out of range.
    pub fn check(&self) -> Result<()> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            let reason = format!("{} is not a finite number of at least 0", self.temperature);
            return Err(Error::invalid("temperature", reason));
        }
        if self.top_k < -1 {
            let reason = format!("{} is neither a count nor -1 for all tokens", self.top_k);
            return Err(Error::invalid("top_k", reason));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Error::invalid("top_p", format!("{} is not in (0, 1]", self.top_p)));
        }
        Ok(())
    }

    /// Returns `top_k` if it excludes any token.
    fn effective_top_k(&self, vocab: usize) -> Option<usize> {
        let count = usize::try_from(self.top_k).ok()?;
        (1..vocab).contains(&count).then_some(count)
    }
}

/// Samples tokens from logits. Holds only reusable buffers, so earlier calls do not affect later
/// ones.
///
/// ```
/// use tinkex_engine::decode::{DecodingParams, TokenSampler, SampleRng, log_normalizer, logprob};
///
/// let logits = [0.0, 3.0, 1.0];
/// let params = DecodingParams { temperature: 0.7, top_k: 2, ..DecodingParams::default() };
/// params.check()?;
/// let total = log_normalizer(&logits, params.temperature);
/// let mut rng = SampleRng::sample(42, 0);
/// let token = TokenSampler::default().sample(&logits, &params, total, rng.uniform())?;
/// assert!(token == 1 || token == 2);
/// assert!(logprob(logits[token as usize], params.temperature, total) < 0.0);
/// # Ok::<_, tinkex_engine::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct TokenSampler {
    items: Vec<Candidate>,
    histogram: MassHistogram,
}

impl TokenSampler {
    /// Samples a token by inversion: `uniform`, in [0, 1), is compared with the cumulative
    /// probabilities of the tokens in descending order.
    ///
    /// `log_normalizer` is the result of [`log_normalizer`] for these logits and this temperature.
    ///
    /// # Errors
    /// [`Error::NonFiniteResult`] if a logit is NaN or +∞, or if all are -∞. A logit of -∞ excludes
    /// its token.
    pub fn sample(
        &mut self,
        logits: &[f32],
        params: &DecodingParams,
        log_normalizer: f64,
        uniform: f64,
    ) -> Result<u32> {
        let top = highest(logits)?;
        if params.temperature == 0.0 {
            return Ok(top.1);
        }
        let params = &DecodingParams { temperature: divisor(params.temperature), ..*params };
        let crossing = match params.effective_top_k(logits.len()) {
            Some(k) => self.sample_top_k(logits, k, top, params, uniform),
            None => self.sample_all(logits, top, params, log_normalizer, uniform),
        };
        Ok(crossing.map_or(top.1, |crossing| crossing.token))
    }

    /// Samples from the `k` most probable tokens.
    fn sample_top_k(
        &mut self,
        logits: &[f32],
        k: usize,
        top: Candidate,
        params: &DecodingParams,
        uniform: f64,
    ) -> Option<Crossing> {
        let weight = |logit: f32| weight(logit, top.0, params.temperature);
        top_k(logits, k, &mut self.items);
        let mut total = self.items.iter().map(|item| weight(item.0)).sum();
        if params.top_p < 1.0 {
            let cut = find_crossing(&mut self.items, params.top_p * total, true, weight)?;
            let last = (logits[cut.token as usize], cut.token);
            self.items.retain(|item| best_first(item, &last).is_le());
            total = cut.through;
        }
        find_crossing(&mut self.items, uniform * total, false, weight)
    }

    /// Samples from all tokens. Sorts only the tokens of one histogram bin.
    fn sample_all(
        &mut self,
        logits: &[f32],
        top: Candidate,
        params: &DecodingParams,
        log_normalizer: f64,
        uniform: f64,
    ) -> Option<Crossing> {
        let total = (log_normalizer - f64::from(top.0) / params.temperature).exp();
        let share = if params.top_p < 1.0 { params.top_p } else { uniform };
        self.histogram.fill(logits, top.0, params.temperature, share * total);
        if params.top_p < 1.0 {
            let cut =
                self.histogram.find_crossing(logits, share * total, true, None, &mut self.items)?;
            let last = (logits[cut.token as usize], cut.token);
            let goal = uniform * cut.through;
            return self.histogram.find_crossing(logits, goal, false, Some(last), &mut self.items);
        }
        self.histogram.find_crossing(logits, share * total, false, None, &mut self.items)
    }

    /// Returns the `k` highest logits with their tokens, in descending order; equal logits by
    /// ascending token. Returns fewer if the vocabulary is smaller.
    pub fn top(&mut self, logits: &[f32], k: usize) -> &[(f32, u32)] {
        top_k(logits, k.min(logits.len()), &mut self.items);
        &self.items
    }
}

/// Returns `log Σ exp(logit / temperature)`. Temperature 0 is treated as 1, because
/// log-probabilities are reported that way.
#[must_use]
pub fn log_normalizer(logits: &[f32], temperature: f64) -> f64 {
    let temperature = divisor(temperature);
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if top == f32::NEG_INFINITY {
        return f64::NEG_INFINITY;
    }
    let sum: f64 = logits.iter().map(|&logit| weight(logit, top, temperature)).sum();
    f64::from(top) / temperature + sum.ln()
}

/// Returns the log-probability of a token, given its logit and the [`log_normalizer`] at the same
/// temperature. Top-k and top-p do not affect it.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "reported in f32")]
pub fn logprob(logit: f32, temperature: f64, log_normalizer: f64) -> f32 {
    let temperature = divisor(temperature);
    (f64::from(logit) / temperature - log_normalizer) as f32
}

/// Returns the number by which logits are divided at a temperature: 1 for 0, because
/// log-probabilities of greedy samples are reported at temperature 1.
fn divisor(temperature: f64) -> f64 {
    if temperature == 0.0 { 1.0 } else { temperature.max(MIN_TEMPERATURE) }
}

/// Returns the highest logit with its token; of equal ones the lowest token.
///
/// # Errors
/// [`Error::NonFiniteResult`] if a logit is NaN or +∞, or if all are -∞.
fn highest(logits: &[f32]) -> Result<Candidate> {
    let mut top = (f32::NEG_INFINITY, 0);
    let mut valid = true;
    for (token, &logit) in (0..).zip(logits) {
        valid &= logit < f32::INFINITY;
        if logit > top.0 {
            top = (logit, token);
        }
    }
    if valid && top.0 > f32::NEG_INFINITY {
        return Ok(top);
    }
    let index = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY);
    let index = index.unwrap_or(0);
    Err(Error::NonFiniteResult {
        what: "a logit".to_owned(),
        index,
        value: logits.get(index).map_or(f64::NAN, |&logit| f64::from(logit)),
        hint: "the weights of the model are too large",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits divided by these temperatures overflow.
    #[test]
    fn tiny_temperatures_choose_the_most_probable_token() {
        let logits = [-3.0e38, 1.0, 7.5, 7.25];
        for temperature in [1e-30, 1e-300, 1e-308, f64::from_bits(1)] {
            for top_k in [-1, 2] {
                let params = DecodingParams { temperature, top_k, ..DecodingParams::default() };
                let total = log_normalizer(&logits, temperature);
                let token = TokenSampler::default().sample(&logits, &params, total, 0.999).unwrap();
                assert_eq!(token, 2, "{temperature}");
                assert_eq!(logprob(logits[2], temperature, total).to_bits(), 0.0_f32.to_bits());
                assert!(logprob(logits[3], temperature, total) < -1e20);
            }
        }
    }
}
