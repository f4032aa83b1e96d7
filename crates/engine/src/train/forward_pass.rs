//! One pass over a batch: log-probabilities forward, gradients back.

use crate::Result;
use crate::kernel::paged_attention::SequenceChunk;
use crate::lora::PackedLora;
use crate::memory::probe;
use crate::model::{
    AdapterGradients, AdapterRows, GradientSink, LayerActivations, LayerBackward, LogprobQuery,
    Model, NormWeight, OutputHead, PackedBatch, SavedLogits, Workspace,
};

/// Common beginnings shorter than this are computed again for each sequence.
pub(super) const WORTH_SHARING: usize = 16;

/// One sequence: what the model reads, and which tokens are scored after each position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrainingSequence<'a> {
    pub(crate) tokens: &'a [u32],
    /// As many for every position: one, or `targets.len() / tokens.len()`.
    pub(crate) targets: &'a [u32],
}

/// A forward pass that is over, with what its backward pass needs.
#[derive(Debug)]
pub(crate) struct ForwardPass<'a> {
    model: &'a Model,
    lora: Option<&'a PackedLora>,
    batch: PackedBatch,
    chunks: Vec<SequenceChunk>,
    pages: Vec<f32>,
    work: Workspace,
    /// What every layer got; all of its activations where memory allows.
    activations: Vec<LayerActivations>,
    kept: usize,
    normed: Vec<f32>,
    inverse: Vec<f32>,
    pairs: Vec<LogprobQuery>,
    logs: Vec<f64>,
    /// The logits, where memory allows.
    logits: Option<SavedLogits>,
    /// For every sequence and target the place of its pair.
    places: Vec<Vec<usize>>,
}

/// What a forward pass found: the log-probability of every target.
pub(crate) type TargetLogprobs = Vec<Vec<f32>>;

impl<'a> ForwardPass<'a> {
    /// Runs the model forward. `memory` bounds what is kept for the way back; what does not fit is
    /// computed again. Without a way back nothing is kept.
    ///
    /// Sequences must be checked: not empty, not too long, tokens that exist.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the system does not have the memory.
    pub(crate) fn forward(
        model: &'a Model,
        lora: Option<&'a PackedLora>,
        sequences: &[TrainingSequence<'_>],
        memory: Option<usize>,
    ) -> Result<(Self, TargetLogprobs)> {
        let tokens: Vec<&[u32]> = sequences.iter().map(|sequence| sequence.tokens).collect();
        let batch = PackedBatch::pack(&tokens, WORTH_SHARING);
        let (chunks, pages) = batch.sequence_chunks();
        let rows = batch.tokens.len();
        let layers = model.layers.len();
        let activations = LayerActivations::bytes(model, rows).max(1);
        let kept = memory.map_or(0, |memory| (memory / activations).min(layers));
        let width = 4 * model.config.hidden_size;
        let inputs = if memory.is_some() { rows * (layers - kept) * width } else { 0 };
        let logits = SavedLogits::bytes(model, rows);
        let keep = memory.is_some_and(|memory| logits <= memory.saturating_sub(activations * kept));
        let needed = activations.saturating_mul(kept + 3).saturating_add(inputs);
        probe("a training pass", needed.saturating_add(if keep { logits } else { 0 }))?;
        let logits = keep.then(SavedLogits::default);
        let mut pass = Self {
            model,
            lora,
            chunks,
            pages: vec![0.0; pages * model.heads().page_floats()],
            work: Workspace::default(),
            activations: Vec::new(),
            kept,
            normed: Vec::new(),
            inverse: Vec::new(),
            pairs: Vec::new(),
            logs: Vec::new(),
            logits,
            places: Vec::new(),
            batch,
        };
        model.embed(&pass.batch.tokens, &pass.chunks, &mut pass.work);
        let mut spare = LayerActivations::default();
        for layer in 0..layers {
            pass.layer(layer, &mut spare);
            if memory.is_none() {
                continue;
            }
            // The last layers are the first ones that the way back needs.
            pass.activations.push(if layer + kept >= layers {
                std::mem::take(&mut spare)
            } else {
                LayerActivations {
                    input: std::mem::take(&mut spare.input),
                    ..LayerActivations::default()
                }
            });
        }
        model.norm_rows(&pass.work.x, &model.norm, &mut pass.normed, &mut pass.inverse);
        let logprobs = pass.score(sequences);
        Ok((pass, logprobs))
    }

    fn layer(&mut self, layer: usize, activations: &mut LayerActivations) {
        let adapted = [AdapterRows { rows: 0..self.batch.tokens.len(), lora: self.lora }];
        let (pages, work) = (&mut self.pages, &mut self.work);
        self.model.layer(layer, &self.chunks, &adapted, pages, work, activations);
    }

    fn score(&mut self, sequences: &[TrainingSequence<'_>]) -> TargetLogprobs {
        // Pairs must be sorted by row; rows that sequences share have pairs of each.
        let mut wanted: Vec<(usize, u32, usize, usize)> = Vec::new();
        for (i, sequence) in sequences.iter().enumerate() {
            let each = sequence.targets.len() / sequence.tokens.len();
            for (position, row) in self.batch.rows(i).enumerate() {
                for k in position * each..(position + 1) * each {
                    wanted.push((row, sequence.targets[k], i, k));
                }
            }
        }
        wanted.sort_by_key(|(row, ..)| *row);
        self.pairs = wanted.iter().map(|&(row, token, ..)| LogprobQuery { row, token }).collect();
        self.places = sequences.iter().map(|sequence| vec![0; sequence.targets.len()]).collect();
        for (place, &(_, _, sequence, k)) in wanted.iter().enumerate() {
            self.places[sequence][k] = place;
        }
        let head = OutputHead { model: self.model, lora: self.lora, x: &self.normed };
        let (found, logs) = head.forward(&self.pairs, self.logits.as_mut());
        self.logs = logs;
        self.places.iter().map(|of| of.iter().map(|place| found[*place]).collect()).collect()
    }

    /// Runs back from the gradients by every log-probability, aligned with the targets, and adds
    /// to the gradients of the adapter.
    pub(crate) fn backward(
        mut self,
        slopes: &[Vec<f32>],
        grads: &mut AdapterGradients,
        sink: &mut dyn GradientSink,
    ) {
        let Some(mut grad) = self.head_backward(slopes, grads, sink) else { return };
        let layers = self.model.layers.len();
        for layer in (0..layers).rev() {
            let mut activations = self.activations.pop().unwrap_or_default();
            if layer + self.kept < layers {
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
    }

    /// The gradient by what the last layer gave; `None` if there is none at all.
    fn head_backward(
        &mut self,
        slopes: &[Vec<f32>],
        grads: &mut AdapterGradients,
        sink: &mut dyn GradientSink,
    ) -> Option<Vec<f32>> {
        let hidden = self.model.config.hidden_size;
        let mut by_pair = vec![0.0_f32; self.pairs.len()];
        for (slopes, places) in slopes.iter().zip(&self.places) {
            for (slope, place) in slopes.iter().zip(places) {
                by_pair[*place] = *slope;
            }
        }
        // Only rows with a gradient go through the unembedding again.
        let mut rows: Vec<usize> = Vec::new();
        let mut pairs = Vec::new();
        let mut slopes = Vec::new();
        for (pair, slope) in self.pairs.iter().zip(&by_pair) {
            if *slope != 0.0 {
                if rows.last() != Some(&pair.row) {
                    rows.push(pair.row);
                }
                pairs.push(LogprobQuery { row: rows.len() - 1, token: pair.token });
                slopes.push(*slope);
            }
        }
        if rows.is_empty() {
            return None;
        }
        let mut x = Vec::with_capacity(rows.len() * hidden);
        for row in &rows {
            x.extend_from_slice(&self.normed[row * hidden..(row + 1) * hidden]);
        }
        let logs: Vec<f64> = rows.iter().map(|row| self.logs[*row]).collect();
        let head = OutputHead { model: self.model, lora: self.lora, x: &x };
        let kept = self.logits.take();
        let kept = kept.as_ref().map(|kept| (kept, &rows[..]));
        let some = head.backward(&pairs, &slopes, &logs, kept, grads.unembedding.as_mut(), sink);
        let mut grad_normed = vec![0.0; self.normed.len()];
        for (row, some) in rows.iter().zip(some.chunks_exact(hidden)) {
            grad_normed[row * hidden..(row + 1) * hidden].copy_from_slice(some);
        }
        let mut grad = vec![0.0; self.normed.len()];
        let norm = (NormWeight::Last, &self.model.norm[..]);
        let (x, inverse) = (&self.work.x, &self.inverse);
        self.model.norm_backward(norm, x, inverse, &grad_normed, &mut grad, sink);
        Some(grad)
    }
}
