//! [`BatchExecution`]: executes the micro-batches of a pass.

use super::datum::Datum;
use super::forward_pass::{ForwardPass, RUNNING_LAYER_FACTOR, TrainingSequence};
use super::objective::TrainingObjective;
use super::pass::{MicroBatch, PassProgress};
use crate::lora::PackedLora;
use crate::model::{AdapterGradients, GradientSink, LayerActivations, Model, SavedLogits};
use crate::{Error, Result};

/// A model with the settings for running a batch.
pub(super) struct BatchExecution<'a> {
    pub(super) model: &'a Model,
    pub(super) lora: Option<&'a PackedLora>,
    /// Memory limit in bytes for the activations of a micro-batch.
    pub(super) memory: usize,
}

impl BatchExecution<'_> {
    /// Runs validated data forward and, if `gradients` is given, backward, in micro-batches that
    /// fit the memory limit.
    ///
    /// # Errors
    /// [`Error::Datum`] if the loss of a datum is not finite; [`Error::OutOfMemory`] if the system
    /// refuses memory. After an error `sink` may have received the gradients of some data.
    pub(super) fn run(
        &self,
        objective: &TrainingObjective<'_>,
        data: &[Datum<'_>],
        gradients: Option<AdapterGradients>,
        sink: &mut dyn GradientSink,
    ) -> Result<PassProgress> {
        let tokens: Vec<&[u32]> = data.iter().map(|datum| datum.tokens).collect();
        let max_rows = self.max_rows(gradients.is_some());
        let mut pass = PassProgress::new(&tokens, gradients);
        while let Some(batch) = pass.next(max_rows) {
            let part: Vec<Datum<'_>> = batch.data().iter().map(|index| data[*index]).collect();
            let advanced = self.advance(pass, objective, &batch, &part, sink, &|| false)?;
            pass = advanced.expect("`interrupt` returns false");
        }
        Ok(pass)
    }

    /// Executes one micro-batch. `data` are the data of `batch`. Returns `None` if `interrupt`,
    /// which is called before every layer, returned true.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub(super) fn advance(
        &self,
        mut pass: PassProgress,
        objective: &TrainingObjective<'_>,
        batch: &MicroBatch,
        data: &[Datum<'_>],
        sink: &mut dyn GradientSink,
        interrupt: &dyn Fn() -> bool,
    ) -> Result<Option<PassProgress>> {
        let sequences: Vec<TrainingSequence<'_>> = data.iter().map(Datum::sequence).collect();
        let memory = pass.gradients.is_some().then_some(self.memory);
        let forward = ForwardPass::forward(self.model, self.lora, &sequences, memory, interrupt)?;
        let Some((forward, target_logprobs)) = forward else { return Ok(None) };
        let mut logprob_grads = Vec::with_capacity(data.len());
        let mut losses = Vec::with_capacity(data.len());
        for ((datum, logprobs), index) in data.iter().zip(&target_logprobs).zip(batch.data()) {
            let evaluated = objective.evaluate(datum, logprobs);
            let (loss, logprob_grad) = evaluated.map_err(|error| error.in_datum(*index))?;
            logprob_grads.push(logprob_grad);
            losses.push(loss);
        }
        if let Some(gradients) = &mut pass.gradients
            && !forward.backward(&logprob_grads, gradients, sink, interrupt)
        {
            return Ok(None);
        }
        pass.record(batch, target_logprobs, losses);
        Ok(Some(pass))
    }

    /// Returns the maximum number of rows whose activations fit the memory limit.
    pub(super) fn max_rows(&self, with_backward: bool) -> usize {
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
