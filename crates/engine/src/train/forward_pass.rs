//! [`ForwardPass`]: log-probabilities of a micro-batch, and its backward pass.

use crate::Result;
use crate::kernel::ActivationBuffer;
use crate::kernel::paged_attention::SequenceChunk;
use crate::lora::PackedLora;
use crate::memory::probe;
use crate::model::{
    AdapterGradients, AdapterRows, GradientSink, LayerActivations, LayerBackward, LogprobQuery,
    Model, NormBackward, NormWeight, OutputHead, PackedBatch, SavedLogits, Workspace,
};

/// Minimum length in tokens of a common prefix that sequences share.
pub(super) const MIN_SHARED_PREFIX: usize = 16;
/// Memory that a layer holds while it runs, as a multiple of its activations. An estimate.
pub(super) const RUNNING_LAYER_FACTOR: usize = 3;

/// Input and target tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrainingSequence<'a> {
    pub(crate) tokens: &'a [u32],
    /// Targets, position by position; the same number for every position.
    pub(crate) targets: &'a [u32],
}

/// A completed forward pass with the activations that its backward pass needs.
#[derive(Debug)]
pub(crate) struct ForwardPass<'a> {
    model: &'a Model,
    lora: Option<&'a PackedLora>,
    batch: PackedBatch,
    chunks: Vec<SequenceChunk>,
    pages: ActivationBuffer,
    work: Workspace,
    /// Activations per layer; for layers whose activations do not fit into memory only their input.
    activations: Vec<LayerActivations>,
    /// Number of layers, counted from the last, whose activations are complete.
    saved_layers: usize,
    /// Residual stream after the final norm.
    normed: ActivationBuffer,
    /// `1 / rms` of each row before the final norm.
    inverse: ActivationBuffer,
    /// Rows and tokens whose log-probabilities were computed, sorted by row.
    queries: Vec<LogprobQuery>,
    /// Log-sum-exp of the logits of each row.
    log_sums: Vec<f64>,
    /// Logits, if they fit into memory.
    logits: Option<SavedLogits>,
    /// For every sequence and target, the index of its query.
    query_indices: Vec<Vec<usize>>,
}

/// Log-probability of every target of every sequence.
pub(crate) type TargetLogprobs = Vec<Vec<f32>>;

impl<'a> ForwardPass<'a> {
    /// Runs the model forward.
    ///
    /// `memory` is the memory limit in bytes for the backward pass; activations that do not fit are
    /// computed again. `None` means that there is no backward pass and nothing is kept.
    ///
    /// The sequences must be valid: not empty, not longer than the context, with tokens of the
    /// vocabulary.
    ///
    /// `interrupt` is called before every layer. Returns `None` if it returned true.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the system refuses memory.
    pub(crate) fn forward(
        model: &'a Model,
        lora: Option<&'a PackedLora>,
        sequences: &[TrainingSequence<'_>],
        memory: Option<usize>,
        interrupt: &dyn Fn() -> bool,
    ) -> Result<Option<(Self, TargetLogprobs)>> {
        let tokens: Vec<&[u32]> = sequences.iter().map(|sequence| sequence.tokens).collect();
        let batch = PackedBatch::pack(&tokens, MIN_SHARED_PREFIX);
        let (chunks, pages) = batch.sequence_chunks();
        let rows = batch.tokens.len();
        let layers = model.layers.len();
        let layer_bytes = LayerActivations::bytes(model, rows).max(1);
        let saved_layers = memory.map_or(0, |memory| (memory / layer_bytes).min(layers));
        let row_bytes = 4 * model.config.hidden_size;
        let input_bytes =
            if memory.is_some() { rows * (layers - saved_layers) * row_bytes } else { 0 };
        let logit_bytes = SavedLogits::bytes(model, rows);
        let save_logits = memory
            .is_some_and(|memory| logit_bytes <= memory.saturating_sub(layer_bytes * saved_layers));
        let needed = layer_bytes
            .saturating_mul(saved_layers + RUNNING_LAYER_FACTOR)
            .saturating_add(input_bytes);
        probe("a training pass", needed.saturating_add(if save_logits { logit_bytes } else { 0 }))?;
        let logits = save_logits.then(SavedLogits::default);
        let mut pass = Self {
            model,
            lora,
            chunks,
            pages: ActivationBuffer::zeroed(pages * model.heads().page_floats()),
            work: Workspace::default(),
            activations: Vec::new(),
            saved_layers,
            normed: ActivationBuffer::default(),
            inverse: ActivationBuffer::default(),
            queries: Vec::new(),
            log_sums: Vec::new(),
            logits,
            query_indices: Vec::new(),
            batch,
        };
        model.embed(&pass.batch.tokens, &pass.chunks, &mut pass.work);
        let mut current = LayerActivations::default();
        for layer in 0..layers {
            if interrupt() {
                return Ok(None);
            }
            pass.layer(layer, &mut current);
            if memory.is_none() {
                continue;
            }
            // Keep the activations of the last layers: the backward pass needs them first.
            pass.activations.push(if layer + saved_layers >= layers {
                std::mem::take(&mut current)
            } else {
                LayerActivations {
                    input: std::mem::take(&mut current.input),
                    ..LayerActivations::default()
                }
            });
        }
        if saved_layers == layers {
            // No layer runs again. Memory peaks when the logits are added to the activations.
            pass.work.free_layer_buffers();
            pass.pages = ActivationBuffer::default();
        }
        model.norm_rows(&pass.work.x, &model.norm, &mut pass.normed, &mut pass.inverse);
        let logprobs = pass.score(sequences);
        Ok(Some((pass, logprobs)))
    }

    /// Runs one layer forward, in place on `work.x`.
    fn layer(&mut self, layer: usize, activations: &mut LayerActivations) {
        let adapters = [AdapterRows { rows: 0..self.batch.tokens.len(), lora: self.lora }];
        let pages = &mut self.pages;
        let work = &mut self.work;
        self.model.layer(layer, &self.chunks, &adapters, pages, work, activations);
    }

    /// Computes the log-probabilities of all targets from the normalized residual stream.
    fn score(&mut self, sequences: &[TrainingSequence<'_>]) -> TargetLogprobs {
        // Queries must be sorted by row. A row that several sequences share has queries of each.
        let mut sorted_queries: Vec<(usize, u32, usize, usize)> = Vec::new();
        for (i, sequence) in sequences.iter().enumerate() {
            let per_position = sequence.targets.len() / sequence.tokens.len();
            for (position, row) in self.batch.rows(i).enumerate() {
                for k in position * per_position..(position + 1) * per_position {
                    sorted_queries.push((row, sequence.targets[k], i, k));
                }
            }
        }
        sorted_queries.sort_by_key(|(row, ..)| *row);
        self.queries =
            sorted_queries.iter().map(|&(row, token, ..)| LogprobQuery { row, token }).collect();
        self.query_indices =
            sequences.iter().map(|sequence| vec![0; sequence.targets.len()]).collect();
        for (query_index, &(_, _, sequence, k)) in sorted_queries.iter().enumerate() {
            self.query_indices[sequence][k] = query_index;
        }
        let head = OutputHead { model: self.model, lora: self.lora, x: &self.normed };
        let (logprobs, log_sums) = head.forward(&self.queries, self.logits.as_mut());
        self.log_sums = log_sums;
        self.query_indices
            .iter()
            .map(|indices| indices.iter().map(|query_index| logprobs[*query_index]).collect())
            .collect()
    }

    /// Runs backward, given the gradient with respect to every log-probability, and adds to the
    /// gradients of the adapter.
    ///
    /// `interrupt` is called before every layer. Returns false if it returned true: `grads` then
    /// contains the gradients of some layers only.
    #[must_use]
    pub(crate) fn backward(
        mut self,
        logprob_grads: &[Vec<f32>],
        grads: &mut AdapterGradients,
        sink: &mut dyn GradientSink,
        interrupt: &dyn Fn() -> bool,
    ) -> bool {
        let Some(mut grad) = self.head_backward(logprob_grads, grads, sink) else { return true };
        let layers = self.model.layers.len();
        for layer in (0..layers).rev() {
            if interrupt() {
                return false;
            }
            let mut activations = self.activations.pop().unwrap_or_default();
            if layer + self.saved_layers < layers {
                self.work.x = std::mem::take(&mut activations.input);
                self.layer(layer, &mut activations);
            }
            let pass = LayerBackward {
                index: layer,
                batch: &self.batch,
                angles: &self.work.angles,
                activations: &activations,
                deltas: self.lora.map(|lora| &lora.layers[layer]),
                input_gradient: layer > 0 || sink.is_enabled(),
            };
            self.model.layer_backward(&pass, &mut grads.layers[layer], &mut grad, sink);
        }
        if sink.is_enabled() {
            sink.embedding(&self.batch.tokens, &grad);
        }
        true
    }

    /// Returns the gradient with respect to the output of the last layer, or `None` if it is zero.
    fn head_backward(
        &mut self,
        logprob_grads: &[Vec<f32>],
        grads: &mut AdapterGradients,
        sink: &mut dyn GradientSink,
    ) -> Option<ActivationBuffer> {
        let hidden = self.model.config.hidden_size;
        let mut grads_by_query = vec![0.0_f32; self.queries.len()];
        for (logprob_grads, query_indices) in logprob_grads.iter().zip(&self.query_indices) {
            for (grad_value, query_index) in logprob_grads.iter().zip(query_indices) {
                grads_by_query[*query_index] = *grad_value;
            }
        }
        // Only rows with a nonzero gradient go through the output head again.
        let mut rows: Vec<usize> = Vec::new();
        let mut queries = Vec::new();
        let mut logprob_grads = Vec::new();
        for (query, grad_value) in self.queries.iter().zip(&grads_by_query) {
            if *grad_value != 0.0 {
                if rows.last() != Some(&query.row) {
                    rows.push(query.row);
                }
                queries.push(LogprobQuery { row: rows.len() - 1, token: query.token });
                logprob_grads.push(*grad_value);
            }
        }
        if rows.is_empty() {
            return None;
        }
        let mut x = ActivationBuffer::default();
        let pool = self.model.kernel.pool();
        let source = |i: usize| &self.normed[rows[i] * hidden..(rows[i] + 1) * hidden];
        x.copy_rows(pool, rows.len(), hidden, hidden, source, |_, _| ());
        let log_sums: Vec<f64> = rows.iter().map(|row| self.log_sums[*row]).collect();
        let head = OutputHead { model: self.model, lora: self.lora, x: &x };
        let saved_logits = self.logits.take();
        let saved_logits = saved_logits.as_ref().map(|logits| (logits, &rows[..]));
        let grad_x = head.backward(
            &queries,
            &logprob_grads,
            &log_sums,
            saved_logits,
            grads.unembedding.as_mut(),
            sink,
        );
        let mut grad_normed = ActivationBuffer::zeroed(self.normed.len());
        for (row, grad_x) in rows.iter().zip(grad_x.chunks_exact(hidden)) {
            grad_normed[row * hidden..(row + 1) * hidden].copy_from_slice(grad_x);
        }
        let mut grad = ActivationBuffer::zeroed(self.normed.len());
        let norm = NormBackward {
            which: NormWeight::Last,
            gain: &self.model.norm,
            input: &self.work.x,
            inverse_rms: &self.inverse,
            grad_output: &grad_normed,
        };
        self.model.norm_backward(&norm, &mut grad, sink);
        Some(grad)
    }
}
