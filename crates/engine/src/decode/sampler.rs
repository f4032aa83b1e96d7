//! Drawing a token.

use super::histogram::{MassHistogram, weight};
use super::select::{Candidate, Crossing, best, best_first, pass};
use crate::{Error, Result};

/// How tokens are drawn: logits over temperature, then the top k, then the top p of those.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodingParams {
    /// At 0 the likeliest token is taken, the lowest of several, and the rest is without effect.
    pub temperature: f64,
    /// Only so many of the likeliest tokens; -1 or 0 for all.
    pub top_k: i64,
    /// Only the shortest list of likeliest tokens that has this much of the mass; 1 for all.
    pub top_p: f64,
}

impl Default for DecodingParams {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: -1, top_p: 1.0 }
    }
}

impl DecodingParams {
    /// Whether these settings make sense.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check(&self) -> Result<()> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            let why = format!("{} is not a finite number of at least 0", self.temperature);
            return Err(Error::invalid("temperature", why));
        }
        if self.top_k < -1 {
            let why = format!("{} is neither a count nor -1 for all", self.top_k);
            return Err(Error::invalid("top_k", why));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Error::invalid("top_p", format!("{} is not in (0, 1]", self.top_p)));
        }
        Ok(())
    }

    /// The count behind `top_k`, if it leaves anything out.
    fn best_of(&self, vocab: usize) -> Option<usize> {
        let count = usize::try_from(self.top_k).ok()?;
        (1..vocab).contains(&count).then_some(count)
    }
}

/// Draws tokens; holds nothing but memory to be used again.
///
/// ```
/// use tinkex_engine::decode::{DecodingParams, TokenSampler, SampleRng, log_normalizer, logprob};
///
/// let logits = [0.0, 3.0, 1.0];
/// let draw = DecodingParams { temperature: 0.7, top_k: 2, ..DecodingParams::default() };
/// draw.check()?;
/// let mass = log_normalizer(&logits, draw.temperature);
/// let mut stream = SampleRng::sample(42, 0);
/// let token = TokenSampler::default().pick(&logits, &draw, mass, stream.uniform())?;
/// assert!(token == 1 || token == 2);
/// assert!(logprob(logits[token as usize], draw.temperature, mass) < 0.0);
/// # Ok::<_, tinkex_engine::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct TokenSampler {
    items: Vec<Candidate>,
    bins: MassHistogram,
}

impl TokenSampler {
    /// Draws a token by a number from 0 up to 1, which says how much of the mass lies before it
    /// when tokens stand in the order of their likelihood.
    ///
    /// `log_normalizer` is [`log_normalizer`] of these logits at this temperature.
    ///
    /// # Errors
    /// [`Error::NonFiniteResult`] if a logit is NaN or infinite (but for -∞, a token that cannot
    /// be), or if there is no token that can be.
    pub fn pick(
        &mut self,
        logits: &[f32],
        draw: &DecodingParams,
        log_normalizer: f64,
        uniform: f64,
    ) -> Result<u32> {
        let top = highest(logits)?;
        if draw.temperature == 0.0 {
            return Ok(top.1);
        }
        let passed = match draw.best_of(logits.len()) {
            Some(k) => self.among(logits, k, top, draw, uniform),
            None => self.of_all(logits, top, draw, log_normalizer, uniform),
        };
        Ok(passed.map_or(top.1, |passed| passed.token))
    }

    /// Draws from the `k` best.
    fn among(
        &mut self,
        logits: &[f32],
        k: usize,
        top: Candidate,
        draw: &DecodingParams,
        uniform: f64,
    ) -> Option<Crossing> {
        let weight = |logit: f32| weight(logit, top.0, draw.temperature);
        best(logits, k, &mut self.items);
        let mut mass = self.items.iter().map(|item| weight(item.0)).sum();
        if draw.top_p < 1.0 {
            let cut = pass(&mut self.items, draw.top_p * mass, true, weight)?;
            let last = (logits[cut.token as usize], cut.token);
            self.items.retain(|item| best_first(item, &last).is_le());
            mass = cut.through;
        }
        pass(&mut self.items, uniform * mass, false, weight)
    }

    /// Draws from all, of which few are ever looked at twice.
    fn of_all(
        &mut self,
        logits: &[f32],
        top: Candidate,
        draw: &DecodingParams,
        log_normalizer: f64,
        uniform: f64,
    ) -> Option<Crossing> {
        let total = (log_normalizer - f64::from(top.0) / draw.temperature).exp();
        let share = if draw.top_p < 1.0 { draw.top_p } else { uniform };
        self.bins.fill(logits, top.0, draw.temperature, share * total);
        if draw.top_p < 1.0 {
            let cut = self.bins.pass(logits, share * total, true, None, &mut self.items)?;
            let last = (logits[cut.token as usize], cut.token);
            let goal = uniform * cut.through;
            return self.bins.pass(logits, goal, false, Some(last), &mut self.items);
        }
        self.bins.pass(logits, share * total, false, None, &mut self.items)
    }

    /// The `k` likeliest tokens with their logits, best first, the lower token first of equal ones;
    /// fewer if there are fewer tokens.
    pub fn top(&mut self, logits: &[f32], k: usize) -> &[(f32, u32)] {
        best(logits, k.min(logits.len()), &mut self.items);
        &self.items
    }
}

/// `log Σ exp(logit / temperature)`; at temperature 0 as at 1, since that is what is reported there.
#[must_use]
pub fn log_normalizer(logits: &[f32], temperature: f64) -> f64 {
    let temperature = if temperature == 0.0 { 1.0 } else { temperature };
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if top == f32::NEG_INFINITY {
        return f64::NEG_INFINITY;
    }
    let sum: f64 = logits.iter().map(|&logit| weight(logit, top, temperature)).sum();
    f64::from(top) / temperature + sum.ln()
}

/// The log-probability of a token, by its logit and [`log_normalizer`] at the same temperature.
///
/// It does not know of top-k and top-p: those choose among tokens, they do not change the model.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "reported in f32")]
pub fn logprob(logit: f32, temperature: f64, log_normalizer: f64) -> f32 {
    let temperature = if temperature == 0.0 { 1.0 } else { temperature };
    (f64::from(logit) / temperature - log_normalizer) as f32
}

/// The highest logit and its lowest token.
fn highest(logits: &[f32]) -> Result<Candidate> {
    let mut top = (f32::NEG_INFINITY, 0);
    let mut fine = true;
    for (token, &logit) in (0..).zip(logits) {
        fine &= logit < f32::INFINITY;
        if logit > top.0 {
            top = (logit, token);
        }
    }
    if fine && top.0 > f32::NEG_INFINITY {
        return Ok(top);
    }
    let index = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY);
    let index = index.unwrap_or(0);
    Err(Error::NonFiniteResult {
        what: "the logit".to_owned(),
        index,
        value: logits.get(index).map_or(f64::NAN, |&logit| f64::from(logit)),
        hint: "the weights no longer compute numbers; load an earlier checkpoint",
    })
}
