//! A batch of any size through a model, in as many passes as its memory takes.

use super::datum::Datum;
use super::forward_pass::{ForwardPass, TrainingSequence, WORTH_SHARING};
use super::objective::{DatumLoss, TrainingObjective, TrainingOutput, report};
use crate::lora::PackedLora;
use crate::model::{
    AdapterGradients, GradientSink, LayerActivations, Model, PackedBatch, SavedLogits,
};
use crate::{Error, Result};

/// What a batch is run with.
pub(super) struct BatchExecution<'a> {
    pub(super) model: &'a Model,
    pub(super) lora: Option<&'a PackedLora>,
    /// Bytes that a pass may keep.
    pub(super) memory: usize,
    pub(super) objective: &'a TrainingObjective<'a>,
}

impl BatchExecution<'_> {
    /// Runs checked data forward, and back if there is somewhere to put gradients.
    ///
    /// Data that begin alike stay together; otherwise a batch is cut where its memory ends. Sums go
    /// on over the cuts, so these change no bit.
    ///
    /// # Errors
    /// If the loss of a datum is not a number, or the system does not have the memory. Gradients
    /// may then have been added to.
    pub(super) fn data(
        &self,
        data: &[Datum<'_>],
        mut back: Option<(&mut AdapterGradients, &mut dyn GradientSink)>,
    ) -> Result<TrainingOutput> {
        let mut logprobs: Vec<Vec<f32>> = vec![Vec::new(); data.len()];
        let mut parts: Vec<Option<DatumLoss>> = data.iter().map(|_| None).collect();
        let tokens: Vec<&[u32]> = data.iter().map(|datum| datum.tokens).collect();
        for batch in PackedBatch::micro_batches(&tokens, WORTH_SHARING, self.rows(back.is_some())) {
            let sequences: Vec<TrainingSequence<'_>> =
                batch.iter().map(|index| data[*index].sequence()).collect();
            let memory = back.is_some().then_some(self.memory);
            let (pass, found) = ForwardPass::forward(self.model, self.lora, &sequences, memory)?;
            let mut slopes = Vec::with_capacity(batch.len());
            for (&index, found) in batch.iter().zip(found) {
                let (part, slope) = self
                    .objective
                    .evaluate(&data[index], &found)
                    .map_err(|error| error.in_datum(index))?;
                slopes.push(slope);
                parts[index] = Some(part);
                logprobs[index] = found;
            }
            if let Some((grads, sink)) = &mut back {
                pass.backward(&slopes, grads, *sink);
            }
        }
        let metrics = report(data, parts.into_iter().flatten().collect());
        Ok(TrainingOutput { logprobs, metrics })
    }

    /// How many rows a pass may have so that it can keep everything.
    fn rows(&self, back: bool) -> usize {
        let (layers, logits) = match back {
            true => (self.model.layers.len(), SavedLogits::bytes(self.model, 1)),
            false => (0, 0),
        };
        // On the way, a layer holds about three times what it keeps.
        self.memory / ((layers + 3) * LayerActivations::bytes(self.model, 1) + logits).max(1)
    }
}

/// The first number of a gradient that is none.
pub(super) fn check_gradient<'a>(grads: impl Iterator<Item = &'a f32>) -> Result<()> {
    match grads.enumerate().find(|(_, grad)| !grad.is_finite()) {
        None => Ok(()),
        Some((index, grad)) => Err(Error::NonFiniteResult {
            what: "the gradient".to_owned(),
            index,
            value: f64::from(*grad),
            hint: "make the weights or advantages smaller, or load an earlier checkpoint",
        }),
    }
}
