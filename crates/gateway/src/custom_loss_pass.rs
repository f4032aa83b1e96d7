//! [`CustomLossPass`]: a pass with a custom loss, as two passes that any upstream can execute.

use tinkex::Result;
use tinkex_loss::{CustomLoss, LocalLoss, LossResult, forward_data};
use tinkex_wire::{Datum, ForwardBackward, ForwardBackwardOutput, LossFn, PassMode};

/// Custom loss of one pass, computed from the log-probabilities of a forward pass.
pub(crate) struct CustomLossPass {
    backward: ForwardBackward,
    loss: LossResult,
}

impl CustomLossPass {
    /// Returns the pass that computes the log-probabilities for a pass with a custom loss.
    ///
    /// # Errors
    /// If a datum has no target tokens.
    pub(crate) fn forward(pass: &ForwardBackward) -> Result<ForwardBackward> {
        let data = forward_data(&pass.data)?;
        Ok(cross_entropy(pass, data, PassMode::Forward))
    }

    /// Computes the loss of `pass` from the output of its [`forward`](Self::forward) pass.
    ///
    /// # Errors
    /// If the output has no log-probabilities, or the loss cannot be computed or is not finite.
    pub(crate) async fn compute(
        loss: CustomLoss,
        mut pass: ForwardBackward,
        forward: &ForwardBackwardOutput,
    ) -> Result<Self> {
        let data = std::mem::take(&mut pass.data);
        let local = LocalLoss::new(move |data, logprobs| Ok(loss.evaluate(data, logprobs)?));
        let (loss, data) = local.compute(&forward.loss_fn_outputs, data).await?;
        Ok(Self { backward: cross_entropy(&pass, data, PassMode::ForwardBackward), loss })
    }

    /// Returns the pass that accumulates the gradient of the loss.
    pub(crate) fn backward(&self) -> &ForwardBackward {
        &self.backward
    }

    /// Returns the output of the pass with the custom loss. `output` is the output of the last pass
    /// that was sent to the upstream: the [`backward`](Self::backward) pass, or the
    /// [`forward`](Self::forward) pass if the client requested no gradient.
    pub(crate) fn output(self, mut output: ForwardBackwardOutput) -> ForwardBackwardOutput {
        self.loss.add_to(&mut output.metrics);
        output
    }
}

/// Returns `pass` with other data and cross entropy as its loss.
fn cross_entropy(pass: &ForwardBackward, data: Vec<Datum>, mode: PassMode) -> ForwardBackward {
    let mut request =
        ForwardBackward::new(pass.model_id.clone(), data, LossFn::CrossEntropy).mode(mode);
    request.seq_id = pass.seq_id;
    request
}
