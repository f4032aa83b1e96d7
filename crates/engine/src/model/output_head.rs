//! Unembedding and log-probabilities in one pass over slices of the vocabulary.
//!
//! The logits of a batch never exist all at once.

use super::Model;
use super::backward::GradientSink;
use crate::kernel::{Isa, Lhs, Rhs, row_ops};
use crate::lora::PackedLora;
use crate::model::linear::DeltaGradient;

/// Tokens of one slice of the vocabulary. Sums over the vocabulary run slice by slice, so this is
/// part of the result's bits.
pub(crate) const SLICE: usize = 2048;
/// Rows that are worked on together.
const BLOCK: usize = 1024;

/// A row and a token whose log-probability there is wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LogprobQuery {
    /// Which of the head's rows.
    pub(crate) row: usize,
    pub(crate) token: u32,
}

/// The head of one batch: its rows, after the last norm.
#[derive(Debug)]
pub(crate) struct OutputHead<'a> {
    pub(crate) model: &'a Model,
    pub(crate) lora: Option<&'a PackedLora>,
    pub(crate) x: &'a [f32],
}

/// The logits of a batch, kept for the way back: slices of blocks of rows, one after the other.
#[derive(Debug, Default)]
pub(crate) struct SavedLogits(Vec<Vec<f32>>);

impl SavedLogits {
    /// Memory that the logits of `rows` rows take.
    pub(crate) fn bytes(model: &Model, rows: usize) -> usize {
        rows.saturating_mul(4 * model.config.vocab_size)
    }

    /// Copies one slice of one row to `out`.
    fn copy(&self, vocab: usize, row: usize, from: usize, out: &mut [f32]) {
        let slices = vocab.div_ceil(SLICE);
        let slice = &self.0[row / BLOCK * slices + from / SLICE];
        out.copy_from_slice(&slice[row % BLOCK * out.len()..][..out.len()]);
    }
}

/// A sum of exponentials that is still growing.
#[derive(Clone, Copy, Debug)]
struct RunningLogSumExp {
    max: f32,
    sum: f64,
}

impl RunningLogSumExp {
    const NONE: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Takes in one slice of logits.
    fn add(&mut self, isa: Isa, logits: &[f32]) {
        let max = row_ops::max(isa, logits);
        if max == f32::NEG_INFINITY {
            return;
        }
        let sum = f64::from(row_ops::sum_exp(isa, logits, max));
        // NaN goes through the first branch and stays.
        if max > self.max || max.is_nan() {
            let old = if self.sum == 0.0 { 0.0 } else { f64::from(self.max - max).exp() };
            self.sum = self.sum * old + sum;
            self.max = max;
        } else {
            self.sum += sum * f64::from(max - self.max).exp();
        }
    }

    fn log(self) -> f64 {
        f64::from(self.max) + self.sum.ln()
    }
}

/// `log Σ exp` of a whole row of logits, with the bits that training gets.
pub(crate) fn log_sum_exp(isa: Isa, logits: &[f32]) -> f64 {
    let mut mass = RunningLogSumExp::NONE;
    logits.chunks(SLICE).for_each(|slice| mass.add(isa, slice));
    mass.log()
}

/// A log-probability from a logit.
#[expect(clippy::cast_possible_truncation, reason = "reported in f32")]
pub(crate) fn log_probability(logit: f32, log_sum_exp: f64) -> f32 {
    (f64::from(logit) - log_sum_exp) as f32
}

impl OutputHead<'_> {
    fn hidden(&self) -> usize {
        self.model.config.hidden_size
    }

    fn count(&self) -> usize {
        self.x.len() / self.hidden()
    }

    fn down(&self) -> Vec<f32> {
        let Some(delta) = self.lora.and_then(|lora| lora.unembedding.as_ref()) else {
            return Vec::new();
        };
        let mut down = vec![0.0; self.count() * delta.width()];
        delta.project(&self.model.kernel, self.x, &mut down);
        down
    }

    /// Logits of one slice for rows `first` and on, `count` of them.
    fn logits(&self, first: usize, count: usize, from: usize, down: &[f32], out: &mut Vec<f32>) {
        let kernel = &self.model.kernel;
        let (hidden, vocab) = (self.hidden(), self.model.config.vocab_size);
        let cols = SLICE.min(vocab - from);
        out.resize(count * cols, 0.0);
        let rhs = Rhs::Packed { weights: self.model.unembedding(), from };
        let lhs = Lhs::rows(&self.x[first * hidden..], hidden);
        let delta = self.lora.and_then(|lora| lora.unembedding.as_ref());
        let more = delta.map(|delta| delta.slice(&down[first * delta.width()..], from, cols));
        kernel.gemm_fused((count, hidden, cols), (lhs, rhs), more.as_slice(), out, cols);
    }

    /// The log-probability of every pair (sorted by row), and the `log Σ exp` of every row. The
    /// logits go to `kept`, if there is one.
    pub(crate) fn forward(
        &self,
        pairs: &[LogprobQuery],
        mut kept: Option<&mut SavedLogits>,
    ) -> (Vec<f32>, Vec<f64>) {
        let vocab = self.model.config.vocab_size;
        let isa = self.model.kernel.isa();
        let down = self.down();
        let mut found = vec![0.0; pairs.len()];
        let mut masses = vec![RunningLogSumExp::NONE; self.count()];
        let mut logits = Vec::new();
        for first in (0..self.count()).step_by(BLOCK) {
            let count = BLOCK.min(self.count() - first);
            let pairs_here = range_of(pairs, first, count);
            for from in (0..vocab).step_by(SLICE) {
                self.logits(first, count, from, &down, &mut logits);
                let cols = SLICE.min(vocab - from);
                let masses = &mut masses[first..first + count];
                self.model.kernel.pool().each_row(masses, 1, cols * 16, |row, mass| {
                    mass[0].add(isa, &logits[row * cols..(row + 1) * cols]);
                });
                for (pair, found) in
                    pairs[pairs_here.clone()].iter().zip(&mut found[pairs_here.clone()])
                {
                    if (from..from + cols).contains(&(pair.token as usize)) {
                        *found = logits[(pair.row - first) * cols + pair.token as usize - from];
                    }
                }
                if let Some(kept) = kept.as_deref_mut() {
                    kept.0.push(std::mem::take(&mut logits));
                }
            }
        }
        let logs: Vec<f64> = masses.into_iter().map(RunningLogSumExp::log).collect();
        for (pair, found) in pairs.iter().zip(&mut found) {
            *found = log_probability(*found, logs[pair.row]);
        }
        (found, logs)
    }

    /// The gradient by the rows, from the gradient by every pair's log-probability; adds to the
    /// gradients of the adapter's unembedding. `kept` holds the logits, if anyone does, and says
    /// which of its rows these are.
    pub(crate) fn backward(
        &self,
        pairs: &[LogprobQuery],
        grads: &[f32],
        logs: &[f64],
        kept: Option<(&SavedLogits, &[usize])>,
        mut delta_grad: Option<&mut DeltaGradient>,
        sink: &mut dyn GradientSink,
    ) -> Vec<f32> {
        let kernel = &self.model.kernel;
        let isa = kernel.isa();
        let (hidden, vocab) = (self.hidden(), self.model.config.vocab_size);
        let weights = self.model.unembedding();
        let down = self.down();
        let delta = self.lora.and_then(|lora| lora.unembedding.as_ref());
        let width = delta.map_or(0, crate::lora::Delta::width);
        let mut totals = vec![0.0_f32; self.count()];
        for (pair, grad) in pairs.iter().zip(grads) {
            totals[pair.row] += grad;
        }
        let mut grad_x = vec![0.0; self.x.len()];
        let mut grad_down = vec![0.0; down.len()];
        let mut logits = Vec::new();
        for first in (0..self.count()).step_by(BLOCK) {
            let count = BLOCK.min(self.count() - first);
            let here = range_of(pairs, first, count);
            let rows_here = first * hidden..(first + count) * hidden;
            for from in (0..vocab).step_by(SLICE) {
                let cols = SLICE.min(vocab - from);
                match kept {
                    Some(_) => logits.resize(count * cols, 0.0),
                    None => self.logits(first, count, from, &down, &mut logits),
                }
                kernel.pool().each_row(&mut logits, cols, cols * 16, |row, logits| {
                    if let Some((kept, rows)) = kept {
                        kept.copy(vocab, rows[first + row], from, logits);
                    }
                    #[expect(clippy::cast_possible_truncation, reason = "computing is in f32")]
                    let shift = logs[first + row] as f32;
                    row_ops::scaled_exp(isa, logits, shift, -totals[first + row]);
                });
                for (pair, grad) in pairs[here.clone()].iter().zip(&grads[here.clone()]) {
                    if (from..from + cols).contains(&(pair.token as usize)) {
                        logits[(pair.row - first) * cols + pair.token as usize - from] += grad;
                    }
                }
                let lhs = Lhs::rows(&logits, cols);
                let rhs = Rhs::Transposed { weights, from };
                let out = &mut grad_x[rows_here.clone()];
                kernel.gemm_accumulate((count, cols, hidden), lhs, rhs, out, hidden);
                if let (Some(delta), Some(delta_grad)) = (delta, delta_grad.as_deref_mut()) {
                    let here = first * width..(first + count) * width;
                    let rhs = Rhs::Transposed { weights: delta.only_b(), from };
                    let out = &mut grad_down[here.clone()];
                    kernel.gemm_accumulate((count, cols, width), lhs, rhs, out, width);
                    let rhs = Rhs::Rows { data: &down[here], stride: width };
                    let out = &mut delta_grad.b[0][from * width..(from + cols) * width];
                    let size = (cols, count, width);
                    kernel.gemm_accumulate(size, Lhs::columns(&logits, cols), rhs, out, width);
                }
                sink.unembedding(self.model, from, cols, &self.x[rows_here.clone()], &logits);
            }
        }
        if let (Some(delta), Some(delta_grad)) = (delta, delta_grad) {
            row_ops::scale(isa, &mut grad_down, delta.scale());
            delta.backward_a(kernel, self.x, &grad_down, delta_grad, Some(&mut grad_x));
        }
        grad_x
    }
}

/// Which pairs are about rows `first` and on, `count` of them.
fn range_of(pairs: &[LogprobQuery], first: usize, count: usize) -> std::ops::Range<usize> {
    let start = pairs.partition_point(|pair| pair.row < first);
    let end = pairs.partition_point(|pair| pair.row < first + count);
    start..end
}
