//! Computation of one batch of a [`Sampler`].

use super::request::ModelWeights;
use super::sampler::{Sampler, ScheduledRows};
use super::sequence::RunningSequence;
use super::state::{ActiveRequest, PromptRows};
use crate::decode::TokenSampler;
use crate::kernel::ActivationBuffer;
use crate::kernel::paged_attention::SequenceChunk;
use crate::lora::PackedLora;
use crate::model::{AdapterRows, Model, linear_with_lora};

/// Maximum number of rows whose logits are held at the same time.
const LOGIT_ROWS: usize = 32;

impl Sampler {
    /// Computes the scheduled rows and processes their logits.
    pub(super) fn compute(&mut self, scheduled: &[ScheduledRows]) {
        if scheduled.is_empty() {
            return;
        }
        // Rows that use the same adapter must be contiguous.
        let mut scheduled = scheduled.to_vec();
        scheduled
            .sort_by_key(|item| self.requests[&self.running[item.sequence].request].weights.id());
        let mut tokens = Vec::new();
        let mut chunks = Vec::with_capacity(scheduled.len());
        for item in &scheduled {
            let sequence = &self.running[item.sequence];
            chunks.push(sequence.next_chunk(tokens.len(), item.rows));
            sequence.append_next_tokens(item.rows, &mut tokens);
        }
        #[cfg(test)]
        {
            self.computed_rows += tokens.len();
        }
        let weights: Vec<_> = scheduled
            .iter()
            .map(|item| self.requests[&self.running[item.sequence].request].weights.clone())
            .collect();
        let mut adapters: Vec<AdapterRows<'_>> = Vec::new();
        let mut previous = None;
        for (chunk, weights) in chunks.iter().zip(&weights) {
            match adapters.last_mut() {
                Some(last) if previous == Some(weights.id()) => last.rows.end = chunk.rows.end,
                _ => adapters.push(AdapterRows { rows: chunk.rows.clone(), lora: weights.lora() }),
            }
            previous = Some(weights.id());
        }
        let model = self.model.clone();
        model.embed(&tokens, &chunks, &mut self.work);
        for layer in 0..model.layers.len() {
            let pages = self.cache.layer(layer);
            model.layer(layer, &chunks, &adapters, pages, &mut self.work, &mut self.activations);
        }
        for item in &scheduled {
            self.running[item.sequence].advance(&mut self.cache, item.rows);
        }
        self.process_logits(&model, &scheduled, &chunks, &weights);
    }

    /// Scores prompt rows, and samples the next token of every sequence whose tokens are all
    /// computed.
    fn process_logits(
        &mut self,
        model: &Model,
        scheduled: &[ScheduledRows],
        chunks: &[SequenceChunk],
        weights: &[ModelWeights],
    ) {
        let hidden = model.config.hidden_size;
        // Sequences without pending tokens, with the row of their last token.
        let mut complete_sequences = Vec::new();
        for ((item, chunk), weights) in scheduled.iter().zip(chunks).zip(weights) {
            let sequence = &self.running[item.sequence];
            let Some(request) = self.requests.get_mut(&sequence.request) else { continue };
            let position = sequence.computed - item.rows;
            if sequence.writer.is_none() {
                let rows = PromptRows { first: position, count: item.rows };
                let x = &self.work.x[chunk.rows.start * hidden..chunk.rows.end * hidden];
                let buffers = (&mut self.sampler, &mut self.logits);
                request.score_prompt(model, weights.lora(), rows, x, buffers);
            }
            if sequence.pending() == 0 {
                complete_sequences.push((item.sequence, chunk.rows.end - 1));
            }
        }
        for chunk in complete_sequences.chunks(LOGIT_ROWS) {
            let x: Vec<&[f32]> = chunk
                .iter()
                .map(|(_, row)| &self.work.x[row * hidden..(row + 1) * hidden])
                .collect();
            let loras: Vec<Option<&PackedLora>> = chunk
                .iter()
                .map(|(sequence, _)| self.requests[&self.running[*sequence].request].weights.lora())
                .collect();
            let mut logits = std::mem::take(&mut self.logits);
            model.logits(&x, &loras, &mut logits);
            let vocab = model.config.vocab_size;
            for ((sequence, _), logits) in chunk.iter().zip(logits.chunks_exact(vocab)) {
                self.extend_sequence(model, *sequence, logits);
            }
            self.logits = logits;
        }
        self.remove_finished();
    }

    /// Samples the next token of a sequence or, if it is a prompt, of each of its completions.
    fn extend_sequence(&mut self, model: &Model, index: usize, logits: &[f32]) {
        let isa = model.kernel.isa();
        let sequence = &mut self.running[index];
        let Some(request) = self.requests.get_mut(&sequence.request) else { return };
        if let Some(writer) = &mut sequence.writer {
            match writer.write(isa, &mut self.sampler, &request.spec, logits) {
                Ok(()) => request.observe_token(writer),
                Err(error) => request.fail(error),
            }
            return;
        }
        // A prompt whose scores failed has no result to observe.
        if request.failed() {
            return;
        }
        request.observe_prompt();
        // The prompt is complete: fork it. The first completion continues in the prompt's sequence.
        let mut others: Vec<RunningSequence> = Vec::new();
        let mut first = None;
        for sample in 0..request.spec.samples {
            let mut writer = request.writer(sample);
            if let Err(error) = writer.write(isa, &mut self.sampler, &request.spec, logits) {
                return request.fail(error);
            }
            request.observe_token(&writer);
            if sample == 0 {
                first = Some(writer);
            } else if writer.is_done() {
                request.complete(sample, writer.finish());
            } else {
                others.push(sequence.fork(&mut self.cache, writer));
            }
        }
        sequence.writer = first;
        self.running.extend(others);
    }

    /// Removes the sequences of finished completions.
    fn remove_finished(&mut self) {
        for sequence in &mut self.running {
            if sequence.writer.as_ref().is_some_and(|writer| writer.is_done())
                && let Some(writer) = sequence.writer.take()
            {
                sequence.release_pages(&mut self.cache);
                sequence.finished = true;
                if let Some(request) = self.requests.get_mut(&sequence.request) {
                    request.complete(writer.sample(), writer.finish());
                }
            }
        }
        self.running.retain(|sequence| !sequence.finished);
    }
}

impl ActiveRequest {
    /// Scores the computed prompt rows `rows`, as far as the request needs their scores. `x`
    /// contains their residual stream.
    fn score_prompt(
        &mut self,
        model: &Model,
        lora: Option<&PackedLora>,
        rows: PromptRows,
        x: &[f32],
        (sampler, logits): (&mut TokenSampler, &mut ActivationBuffer),
    ) {
        let hidden = model.config.hidden_size;
        let scored = self.scored(rows);
        if scored.is_empty() {
            return;
        }
        let x = &x[(scored.start - rows.first) * hidden..(scored.end - rows.first) * hidden];
        for (chunk, x) in x.chunks(LOGIT_ROWS * hidden).enumerate() {
            let x: Vec<&[f32]> = x.chunks_exact(hidden).collect();
            model.logits(&x, &vec![lora; x.len()], logits);
            let first = scored.start + chunk * LOGIT_ROWS;
            for (i, logits) in logits.chunks_exact(model.config.vocab_size).enumerate() {
                self.score(model.kernel.isa(), sampler, first + i, logits);
            }
        }
    }
}

impl Model {
    /// Computes the logits of rows of the residual stream. Rows with the same adapter must be
    /// contiguous.
    pub(crate) fn logits(
        &self,
        rows: &[&[f32]],
        loras: &[Option<&PackedLora>],
        logits: &mut ActivationBuffer,
    ) {
        let hidden = self.config.hidden_size;
        let mut x = Vec::with_capacity(rows.len() * hidden);
        rows.iter().for_each(|row| x.extend_from_slice(row));
        let mut normed = ActivationBuffer::default();
        let mut inverse = ActivationBuffer::default();
        self.norm_rows(&x, &self.norm, &mut normed, &mut inverse);
        let mut deltas = Vec::new();
        let mut first = 0;
        while first < rows.len() {
            let same = |lora: &&Option<&PackedLora>| same_adapter(**lora, loras[first]);
            let count = loras[first..].iter().take_while(same).count();
            if let Some(delta) = loras[first].and_then(|lora| lora.unembedding.as_ref()) {
                deltas.push((first..first + count, delta));
            }
            first += count;
        }
        linear_with_lora(
            &self.kernel,
            self.unembedding(),
            &normed,
            &deltas,
            &mut ActivationBuffer::default(),
            logits,
        );
    }
}

/// Returns whether two rows use the same adapter.
fn same_adapter(a: Option<&PackedLora>, b: Option<&PackedLora>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => std::ptr::eq(a, b),
        (None, None) => true,
        _ => false,
    }
}
