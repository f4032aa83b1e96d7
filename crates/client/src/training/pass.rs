//! Forward and forward-backward passes over a batch, whose loss the server or the client computes.

use tinkex_loss::{LocalLoss, LossResult};
use tinkex_wire::{Datum, PassMode, Seq};

use crate::error::{Error, Result};
use crate::future::ApiFuture;

use super::call_order::Reservation;
use super::forward_backward::{BatchRequests, SubmittedBatch};
use super::merge::{self, BatchOutput};
use super::{LossSource, LossSpec, TrainingClient, TrainingShared, loss_inputs};

/// Pass whose requests were validated and not yet sent.
pub(super) enum PreparedPass {
    /// The server computes the loss.
    OnServer(BatchRequests),
    /// The client computes the loss, from the log-probabilities of a forward pass.
    OnClient { mode: PassMode, forward: BatchRequests, data: Vec<Datum>, loss: LocalLoss },
}

/// Pass that was sent.
pub(super) enum SubmittedPass {
    /// The server computes the loss: the result of the batch is the output of the pass.
    Batch(SubmittedBatch),
    /// The batch accumulates the gradient of a loss that the client computed.
    Gradient(SubmittedBatch, LossResult),
    /// The client computed the loss in a pass without gradient, so no second batch was sent.
    Evaluated(BatchOutput),
}

impl SubmittedPass {
    /// Returns the error of the pass if the server refused one of its chunks.
    pub(super) fn refusal(&self) -> Option<Error> {
        match self {
            Self::Batch(batch) | Self::Gradient(batch, _) => batch.refusal(),
            Self::Evaluated(_) => None,
        }
    }

    /// Returns the sequence number of the first chunk of the pass; for a loss that the client
    /// computes, of the batch that accumulates its gradient. `None` if no such chunk was sent.
    pub(super) fn first_seq(&self) -> Option<Seq> {
        match self {
            Self::Batch(batch) | Self::Gradient(batch, _) => batch.first_seq(),
            Self::Evaluated(_) => None,
        }
    }
}

impl TrainingClient {
    /// Validates the requests of a pass. Sends and queues nothing.
    pub(super) fn prepare_pass(
        &self,
        mode: PassMode,
        data: Vec<Datum>,
        loss: &LossSpec,
    ) -> Result<PreparedPass> {
        match &loss.0 {
            LossSource::BuiltIn(function, config) => {
                loss_inputs::check(&data, function)?;
                let batch = BatchRequests::new(&self.0, mode, data, function, config)?;
                Ok(PreparedPass::OnServer(batch))
            }
            LossSource::Traced(traced) if traced.is_on_server() => {
                let batch = BatchRequests::with_traced_loss(&self.0, mode, data, traced)?;
                Ok(PreparedPass::OnServer(batch))
            }
            LossSource::Traced(traced) => self.0.prepare_traced(mode, data, traced.clone()),
            LossSource::Computed(computed) => self.0.prepare_computed(mode, data, computed),
        }
    }

    /// Queues a pass.
    pub(super) fn enqueue_pass(&self, pass: PreparedPass) -> ApiFuture<BatchOutput> {
        self.enqueue_work(|shared, mut reservation| async move {
            reservation.wait().await;
            let submitted = shared.submit_pass(&mut reservation, pass).await?;
            drop(reservation);
            shared.poll_pass(submitted).await
        })
    }
}

impl TrainingShared {
    /// Sends a pass. A loss that the client computes needs the result of a forward pass first.
    ///
    /// # Errors
    /// If the client computes the loss: fails if its forward pass fails or the loss cannot be
    /// computed. If the server refuses a chunk of the last batch, this method succeeds;
    /// [`SubmittedPass::refusal`] returns that error.
    pub(super) async fn submit_pass(
        &self,
        reservation: &mut Reservation,
        pass: PreparedPass,
    ) -> Result<SubmittedPass> {
        match pass {
            PreparedPass::OnServer(batch) => {
                Ok(SubmittedPass::Batch(self.submit_batch(reservation, batch).await))
            }
            PreparedPass::OnClient { mode, forward, data, loss } => {
                // Compute the weight first: the second batch carries gradients in the `weights`
                // input.
                let weight = merge::total_weight(&data);
                let submitted = self.submit_batch(reservation, forward).await;
                let mut output = self.poll_batch(submitted).await?;
                output.weight = weight;
                let (result, data) = loss.compute(&output.outputs, data).await?;
                if mode == PassMode::Forward {
                    result.add_to(&mut output.metrics);
                    return Ok(SubmittedPass::Evaluated(output));
                }
                let backward = self.cross_entropy(PassMode::ForwardBackward, data)?;
                let mut submitted = self.submit_batch(reservation, backward).await;
                submitted.weight = weight;
                Ok(SubmittedPass::Gradient(submitted, result))
            }
        }
    }

    /// Waits for the output of a pass.
    ///
    /// # Errors
    /// Fails like [`poll_batch`](Self::poll_batch).
    pub(super) async fn poll_pass(&self, pass: SubmittedPass) -> Result<BatchOutput> {
        match pass {
            SubmittedPass::Batch(batch) => self.poll_batch(batch).await,
            SubmittedPass::Gradient(batch, result) => {
                let mut output = self.poll_batch(batch).await?;
                result.add_to(&mut output.metrics);
                Ok(output)
            }
            SubmittedPass::Evaluated(output) => Ok(output),
        }
    }
}
