//! [`TrainingStepBuilder`]: a pass and the optimizer step that applies its gradient.

use std::collections::BTreeMap;
use std::future::IntoFuture;
use std::sync::Arc;

use futures_util::future::join;
use serde::{Deserialize, Serialize};
use tinkex_wire::{Datum, OptimParams, OptimStep, OptimStepOutput, PassMode};
use tokio::sync::oneshot;

use crate::error::{Error, ErrorKind, Result};
use crate::future::ApiFuture;
use crate::validated::Validated;

use super::call_order::Reservation;
use super::merge::{BatchOutput, MetricValue};
use super::pass::PreparedPass;
use super::{LossSpec, TrainingClient, TrainingShared};

/// Builder for a training step, returned by [`TrainingClient::step`].
///
/// Await it for both results, call [`send`](Self::send) to queue it now and await both results
/// later, or [`split`](Self::split) to queue it now and get a future of each.
///
/// ```no_run
/// # async fn run(model: tinkex::TrainingClient, batch: Vec<tinkex::Datum>) -> tinkex::Result<()> {
/// use tinkex::{AdamParams, LossFn};
///
/// let params = AdamParams::with_learning_rate(1e-4);
/// // Two steps in flight at the same time.
/// let first = model.step(batch.clone(), LossFn::CrossEntropy, params).send();
/// let second = model.step(batch, LossFn::CrossEntropy, params).send();
/// println!("{:?} {:?}", first.await?.loss(), second.await?.loss());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is queued until the step is awaited, or `send` or `split` is called"]
pub struct TrainingStepBuilder {
    client: TrainingClient,
    data: Vec<Datum>,
    loss: LossSpec,
    params: OptimParams,
    fenced: bool,
}

/// Output of a training step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct StepOutput {
    /// Output of the pass, before the weights were updated.
    pub pass: BatchOutput,
    /// Output of the optimizer step.
    pub optim: OptimOutput,
}

impl StepOutput {
    /// Returns the loss summed over the batch, before the update. See [`BatchOutput::loss`].
    #[must_use]
    pub fn loss(&self) -> Option<f64> {
        self.pass.loss()
    }
}

/// Output of [`optim_step`](TrainingClient::optim_step).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct OptimOutput {
    /// Metrics of the step by name, for example the norm of the gradient. Empty if the server
    /// reports none.
    pub metrics: BTreeMap<String, MetricValue>,
}

impl From<OptimStepOutput> for OptimOutput {
    fn from(output: OptimStepOutput) -> Self {
        let metrics = output.metrics.unwrap_or_default().into_iter();
        Self { metrics: metrics.map(|(name, value)| (name, value.into())).collect() }
    }
}

impl TrainingStepBuilder {
    pub(super) fn new(
        client: TrainingClient,
        data: Vec<Datum>,
        loss: LossSpec,
        params: OptimParams,
    ) -> Self {
        Self { client, data, loss, params, fenced: false }
    }

    /// Sends the optimizer step only after the pass has succeeded (default: after the pass was
    /// accepted).
    ///
    /// A failed pass then changes no weights. Later calls of the model wait for the result of the
    /// pass too. A server that executes requests in fixed cycles, as the hosted service does,
    /// executes the two in different cycles, so each step takes longer.
    pub fn fenced(mut self) -> Self {
        self.fenced = true;
        self
    }

    /// Queues the step now and returns a future of both results.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the batch or an optimizer parameter is invalid; nothing is
    /// queued in that case. Otherwise fails like [`TrainingClient::forward_backward`] or
    /// [`TrainingClient::optim_step`]. The message says whether the optimizer step was sent, and
    /// [`Error::accumulated_datums`] which gradients the server holds.
    ///
    /// # Cancel safety
    /// The step continues if the future is dropped.
    pub fn send(self) -> ApiFuture<StepOutput> {
        let (pass, optim) = self.split();
        ApiFuture::start(async {
            let (pass, optim) = join(pass, optim).await;
            Ok(StepOutput { pass: pass?, optim: optim? })
        })
    }

    /// Queues the step now and returns a future of each result.
    ///
    /// # Errors
    /// Fails like [`send`](Self::send). If the optimizer step is not sent because the pass failed,
    /// its future resolves to the error of the pass.
    ///
    /// # Cancel safety
    /// The step continues if the futures are dropped.
    pub fn split(self) -> (ApiFuture<BatchOutput>, ApiFuture<OptimOutput>) {
        let Self { client, data, loss, params, fenced } = self;
        let prepared = client.0.prepare_step(params).and_then(|step| {
            let pass = client.prepare_pass(PassMode::ForwardBackward, data, &loss)?;
            Ok((pass, step))
        });
        match prepared {
            Ok((pass, step)) => client.enqueue_both(pass, step, fenced),
            Err(error) => {
                let error = error.during("step");
                (ApiFuture::failed(error.clone()), ApiFuture::failed(error))
            }
        }
    }
}

impl IntoFuture for TrainingStepBuilder {
    type Output = Result<StepOutput>;
    type IntoFuture = ApiFuture<StepOutput>;

    fn into_future(self) -> Self::IntoFuture {
        self.send()
    }
}

impl TrainingClient {
    /// Queues an optimizer step.
    pub(super) fn enqueue_step(&self, params: OptimParams) -> ApiFuture<OptimOutput> {
        let step = match self.0.prepare_step(params) {
            Ok(step) => step,
            Err(error) => return ApiFuture::failed(error.during("optim_step")),
        };
        self.enqueue_work(|shared, mut reservation| async move {
            reservation.wait().await;
            shared.send_step(reservation, step).await
        })
    }

    /// Queues a pass and the optimizer step after it, at one position in the call order: no other
    /// call is sent between them.
    fn enqueue_both(
        &self,
        pass: PreparedPass,
        step: Validated<OptimStep>,
        fenced: bool,
    ) -> (ApiFuture<BatchOutput>, ApiFuture<OptimOutput>) {
        let (decision, decided) = oneshot::channel();
        let pass = self.enqueue_work(|shared, reservation| async move {
            let mut decision = StepDecision(Some((decision, reservation)));
            let result = shared.run_pass(pass, fenced, &mut decision).await;
            // Has no effect if the optimizer step was sent.
            if let Err(error) = &result {
                decision.skip(error);
            }
            result
        });
        let shared = Arc::clone(&self.0);
        let optim = self.start(async move {
            match decided.await {
                Ok(Ok(reservation)) => {
                    let result = shared.send_step(reservation, step).await;
                    shared.session.connection().record_failure(result)
                }
                // The pass has recorded its failure.
                Ok(Err(error)) => Err(error),
                Err(_) if shared.session.transport().is_closed() => Err(Error::closed()),
                Err(_) => {
                    let message = "optimizer step was not sent: the task of its pass panicked";
                    Err(Error::new(ErrorKind::Panicked, message))
                }
            }
        });
        (pass, optim)
    }
}

/// Channel on which a pass decides whether its optimizer step is sent, and the position in the call
/// order that both use. `None` after the decision.
struct StepDecision(Option<(oneshot::Sender<Result<Reservation>>, Reservation)>);

impl StepDecision {
    fn reservation(&mut self) -> &mut Reservation {
        &mut self.0.as_mut().expect("the pass has not decided yet").1
    }

    /// Lets the optimizer step be sent, at the position of the pass.
    fn send(&mut self) {
        if let Some((decision, reservation)) = self.0.take() {
            // The receiver is dropped only if the client is closed.
            let _ = decision.send(Ok(reservation));
        }
    }

    /// Fails the optimizer step with `error`, and releases the position for the next call.
    fn skip(&mut self, error: &Error) {
        if let Some((decision, _)) = self.0.take() {
            let _ = decision.send(Err(error.clone()));
        }
    }
}

impl TrainingShared {
    fn prepare_step(&self, params: OptimParams) -> Result<Validated<OptimStep>> {
        Ok(Validated::new(OptimStep::new(self.model_id.clone(), params))?)
    }

    async fn send_step(
        &self,
        reservation: Reservation,
        mut step: Validated<OptimStep>,
    ) -> Result<OptimOutput> {
        let numbered = |_, seq| {
            step.set_seq(seq);
            step
        };
        Ok(self.send_next(reservation, numbered).await?.into())
    }

    /// Runs a pass and lets its optimizer step be sent if the pass was accepted, or succeeded if
    /// `fenced`. The caller skips the optimizer step after an error.
    async fn run_pass(
        &self,
        pass: PreparedPass,
        fenced: bool,
        decision: &mut StepDecision,
    ) -> Result<BatchOutput> {
        let not_sent = |error: Error| {
            error.map_message(|message| format!("{message}; the optimizer step was not sent"))
        };
        let reservation = decision.reservation();
        reservation.wait().await;
        let submitted = self.submit_pass(reservation, pass).await.map_err(not_sent)?;
        if let Some(error) = submitted.refusal() {
            return Err(not_sent(error));
        }
        if fenced {
            let output = self.poll_pass(submitted).await.map_err(not_sent)?;
            decision.send();
            return Ok(output);
        }
        decision.send();
        self.poll_pass(submitted).await.map_err(|error| {
            error.map_message(|message| format!("{message}; the optimizer step was already sent"))
        })
    }
}
