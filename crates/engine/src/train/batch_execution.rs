//! [`BatchExecution`]: runs a batch of any size through a model in micro-batches.

use super::datum::Datum;
use super::forward_pass::{ForwardPass, MIN_SHARED_PREFIX, RUNNING_LAYER_FACTOR, TrainingSequence};
use super::objective::{DatumLoss, TrainingObjective, TrainingOutput, report};
use crate::lora::PackedLora;
use crate::model::{
    AdapterGradients, GradientSink, LayerActivations, Model, PackedBatch, SavedLogits,
};
use crate::{Error, Result};

/// A model with the settings for running a batch.
pub(super) struct BatchExecution<'a> {
    pub(super) model: &'a Model,
    pub(super) lora: Option<&'a PackedLora>,
    /// Memory limit in bytes for the activations of a pass.
    pub(super) memory: usize,
    pub(super) objective: &'a TrainingObjective<'a>,
}

impl BatchExecution<'_> {
    /// Runs validated data forward and, if `gradients` is given, backward.
    ///
    /// The batch is divided into micro-batches that fit the memory limit; data with a common prefix
    /// stay together. The sums continue over micro-batches in the same order, so the division does
    /// not change a bit of the result.
    ///
    /// # Errors
    /// [`Error::Datum`] if the loss of a datum is not finite; [`Error::OutOfMemory`] if the system
    /// refuses memory. After an error `gradients` may contain the gradients of some data.
    pub(super) fn run(
        &self,
        data: &[Datum<'_>],
        mut gradients: Option<(&mut AdapterGradients, &mut dyn GradientSink)>,
    ) -> Result<TrainingOutput> {
        let mut logprobs: Vec<Vec<f32>> = vec![Vec::new(); data.len()];
        let mut losses: Vec<Option<DatumLoss>> = data.iter().map(|_| None).collect();
        let tokens: Vec<&[u32]> = data.iter().map(|datum| datum.tokens).collect();
        for batch in PackedBatch::micro_batches(
            &tokens,
            MIN_SHARED_PREFIX,
            self.max_rows(gradients.is_some()),
        ) {
            let sequences: Vec<TrainingSequence<'_>> =
                batch.iter().map(|index| data[*index].sequence()).collect();
            let memory = gradients.is_some().then_some(self.memory);
            let (pass, target_logprobs) =
                ForwardPass::forward(self.model, self.lora, &sequences, memory)?;
            let mut logprob_grads = Vec::with_capacity(batch.len());
            for (&index, target_logprobs) in batch.iter().zip(target_logprobs) {
                let (loss, logprob_grad) = self
                    .objective
                    .evaluate(&data[index], &target_logprobs)
                    .map_err(|error| error.in_datum(index))?;
                logprob_grads.push(logprob_grad);
                losses[index] = Some(loss);
                logprobs[index] = target_logprobs;
            }
            if let Some((grads, sink)) = &mut gradients {
                pass.backward(&logprob_grads, grads, *sink);
            }
        }
        let metrics = report(data, losses.into_iter().flatten().collect());
        Ok(TrainingOutput { logprobs, metrics })
    }

    /// Returns the maximum number of rows whose activations fit the memory limit.
    fn max_rows(&self, with_backward: bool) -> usize {
        let (layers, logits) = if with_backward {
            (self.model.layers.len(), SavedLogits::bytes(self.model, 1))
        } else {
            (0, 0)
        };
        let row_bytes = LayerActivations::bytes(self.model, 1);
        self.memory / ((layers + RUNNING_LAYER_FACTOR) * row_bytes + logits).max(1)
    }
}

/// Checks that all gradients are finite.
pub(super) fn check_gradient<'a>(grads: impl Iterator<Item = &'a f32>) -> Result<()> {
    match grads.enumerate().find(|(_, grad)| !grad.is_finite()) {
        None => Ok(()),
        Some((index, grad)) => Err(Error::NonFiniteResult {
            what: "the gradient".to_owned(),
            index,
            value: f64::from(*grad),
            hint: "reduce the weights or advantages, or load an earlier checkpoint",
        }),
    }
}
