//! One batch of a [`Sampler`]: rows through the model, logits to where they are wanted.

use super::sampler::{Sampler, ScheduledRows};
use super::sequence::RunningSequence;
use super::state::{ActiveRequest, PromptRows};
use crate::lora::PackedLora;
use crate::model::{AdapterRows, Model, linear_with_lora};

/// PromptRows whose logits exist at the same time.
const LOGIT_ROWS: usize = 32;

impl Sampler {
    /// Computes the planned rows and hands their results to requests and writers.
    pub(super) fn run(&mut self, shares: &[ScheduledRows]) {
        if shares.is_empty() {
            return;
        }
        // PromptRows of one adapter stand together.
        let mut shares = shares.to_vec();
        shares
            .sort_by_key(|share| self.requests[&self.running[share.sequence].request].weights.id());
        let mut tokens = Vec::new();
        let mut chunks = Vec::with_capacity(shares.len());
        for share in &shares {
            let sequence = &self.running[share.sequence];
            chunks.push(sequence.next_chunk(tokens.len(), share.rows));
            tokens.extend_from_slice(&sequence.tokens[sequence.computed..][..share.rows]);
        }
        let weights: Vec<_> = shares
            .iter()
            .map(|share| self.requests[&self.running[share.sequence].request].weights.clone())
            .collect();
        let mut adapted: Vec<AdapterRows<'_>> = Vec::new();
        let mut before = None;
        for (chunk, weights) in chunks.iter().zip(&weights) {
            match adapted.last_mut() {
                Some(last) if before == Some(weights.id()) => last.rows.end = chunk.rows.end,
                _ => adapted.push(AdapterRows { rows: chunk.rows.clone(), lora: weights.lora() }),
            }
            before = Some(weights.id());
        }
        let model = self.model.clone();
        model.embed(&tokens, &chunks, &mut self.work);
        for layer in 0..model.layers.len() {
            let pages = self.cache.layer(layer);
            model.layer(layer, &chunks, &adapted, pages, &mut self.work, &mut self.activations);
        }
        for share in &shares {
            self.running[share.sequence].advance(&mut self.cache, share.rows);
        }
        self.deliver(&model, &shares, &first_rows(&chunks), &weights);
    }

    /// Logits of the rows that anyone wants, row by row to whoever wants them.
    fn deliver(
        &mut self,
        model: &Model,
        shares: &[ScheduledRows],
        firsts: &[usize],
        weights: &[super::request::SamplingWeights],
    ) {
        let hidden = model.config.hidden_size;
        let mut split = Vec::new();
        for ((share, first), weights) in shares.iter().zip(firsts).zip(weights) {
            let sequence = &self.running[share.sequence];
            let Some(request) = self.requests.get_mut(&sequence.request) else { continue };
            let position = sequence.computed - share.rows;
            if sequence.writer.is_none() {
                let rows = PromptRows { first: position, count: share.rows };
                let x = &self.work.x[first * hidden..(first + share.rows) * hidden];
                request.score_prompt(model, weights.lora(), rows, x, &mut self.logits);
            }
            if sequence.pending() == 0 {
                split.push((share.sequence, first + share.rows - 1));
            }
        }
        for chunk in split.chunks(LOGIT_ROWS) {
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
                self.write(model, *sequence, logits);
            }
            self.logits = logits;
        }
        self.retire();
    }

    /// Writes the next token of a sequence, or of every sample if it was a prompt.
    fn write(&mut self, model: &Model, index: usize, logits: &[f32]) {
        let isa = model.kernel.isa();
        let sequence = &mut self.running[index];
        let Some(request) = self.requests.get_mut(&sequence.request) else { return };
        if let Some(writer) = &mut sequence.writer {
            match writer.write(isa, &request.asked, logits) {
                Ok(token) => sequence.tokens.push(token),
                Err(error) => request.fail(error),
            }
            return;
        }
        // The prompt is done: the samples part here. The first goes on in the prompt's place.
        let mut others: Vec<RunningSequence> = Vec::new();
        let mut first = None;
        for sample in 0..request.asked.samples {
            let mut writer = request.writer(sample);
            let token = match writer.write(isa, &request.asked, logits) {
                Ok(token) => token,
                Err(error) => return request.fail(error),
            };
            if sample == 0 {
                first = Some((writer, token));
            } else if writer.is_done() {
                request.put(sample, writer.finish());
            } else {
                let mut other = sequence.split(&mut self.cache, writer);
                other.tokens.push(token);
                others.push(other);
            }
        }
        if let Some((writer, token)) = first {
            sequence.writer = Some(writer);
            sequence.tokens.push(token);
        }
        self.running.extend(others);
    }

    /// Takes out sequences that are finished.
    fn retire(&mut self) {
        for sequence in &mut self.running {
            if sequence.writer.as_ref().is_some_and(|writer| writer.is_done())
                && let Some(writer) = sequence.writer.take()
            {
                sequence.give_up(&mut self.cache);
                sequence.tokens.clear();
                if let Some(request) = self.requests.get_mut(&sequence.request) {
                    request.put(writer.sample(), writer.finish());
                }
            }
        }
        self.running.retain(|sequence| !sequence.tokens.is_empty());
    }
}

fn first_rows(chunks: &[crate::kernel::paged_attention::SequenceChunk]) -> Vec<usize> {
    chunks.iter().map(|chunk| chunk.rows.start).collect()
}

impl ActiveRequest {
    /// Takes in computed rows of the prompt, as far as anyone asked about them.
    fn score_prompt(
        &mut self,
        model: &Model,
        lora: Option<&PackedLora>,
        rows: PromptRows,
        x: &[f32],
        logits: &mut Vec<f32>,
    ) {
        let hidden = model.config.hidden_size;
        let wanted = self.wanted(rows);
        if wanted.is_empty() {
            return;
        }
        let x = &x[(wanted.start - rows.first) * hidden..(wanted.end - rows.first) * hidden];
        for (chunk, x) in x.chunks(LOGIT_ROWS * hidden).enumerate() {
            let x: Vec<&[f32]> = x.chunks_exact(hidden).collect();
            model.logits(&x, &vec![lora; x.len()], logits);
            let first = wanted.start + chunk * LOGIT_ROWS;
            for (i, logits) in logits.chunks_exact(model.config.vocab_size).enumerate() {
                self.score(model.kernel.isa(), first + i, logits);
            }
        }
    }
}

impl Model {
    /// The logits of rows of the residual stream; rows of one adapter must stand together.
    pub(crate) fn logits(
        &self,
        rows: &[&[f32]],
        loras: &[Option<&PackedLora>],
        logits: &mut Vec<f32>,
    ) {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let mut x = Vec::with_capacity(rows.len() * hidden);
        rows.iter().for_each(|row| x.extend_from_slice(row));
        let (mut normed, mut inverse) = (Vec::new(), Vec::new());
        self.norm_rows(&x, &self.norm, &mut normed, &mut inverse);
        logits.resize(rows.len() * vocab, 0.0);
        let mut deltas = Vec::new();
        let mut first = 0;
        while first < rows.len() {
            let same = |lora: &&Option<&PackedLora>| same(**lora, loras[first]);
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
            &mut Vec::new(),
            logits,
        );
    }
}

fn same(a: Option<&PackedLora>, b: Option<&PackedLora>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => std::ptr::eq(a, b),
        (None, None) => true,
        _ => false,
    }
}
