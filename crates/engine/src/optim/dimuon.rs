//! Dimuon: orthogonalized momentum for the LoRA matrices of an adapter.
//!
//! The hosted service's formula is not public; this is version DM-1 of `docs/engine.md`. The
//! momentum is normalized over rows and columns, orthogonalized by Newton-Schulz iterations (all
//! singular values approach 1), and scaled to the Frobenius norm `√rank`.

use super::{Parameter, at_least_zero, check_clip, decay_rate};
use crate::{Error, Result};

/// Fraction of the mean square of the whole matrix that is added to the mean square of each row and
/// column.
const DAMPING: f64 = 0.01;
/// Number of Newton-Schulz iterations.
const ITERATIONS: usize = 5;
/// Coefficients of X, S X and S² X in a Newton-Schulz iteration, where S = X Xᵀ.
const COEFFICIENTS: (f64, f64, f64) = (3.4445, -4.7750, 2.0315);

/// Parameters of a Dimuon step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DimuonParams {
    /// Learning rate; at least 0.
    pub learning_rate: f64,
    /// Decay rate of the momentum, in [0, 1).
    pub beta1: f64,
    /// Maximum norm of all gradients together; 0 or less disables clipping.
    pub grad_clip_norm: f64,
}

impl DimuonParams {
    /// Creates parameters with beta1 0.9 and without clipping.
    #[must_use]
    pub fn new(learning_rate: f64) -> Self {
        Self { learning_rate, beta1: 0.9, grad_clip_norm: 0.0 }
    }

    pub(super) fn check(&self) -> Result<()> {
        at_least_zero("learning_rate", self.learning_rate)?;
        decay_rate("beta1", self.beta1)?;
        check_clip(self.grad_clip_norm)
    }
}

/// Momentum of every weight.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DimuonState {
    rank: usize,
    pub(super) momenta: Vec<Vec<f32>>,
}

impl DimuonState {
    pub(super) fn new(rank: usize, lengths: &[usize]) -> Self {
        Self { rank, momenta: lengths.iter().map(|&length| vec![0.0; length]).collect() }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn lengths(&self) -> impl ExactSizeIterator<Item = usize> {
        self.momenta.iter().map(Vec::len)
    }

    #[expect(clippy::cast_possible_truncation, reason = "weights and their state are f32")]
    pub(super) fn step(
        &mut self,
        params: &DimuonParams,
        tensors: &mut [Parameter<'_>],
        clip_scale: f64,
    ) -> Result<()> {
        let direction_norm = (self.rank as f64).sqrt();
        // No element of the step exceeds the step's norm, so this checks in advance that every new
        // weight will be finite.
        for tensor in tensors.iter() {
            let max_weight = f64::from(f32::MAX) - params.learning_rate * direction_norm;
            let within = |w: f32| f64::from(w).abs() <= max_weight;
            if let Some(index) = tensor.weights.iter().position(|&w| !within(w)) {
                return Err(Error::NonFiniteResult {
                    what: format!("the new value of {}", tensor.name),
                    index,
                    value: f64::from(tensor.weights[index]),
                    hint: "no step was taken; lower the learning rate",
                });
            }
        }
        let old = params.beta1 as f32;
        let new = ((1.0 - params.beta1) * clip_scale) as f32;
        let mut scratch = DimuonScratch::default();
        for (tensor, momentum) in tensors.iter_mut().zip(&mut self.momenta) {
            for (m, &g) in momentum.iter_mut().zip(tensor.gradient) {
                *m = old * *m + new * g;
            }
            let step = params.learning_rate * direction_norm;
            scratch.step(tensor.rows, tensor.columns, momentum, step, tensor.weights);
        }
        Ok(())
    }
}

/// Number of columns of the long side that are processed together, so that they stay in the cache.
const WIDTH: usize = 64;

/// Buffers that are reused for every matrix. The normalized matrix is never stored as a whole.
///
/// Matrices are processed as if the side with fewer elements, the short side, were the rows. A
/// panel has one row per element of the short side and [`WIDTH`] columns.
#[derive(Debug, Default)]
struct DimuonScratch {
    /// Normalizing factor of each row.
    rows: Vec<f64>,
    /// Normalizing factor of each column.
    columns: Vec<f64>,
    /// Normalized momentum of the current columns.
    panel: Vec<f64>,
    /// Step of the current columns.
    step_panel: Vec<f64>,
}

impl DimuonScratch {
    /// Subtracts the orthogonalized momentum, scaled to the norm `step`, from `weights`. Does
    /// nothing if the momentum is zero.
    fn step(
        &mut self,
        rows: usize,
        columns: usize,
        momentum: &[f32],
        step: f64,
        weights: &mut [f32],
    ) {
        if !self.compute_factors(rows, columns, momentum) {
            return;
        }
        let short = rows.min(columns);
        let long = rows.max(columns);
        self.panel.resize(short * WIDTH, 0.0);
        self.step_panel.resize(short * WIDTH, 0.0);

        let mut gram = vec![0.0; short * short];
        for from in (0..long).step_by(WIDTH) {
            self.fill_panel(rows, columns, momentum, from);
            for i in 0..short {
                for j in 0..=i {
                    gram[i * short + j] +=
                        dot(panel_row(&self.panel, i), panel_row(&self.panel, j));
                }
            }
        }
        for i in 0..short {
            for j in 0..i {
                gram[j * short + i] = gram[i * short + j];
            }
        }
        let norm = trace(&gram, short).sqrt() + 1e-7;
        gram.iter_mut().for_each(|value| *value /= norm * norm);

        // Every iteration multiplies from the short side by a polynomial of the Gram matrix. The
        // iterations therefore run on that small matrix, and the long side is read twice instead of
        // ten times.
        let (a, b, c) = COEFFICIENTS;
        let mut total_factor = identity(short);
        for _ in 0..ITERATIONS {
            let squared = product(&gram, &gram, short);
            let mut factor: Vec<f64> =
                gram.iter().zip(&squared).map(|(s, ss)| b * s + c * ss).collect();
            (0..short).for_each(|i| factor[i * short + i] += a);
            // X' = F X, hence X' X'ᵀ = F S F; all three are polynomials of the same matrix and
            // commute.
            gram = product(&product(&factor, &gram, short), &factor, short);
            total_factor = product(&factor, &total_factor, short);
        }
        // `gram` is now the Gram matrix of the direction. The squared Frobenius norm of the
        // direction is the trace of its Gram matrix.
        let factor = step / (trace(&gram, short).sqrt() + 1e-12) / norm;

        for from in (0..long).step_by(WIDTH) {
            self.fill_panel(rows, columns, momentum, from);
            for i in 0..short {
                let out = &mut self.step_panel[i * WIDTH..(i + 1) * WIDTH];
                out.fill(0.0);
                for k in 0..short {
                    add_scaled(
                        out,
                        panel_row(&self.panel, k),
                        factor * total_factor[i * short + k],
                    );
                }
            }
            for i in 0..short {
                for (j, &delta) in panel_row(&self.step_panel, i).iter().enumerate() {
                    if from + j < long {
                        let at = element_index(rows, columns, i, from + j);
                        #[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
                        let new = (f64::from(weights[at]) - delta) as f32;
                        weights[at] = new;
                    }
                }
            }
        }
    }

    /// Copies `WIDTH` normalized columns of the long side from `from`; zeros beyond its end.
    fn fill_panel(&mut self, rows: usize, columns: usize, momentum: &[f32], from: usize) {
        let short = rows.min(columns);
        let long = rows.max(columns);
        let (short_factors, long_factors) =
            if rows <= columns { (&self.rows, &self.columns) } else { (&self.columns, &self.rows) };
        for i in 0..short {
            let panel = &mut self.panel[i * WIDTH..(i + 1) * WIDTH];
            for (j, out) in panel.iter_mut().enumerate() {
                *out = if from + j < long {
                    let value = momentum[element_index(rows, columns, i, from + j)];
                    f64::from(value) * short_factors[i] * long_factors[from + j]
                } else {
                    0.0
                };
            }
        }
    }

    /// Computes the factors that normalize rows and columns. Returns false if the momentum is zero.
    fn compute_factors(&mut self, rows: usize, columns: usize, momentum: &[f32]) -> bool {
        self.rows.clear();
        self.rows.resize(rows, 0.0);
        self.columns.clear();
        self.columns.resize(columns, 0.0);
        if momentum.is_empty() {
            return false;
        }
        for (row, values) in self.rows.iter_mut().zip(momentum.chunks_exact(columns)) {
            for (column, &value) in self.columns.iter_mut().zip(values) {
                let square = f64::from(value) * f64::from(value);
                *row += square;
                *column += square;
            }
        }
        let mean = self.rows.iter().sum::<f64>() / momentum.len() as f64;
        if mean == 0.0 {
            return false;
        }
        let root = |total: &mut f64, count: usize| {
            *total = (*total / count as f64 + DAMPING * mean).sqrt().sqrt().recip();
        };
        self.rows.iter_mut().for_each(|total| root(total, columns));
        self.columns.iter_mut().for_each(|total| root(total, rows));
        true
    }
}

/// Returns the index of element `i` of the short side and `j` of the long side.
#[inline]
fn element_index(rows: usize, columns: usize, i: usize, j: usize) -> usize {
    if rows <= columns { i * columns + j } else { j * columns + i }
}

fn panel_row(panel: &[f64], i: usize) -> &[f64] {
    &panel[i * WIDTH..(i + 1) * WIDTH]
}

fn trace(matrix: &[f64], size: usize) -> f64 {
    (0..size).map(|i| matrix[i * size + i]).sum()
}

fn add_scaled(out: &mut [f64], values: &[f64], factor: f64) {
    for (out, value) in out.iter_mut().zip(values) {
        *out += factor * value;
    }
}

fn identity(size: usize) -> Vec<f64> {
    let mut all = vec![0.0; size * size];
    (0..size).for_each(|i| all[i * size + i] = 1.0);
    all
}

fn product(a: &[f64], b: &[f64], size: usize) -> Vec<f64> {
    let mut out = vec![0.0; size * size];
    for (out, a) in out.chunks_exact_mut(size).zip(a.chunks_exact(size)) {
        for (&a, b) in a.iter().zip(b.chunks_exact(size)) {
            add_scaled(out, b, a);
        }
    }
    out
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut lanes = [0.0; 8];
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    for (a, b) in a.iter().zip(b) {
        for i in 0..8 {
            lanes[i] += a[i] * b[i];
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f64>() + rest
}
