//! Orthogonalised momentum for the thin matrices of an adapter.
//!
//! The service's formula is not public; this is our reading of what is (version DM-1 of
//! `docs/engine.md`). Momentum is evened out over rows and columns, brought near a matrix whose
//! singular values are all 1, and scaled to the length `sqrt(rank)`.

use super::{Parameter, at_least_zero, check_clip, fraction};
use crate::{Error, Result};

const DAMPING: f64 = 0.01;
const ITERATIONS: usize = 5;
const COEFFICIENTS: (f64, f64, f64) = (3.4445, -4.7750, 2.0315);

/// The settings of a Dimuon step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DimuonParams {
    /// How far a step goes.
    pub learning_rate: f64,
    /// How slowly the momentum forgets.
    pub beta1: f64,
    /// The bound of the length of all gradients together; 0 or less for none.
    pub grad_clip_norm: f64,
}

impl DimuonParams {
    /// These, with the usual momentum and no bound.
    #[must_use]
    pub fn new(learning_rate: f64) -> Self {
        Self { learning_rate, beta1: 0.9, grad_clip_norm: 0.0 }
    }

    pub(super) fn check(&self) -> Result<()> {
        at_least_zero("learning_rate", self.learning_rate)?;
        fraction("beta1", self.beta1)?;
        check_clip(self.grad_clip_norm)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Dimuon {
    rank: usize,
    pub(super) momenta: Vec<Vec<f32>>,
}

impl Dimuon {
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
        let length = (self.rank as f64).sqrt();
        // No number of a direction exceeds its length, so this settles beforehand whether every
        // new weight will be one.
        for tensor in tensors.iter() {
            let most = f64::from(f32::MAX) - params.learning_rate * length;
            let within = |w: f32| f64::from(w).abs() <= most;
            if let Some(index) = tensor.weights.iter().position(|&w| !within(w)) {
                return Err(Error::NonFiniteResult {
                    what: format!("the new value of {}", tensor.name),
                    index,
                    value: f64::from(tensor.weights[index]),
                    hint: "no step was taken; lower the learning rate",
                });
            }
        }
        let (old, new) = (params.beta1 as f32, ((1.0 - params.beta1) * clip_scale) as f32);
        let mut scratch = Scratch::default();
        for (tensor, momentum) in tensors.iter_mut().zip(&mut self.momenta) {
            for (m, &g) in momentum.iter_mut().zip(tensor.gradient) {
                *m = old * *m + new * g;
            }
            if scratch.direct(tensor.rows, tensor.columns, momentum) {
                let step = params.learning_rate * length / (scratch.norm() + 1e-12);
                for (w, &d) in tensor.weights.iter_mut().zip(&scratch.direction) {
                    *w = (f64::from(*w) - step * d) as f32;
                }
            }
        }
        Ok(())
    }
}

/// Room for one matrix, used again for the next.
#[derive(Debug, Default)]
struct Scratch {
    even: Vec<f64>,
    direction: Vec<f64>,
    rows: Vec<f64>,
    columns: Vec<f64>,
}

impl Scratch {
    fn norm(&self) -> f64 {
        length(&self.direction)
    }

    /// Computes the direction, up to its length; false if the momentum is zero.
    fn direct(&mut self, rows: usize, columns: usize, momentum: &[f32]) -> bool {
        if !self.even_out(rows, columns, momentum) {
            return false;
        }
        let norm = length(&self.even) + 1e-7;
        self.even.iter_mut().for_each(|value| *value /= norm);

        // Every round multiplies from the thin side by a polynomial of the Gram matrix, so the
        // rounds are run on that small matrix and the wide one is touched twice, not ten times.
        let thin = rows.min(columns);
        let wide = rows <= columns;
        let mut gram = if wide {
            gram_of_rows(&self.even, rows, columns)
        } else {
            gram_of_columns(&self.even, columns)
        };
        let (a, b, c) = COEFFICIENTS;
        let mut whole = identity(thin);
        for _ in 0..ITERATIONS {
            let squared = product(&gram, &gram, thin);
            let mut factor: Vec<f64> =
                gram.iter().zip(&squared).map(|(s, ss)| b * s + c * ss).collect();
            (0..thin).for_each(|i| factor[i * thin + i] += a);
            // X' = F X, so X' X'ᵀ = F S F; all three are polynomials of one matrix.
            gram = product(&product(&factor, &gram, thin), &factor, thin);
            whole = product(&factor, &whole, thin);
        }

        self.direction.clear();
        self.direction.resize(self.even.len(), 0.0);
        if wide {
            for (i, out) in self.direction.chunks_exact_mut(columns).enumerate() {
                for (k, row) in self.even.chunks_exact(columns).enumerate() {
                    add_scaled(out, row, whole[i * thin + k]);
                }
            }
        } else {
            let outs = self.direction.chunks_exact_mut(columns);
            for (out, row) in outs.zip(self.even.chunks_exact(columns)) {
                for (k, &value) in row.iter().enumerate() {
                    add_scaled(out, &whole[k * thin..(k + 1) * thin], value);
                }
            }
        }
        true
    }

    /// Divides out how large rows and columns are; false if everything is zero.
    fn even_out(&mut self, rows: usize, columns: usize, momentum: &[f32]) -> bool {
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
            *total = (*total / count as f64 + DAMPING * mean).powf(-0.25);
        };
        self.rows.iter_mut().for_each(|total| root(total, columns));
        self.columns.iter_mut().for_each(|total| root(total, rows));
        self.even.clear();
        for (row, values) in self.rows.iter().zip(momentum.chunks_exact(columns)) {
            let values = values.iter().zip(&self.columns);
            self.even.extend(values.map(|(&value, column)| f64::from(value) * row * column));
        }
        true
    }
}

fn length(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>().sqrt()
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

/// `X Xᵀ` of a matrix with few rows.
fn gram_of_rows(x: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    let mut out = vec![0.0; rows * rows];
    for i in 0..rows {
        for j in 0..=i {
            let (a, b) = (&x[i * columns..(i + 1) * columns], &x[j * columns..(j + 1) * columns]);
            let value = dot(a, b);
            out[i * rows + j] = value;
            out[j * rows + i] = value;
        }
    }
    out
}

/// `Xᵀ X` of a matrix with few columns.
fn gram_of_columns(x: &[f64], columns: usize) -> Vec<f64> {
    let mut out = vec![0.0; columns * columns];
    for row in x.chunks_exact(columns) {
        for (out, &value) in out.chunks_exact_mut(columns).zip(row) {
            add_scaled(out, row, value);
        }
    }
    out
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut lanes = [0.0; 8];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..8 {
            lanes[i] += a[i] * b[i];
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f64>() + rest
}
