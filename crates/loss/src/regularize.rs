//! Regularizers: terms that penalize unwanted values.
//!
//! Most functions return a [`Term`], which can be part of any traced loss. [`gradient_penalty`] and
//! [`orthogonality`] return plain numbers, for reporting.
//!
//! ```
//! use tinkex::loss::{CustomLoss, regularize};
//!
//! let loss = CustomLoss::trace("regularized", |trace| {
//!     let logprobs = trace.input("logprobs", 1);
//!     let distance = regularize::l2(logprobs + 1.0).sum();
//!     let base = -logprobs.sum();
//!     regularize::add(trace, base, &[("distance", 0.01, distance)])
//! })?;
//! # Ok::<_, tinkex::Error>(())
//! ```

use super::{Term, Trace};

/// Largest probability that contributes nothing to a divergence.
const MIN_PROBABILITY: f64 = 1e-10;
/// Bound of |ln p − ln q| in a divergence.
const MAX_LOG_RATIO: f64 = 100.0;
/// Smallest divisor when a vector is divided by its norm.
const MIN_NORM: f64 = 1e-8;

/// Adds weighted terms to a base loss, and reports each unweighted term as the metric
/// `custom/regularizer/NAME:sum`.
///
/// `terms` are triples of name, weight and scalar term. A weight that is negative or not finite
/// makes [`CustomLoss::trace`](super::CustomLoss::trace) fail.
#[must_use]
pub fn add<'t>(trace: &'t Trace, base: Term<'t>, terms: &[(&str, f64, Term<'t>)]) -> Term<'t> {
    let mut total = base;
    for (name, weight, term) in terms {
        if !weight.is_finite() || *weight < 0.0 {
            trace.reject(format!(
                "weight {weight} of regularizer {name:?} is negative or not finite"
            ));
        }
        trace.metric(&format!("custom/regularizer/{name}:sum"), *term);
        total = total + *weight * *term;
    }
    total
}

/// Returns the element-wise absolute value, |x|. The sum or mean of the result is a regularizer.
#[must_use]
pub fn l1(x: Term<'_>) -> Term<'_> {
    x.abs()
}

/// Returns the element-wise square, x². The sum or mean of the result is a regularizer. Subtract a
/// target from `x` first to penalize the distance from the target.
#[must_use]
pub fn l2(x: Term<'_>) -> Term<'_> {
    x.pow(2.0)
}

/// Returns `l1_ratio` · |x| + (1 − `l1_ratio`) · x², element-wise. `l1_ratio` is between 0 and 1.
#[must_use]
pub fn elastic_net(x: Term<'_>, l1_ratio: f64) -> Term<'_> {
    l1_ratio * l1(x) + (1.0 - l1_ratio) * l2(x)
}

/// Returns the Kullback–Leibler divergence KL(p ‖ q) = Σ p · (ln p − ln q) as a scalar.
///
/// Both distributions are log-probabilities over the last dimension; the divergences of several
/// rows are averaged. ln p − ln q is limited to ±100, and probabilities up to 1e-10 contribute
/// nothing.
#[must_use]
pub fn kl<'t>(log_p: Term<'t>, log_q: Term<'t>) -> Term<'t> {
    let p = log_p.exp();
    let ratio = (log_p - log_q).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO);
    p.gt(MIN_PROBABILITY).choose(p * ratio, 0.0).sum_last().mean()
}

/// Returns the mean of KL(p ‖ q) and KL(q ‖ p); see [`kl`].
#[must_use]
pub fn symmetric_kl<'t>(log_p: Term<'t>, log_q: Term<'t>) -> Term<'t> {
    0.5 * (kl(log_p, log_q) + kl(log_q, log_p))
}

/// Returns the entropy −Σ p · ln p as a scalar.
///
/// The distribution is given as log-probabilities over the last dimension; the entropies of several
/// rows are averaged. Adding the entropy to a loss makes the distribution sharper, subtracting it
/// makes it flatter. Log-probabilities up to −50 contribute nothing.
#[must_use]
pub fn entropy(log_p: Term<'_>) -> Term<'_> {
    const MIN_LOGPROB: f64 = -50.0;
    -log_p.gt(MIN_LOGPROB).choose(log_p.exp() * log_p, 0.0).sum_last().mean()
}

/// Returns a vector of log-probabilities at another temperature, normalized again. A temperature
/// below 1 makes the distribution sharper, and a temperature above 1 makes it flatter.
#[must_use]
pub fn with_temperature(log_p: Term<'_>, temperature: f64) -> Term<'_> {
    let scaled = log_p / temperature;
    scaled - scaled.log_sum_exp_last()
}

/// Returns 1 minus the cosine similarity of two vectors, as a scalar. A norm below 1e-8 counts as
/// 1e-8.
#[must_use]
pub fn cosine_distance<'t>(a: Term<'t>, b: Term<'t>) -> Term<'t> {
    let norm = |x: Term<'t>| l2(x).sum().sqrt().max(MIN_NORM);
    1.0 - (a * b).sum() / (norm(a) * norm(b))
}

/// Computes (‖gradient‖ − target)², where ‖gradient‖ is the Euclidean norm over all data.
///
/// The value is for reporting only: a loss cannot contain it, because second derivatives are not
/// available.
#[must_use]
pub fn gradient_penalty(gradients: &[Vec<f32>], target: f64) -> f64 {
    let squares = gradients.iter().flatten().map(|value| f64::from(*value).powi(2));
    (squares.sum::<f64>().sqrt() - target).powi(2)
}

/// Computes how far the rows of a matrix are from being orthogonal: the sum of the squared dot
/// products of all ordered pairs of different rows, plus the penalty that `mode` adds.
///
/// The dot product of two rows of different lengths uses the columns that both rows have.
#[must_use]
pub fn orthogonality(rows: &[Vec<f64>], mode: Orthogonality) -> f64 {
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut off_diagonal = 0.0;
    let mut diagonal = 0.0;
    let mut trace = 0.0;
    for (i, a) in rows.iter().enumerate() {
        for (j, b) in rows.iter().enumerate() {
            let dot = product(a, b);
            if i == j {
                diagonal += (dot - 1.0).powi(2);
                trace += dot;
            } else {
                off_diagonal += dot * dot;
            }
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "no matrix has 2^53 rows")]
    let count = rows.len() as f64;
    match mode {
        Orthogonality::Soft => off_diagonal,
        Orthogonality::Hard => off_diagonal + diagonal,
        Orthogonality::Spectral => off_diagonal + (trace - count).powi(2),
    }
}

/// Penalty on the norms of the rows in [`orthogonality`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Orthogonality {
    /// Adds no penalty.
    Soft,
    /// Adds (‖row‖² − 1)² of every row.
    Hard,
    /// Adds (Σ‖row‖² − number of rows)².
    Spectral,
}

/// Divides each row by its Euclidean norm, or by 1e-8 if the norm is smaller.
#[must_use]
pub fn normalized(rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
    rows.iter()
        .map(|row| {
            let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt().max(MIN_NORM);
            row.iter().map(|x| x / norm).collect()
        })
        .collect()
}
