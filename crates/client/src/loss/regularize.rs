//! Terms to add to a loss, so that a model stays near something.
//!
//! Each is a [`Term`] like any other: it may be part of a traced loss on the server or here.
//!
//! ```
//! use tinkex::loss::{CustomLoss, regularize};
//!
//! let loss = CustomLoss::trace("kept-near", |trace| {
//!     let logprobs = trace.input("logprobs", 1);
//!     let near = regularize::l2(logprobs + 1.0).sum();
//!     let base = -logprobs.sum();
//!     regularize::add(trace, base, &[("near", 0.01, near)])
//! })?;
//! # Ok::<_, tinkex::Error>(())
//! ```

use super::{Term, Trace};

/// Below this a probability counts as none.
const LEAST_PROBABILITY: f64 = 1e-10;
const LARGEST_LOG_RATIO: f64 = 100.0;
/// Below this a vector counts as having no direction.
const LEAST_NORM: f64 = 1e-8;

/// A base loss and weighted terms, each reported as `custom/regularizer/NAME:sum`. A weight that is
/// negative is a fault of the loss.
#[must_use]
pub fn add<'t>(trace: &'t Trace, base: Term<'t>, terms: &[(&str, f64, Term<'t>)]) -> Term<'t> {
    let mut total = base;
    for (name, weight, term) in terms {
        if !weight.is_finite() || *weight < 0.0 {
            trace.reject(format!("the weight of {name:?} is {weight}, not a number from 0 up"));
        }
        trace.metric(&format!("custom/regularizer/{name}:sum"), *term);
        total = total + *weight * *term;
    }
    total
}

/// The size of each number: take its sum or mean.
#[must_use]
pub fn l1(x: Term<'_>) -> Term<'_> {
    x.abs()
}

/// The square of each number: take its sum or mean. Shift it first to keep it near something else.
#[must_use]
pub fn l2(x: Term<'_>) -> Term<'_> {
    x.pow(2.0)
}

/// Part [`l1`], part [`l2`]; `l1_share` is from 0 to 1.
#[must_use]
pub fn elastic_net(x: Term<'_>, l1_share: f64) -> Term<'_> {
    l1_share * l1(x) + (1.0 - l1_share) * l2(x)
}

/// How far one distribution is from another, both given as log-probabilities over the last
/// dimension: the average of p·(ln p − ln q), summed over it.
#[must_use]
pub fn kl<'t>(log_p: Term<'t>, log_q: Term<'t>) -> Term<'t> {
    let p = log_p.exp();
    let ratio = (log_p - log_q).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO);
    p.gt(LEAST_PROBABILITY).choose(p * ratio, 0.0).sum_last().mean()
}

/// The average of [`kl`] in both directions.
#[must_use]
pub fn symmetric_kl<'t>(log_p: Term<'t>, log_q: Term<'t>) -> Term<'t> {
    0.5 * (kl(log_p, log_q) + kl(log_q, log_p))
}

/// How undecided a distribution is, given as log-probabilities over the last dimension. Add it to be
/// more decided, subtract it to be less.
#[must_use]
pub fn entropy(log_p: Term<'_>) -> Term<'_> {
    const LEAST_LOG: f64 = -50.0;
    -log_p.gt(LEAST_LOG).choose(log_p.exp() * log_p, 0.0).sum_last().mean()
}

/// A sequence of log-probabilities made sharper (below 1) or flatter (above 1), and whole again.
#[must_use]
pub fn with_temperature(log_p: Term<'_>, temperature: f64) -> Term<'_> {
    let scaled = log_p / temperature;
    scaled - scaled.log_sum_exp_last()
}

/// 1 minus the cosine of the angle between two sequences.
#[must_use]
pub fn cosine_distance<'t>(a: Term<'t>, b: Term<'t>) -> Term<'t> {
    let norm = |x: Term<'t>| l2(x).sum().sqrt().max(LEAST_NORM);
    1.0 - (a * b).sum() / (norm(a) * norm(b))
}

/// How far a gradient's length is from a target, squared. This is a number to watch: the gradient of
/// a gradient is not known here.
#[must_use]
pub fn gradient_penalty(gradients: &[Vec<f32>], target: f64) -> f64 {
    let squares = gradients.iter().flatten().map(|value| f64::from(*value).powi(2));
    (squares.sum::<f64>().sqrt() - target).powi(2)
}

/// How far the rows of a matrix are from being at right angles: the squares of all products of two
/// different rows. With [`Orthogonality::Hard`] rows of another length than 1 count too, with
/// [`Orthogonality::Spectral`] only the sum of squared lengths does.
/// Rows of different lengths are compared as far as both go.
#[must_use]
pub fn orthogonality(rows: &[Vec<f64>], mode: Orthogonality) -> f64 {
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let (mut across, mut own, mut trace) = (0.0, 0.0, 0.0);
    for (i, a) in rows.iter().enumerate() {
        for (j, b) in rows.iter().enumerate() {
            let both = product(a, b);
            if i == j {
                own += (both - 1.0).powi(2);
                trace += both;
            } else {
                across += both * both;
            }
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "no matrix has 2^53 rows")]
    let count = rows.len() as f64;
    match mode {
        Orthogonality::Soft => across,
        Orthogonality::Hard => across + own,
        Orthogonality::Spectral => across + (trace - count).powi(2),
    }
}

/// What counts against a matrix; see [`orthogonality`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Orthogonality {
    /// Angles alone.
    Soft,
    /// Angles, and each row's length.
    Hard,
    /// Angles, and the lengths together.
    Spectral,
}

/// Rows made to length 1.
#[must_use]
pub fn normalized(rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
    rows.iter()
        .map(|row| {
            let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt().max(LEAST_NORM);
            row.iter().map(|x| x / norm).collect()
        })
        .collect()
}
