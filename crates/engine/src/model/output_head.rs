//! Output head: unembedding and log-probabilities, computed slice by slice of the vocabulary.
//!
//! Only one slice of [`SLICE`] tokens for [`BLOCK`] rows exists at a time, unless the caller asks
//! for all logits to be saved ([`SavedLogits`]). The log-sum-exp of a row is accumulated slice by
//! slice in ascending order, in f64.

use super::Model;
use super::gradients::GradientSink;
use crate::kernel::{ActivationBuffer, Isa, Lhs, Rhs, row_ops};
use crate::lora::PackedLora;
use crate::model::linear::DeltaGradient;

/// Tokens per slice of the vocabulary. Sums over the vocabulary run slice by slice, so a change of
/// this constant changes the bits of all log-probabilities.
pub(crate) const SLICE: usize = 2048;
/// Rows per block.
const BLOCK: usize = 1024;

/// A row and the token whose log-probability to compute there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LogprobQuery {
    /// Row of the head's input.
    pub(crate) row: usize,
    pub(crate) token: u32,
}

/// The output head applied to the rows of one batch.
#[derive(Debug)]
pub(crate) struct OutputHead<'a> {
    pub(crate) model: &'a Model,
    pub(crate) lora: Option<&'a PackedLora>,
    /// Rows of the residual stream after the final norm.
    pub(crate) x: &'a [f32],
}

/// Logits of a batch, saved for the backward pass: for each block of rows, its slices in order.
#[derive(Debug, Default)]
pub(crate) struct SavedLogits(Vec<ActivationBuffer>);

impl SavedLogits {
    /// Returns the size of the logits of `rows` rows in bytes.
    pub(crate) fn bytes(model: &Model, rows: usize) -> usize {
        rows.saturating_mul(4 * model.config.vocab_size)
    }

    /// Returns the slice of one row that starts at token `from`.
    fn slice(&self, vocab: usize, row: usize, from: usize) -> &[f32] {
        let slices = vocab.div_ceil(SLICE);
        let slice = &self.0[row / BLOCK * slices + from / SLICE];
        let cols = SLICE.min(vocab - from);
        &slice[row % BLOCK * cols..][..cols]
    }
}

/// Log-sum-exp of the slices of logits added so far, whose exponentials sum to `exp(max) · sum`.
#[derive(Clone, Copy, Debug)]
struct RunningLogSumExp {
    max: f32,
    sum: f64,
}

impl RunningLogSumExp {
    const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Adds one slice of logits.
    fn add(&mut self, isa: Isa, logits: &[f32]) {
        let max = row_ops::max(isa, logits);
        if max == f32::NEG_INFINITY {
            return;
        }
        let sum = f64::from(row_ops::sum_exp(isa, logits, max));
        // A NaN takes the first branch and propagates.
        if max > self.max || max.is_nan() {
            let rescale = if self.sum == 0.0 { 0.0 } else { f64::from(self.max - max).exp() };
            self.sum = self.sum * rescale + sum;
            self.max = max;
        } else {
            self.sum += sum * f64::from(max - self.max).exp();
        }
    }

    /// Returns the log-sum-exp.
    fn log(self) -> f64 {
        f64::from(self.max) + self.sum.ln()
    }
}

/// Returns `log Σ exp` of a row of logits, with the same bits as [`OutputHead::forward`].
pub(crate) fn log_sum_exp(isa: Isa, logits: &[f32]) -> f64 {
    let mut sum = RunningLogSumExp::EMPTY;
    logits.chunks(SLICE).for_each(|slice| sum.add(isa, slice));
    sum.log()
}

/// Returns the log-probability of a token from its logit and the row's log-sum-exp.
#[expect(clippy::cast_possible_truncation, reason = "reported in f32")]
pub(crate) fn log_probability(logit: f32, log_sum_exp: f64) -> f32 {
    (f64::from(logit) - log_sum_exp) as f32
}

impl OutputHead<'_> {
    /// Returns the width of a row.
    fn hidden(&self) -> usize {
        self.model.config.hidden_size
    }

    /// Returns the number of rows.
    fn count(&self) -> usize {
        self.x.len() / self.hidden()
    }

    /// Returns the LoRA hidden activations of all rows; empty without an adapter on the
    /// unembedding.
    fn lora_hidden(&self) -> ActivationBuffer {
        let Some(delta) = self.lora.and_then(|lora| lora.unembedding.as_ref()) else {
            return ActivationBuffer::default();
        };
        let mut lora_hidden = ActivationBuffer::default();
        delta.project_into(&self.model.kernel, self.x, &mut lora_hidden);
        lora_hidden
    }

    /// Computes the logits of the slice that starts at token `from`, for `count` rows from `first`.
    fn logits(
        &self,
        first: usize,
        count: usize,
        from: usize,
        lora_hidden: &[f32],
        out: &mut ActivationBuffer,
    ) {
        let kernel = &self.model.kernel;
        let hidden = self.hidden();
        let vocab = self.model.config.vocab_size;
        let cols = SLICE.min(vocab - from);
        let rhs = Rhs::Packed { weights: self.model.unembedding(), from };
        let lhs = Lhs::rows(&self.x[first * hidden..], hidden);
        let delta = self.lora.and_then(|lora| lora.unembedding.as_ref());
        let fused =
            delta.map(|delta| delta.slice(&lora_hidden[first * delta.width()..], from, cols));
        kernel.gemm_into((count, hidden, cols), (lhs, rhs), fused.as_slice(), out);
    }

    /// Returns the log-probability of every query and the log-sum-exp of every row. `queries` must
    /// be sorted by row. If `saved` is given, the logits are stored there.
    pub(crate) fn forward(
        &self,
        queries: &[LogprobQuery],
        mut saved: Option<&mut SavedLogits>,
    ) -> (Vec<f32>, Vec<f64>) {
        let vocab = self.model.config.vocab_size;
        let isa = self.model.kernel.isa();
        let lora_hidden = self.lora_hidden();
        let mut logprobs = vec![0.0; queries.len()];
        let mut sums = vec![RunningLogSumExp::EMPTY; self.count()];
        let mut logits = ActivationBuffer::default();
        for first in (0..self.count()).step_by(BLOCK) {
            let count = BLOCK.min(self.count() - first);
            let here = range_of(queries, first, count);
            for from in (0..vocab).step_by(SLICE) {
                self.logits(first, count, from, &lora_hidden, &mut logits);
                let cols = SLICE.min(vocab - from);
                let sums = &mut sums[first..first + count];
                self.model.kernel.pool().for_each_row(sums, 1, cols * 16, |row, sum| {
                    sum[0].add(isa, &logits[row * cols..(row + 1) * cols]);
                });
                for (query, logprobs) in
                    queries[here.clone()].iter().zip(&mut logprobs[here.clone()])
                {
                    if (from..from + cols).contains(&(query.token as usize)) {
                        *logprobs =
                            logits[(query.row - first) * cols + query.token as usize - from];
                    }
                }
                if let Some(saved) = saved.as_deref_mut() {
                    saved.0.push(std::mem::take(&mut logits));
                }
            }
        }
        let log_sums: Vec<f64> = sums.into_iter().map(RunningLogSumExp::log).collect();
        for (query, logprobs) in queries.iter().zip(&mut logprobs) {
            *logprobs = log_probability(*logprobs, log_sums[query.row]);
        }
        (logprobs, log_sums)
    }

    /// Returns the gradient with respect to `x`, given the gradient with respect to the
    /// log-probability of every query.
    ///
    /// Adds the gradients of the adapter's unembedding to `delta_grad`. `saved` contains the logits
    /// of the forward pass and, for every row of this head, the index of its row in that pass. If
    /// `saved` is `None`, the logits are computed again.
    pub(crate) fn backward(
        &self,
        queries: &[LogprobQuery],
        grads: &[f32],
        log_sums: &[f64],
        saved: Option<(&SavedLogits, &[usize])>,
        mut delta_grad: Option<&mut DeltaGradient>,
        sink: &mut dyn GradientSink,
    ) -> ActivationBuffer {
        let kernel = &self.model.kernel;
        let isa = kernel.isa();
        let hidden = self.hidden();
        let vocab = self.model.config.vocab_size;
        let weights = self.model.unembedding();
        let lora_hidden = self.lora_hidden();
        let delta = self.lora.and_then(|lora| lora.unembedding.as_ref());
        let width = delta.map_or(0, crate::lora::Delta::width);
        // Sum of the gradients of all queries of a row.
        let mut totals = vec![0.0_f32; self.count()];
        for (query, grad) in queries.iter().zip(grads) {
            totals[query.row] += grad;
        }
        let mut grad_x = ActivationBuffer::zeroed(self.x.len());
        let mut grad_lora_hidden = ActivationBuffer::zeroed(lora_hidden.len());
        let mut logits = ActivationBuffer::default();
        for first in (0..self.count()).step_by(BLOCK) {
            let count = BLOCK.min(self.count() - first);
            let here = range_of(queries, first, count);
            let rows_here = first * hidden..(first + count) * hidden;
            for from in (0..vocab).step_by(SLICE) {
                let cols = SLICE.min(vocab - from);
                // Replaces a row of logits by the gradients that all queries of the row have in
                // common.
                let to_gradients = |row: usize, logits: &mut [f32]| {
                    #[expect(clippy::cast_possible_truncation, reason = "gradients are f32")]
                    let shift = log_sums[first + row] as f32;
                    row_ops::scaled_exp(isa, logits, shift, -totals[first + row]);
                };
                let work = cols * 16;
                if let Some((saved, rows)) = saved {
                    let source = |row: usize| saved.slice(vocab, rows[first + row], from);
                    logits.copy_rows(kernel.pool(), count, cols, work, source, to_gradients);
                } else {
                    self.logits(first, count, from, &lora_hidden, &mut logits);
                    kernel.pool().for_each_row(&mut logits, cols, work, to_gradients);
                }
                for (query, grad) in queries[here.clone()].iter().zip(&grads[here.clone()]) {
                    if (from..from + cols).contains(&(query.token as usize)) {
                        logits[(query.row - first) * cols + query.token as usize - from] += grad;
                    }
                }
                let lhs = Lhs::rows(&logits, cols);
                let rhs = Rhs::Transposed { weights, from };
                let out = &mut grad_x[rows_here.clone()];
                kernel.gemm_accumulate((count, cols, hidden), lhs, rhs, out, hidden);
                if let Some(delta) = delta
                    && let Some(delta_grad) = delta_grad.as_deref_mut()
                {
                    let here = first * width..(first + count) * width;
                    let rhs = Rhs::Transposed { weights: delta.only_b(), from };
                    let out = &mut grad_lora_hidden[here.clone()];
                    kernel.gemm_accumulate((count, cols, width), lhs, rhs, out, width);
                    let rhs = Rhs::Rows { data: &lora_hidden[here], stride: width };
                    let out = &mut delta_grad.b[0][from * width..(from + cols) * width];
                    let size = (cols, count, width);
                    kernel.gemm_accumulate(size, Lhs::columns(&logits, cols), rhs, out, width);
                }
                sink.unembedding(self.model, from, cols, &self.x[rows_here.clone()], &logits);
            }
        }
        if let Some(delta) = delta
            && let Some(delta_grad) = delta_grad
        {
            row_ops::scale(isa, &mut grad_lora_hidden, delta.scale());
            delta.backward_a(kernel, self.x, &grad_lora_hidden, delta_grad, Some(&mut grad_x));
        }
        grad_x
    }
}

/// Returns the range of the queries of the `count` rows from `first`.
fn range_of(queries: &[LogprobQuery], first: usize, count: usize) -> std::ops::Range<usize> {
    let start = queries.partition_point(|query| query.row < first);
    let end = queries.partition_point(|query| query.row < first + count);
    start..end
}
