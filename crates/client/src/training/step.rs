//! Training steps: a pass and the optimizer step that applies its gradient.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join;
use serde::{Deserialize, Serialize};
use tinkex_wire::{
    AdamParams, Datum, DimuonParams, OptimParams, OptimStep, OptimStepOutput, PassMode,
};
use tokio::sync::oneshot;

use crate::error::{Error, ErrorKind, Result};
use crate::future::ApiFuture;
use crate::validated::Validated;

use super::call_order::Reservation;
use super::merge::{BatchOutput, MetricValue};
use super::pass::PreparedPass;
use super::{LossSpec, TrainingClient, TrainingShared};

/// Optimizer parameters of a training step, with optional settings, for [`TrainingClient::step`].
///
/// [`AdamParams`](crate::AdamParams), [`DimuonParams`](crate::DimuonParams) and [`OptimParams`]
/// convert into options without further settings.
///
/// ```
/// use tinkex::{AdamParams, StepOptions};
///
/// let options = StepOptions::new(AdamParams::with_learning_rate(1e-4)).fenced();
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use = "options do nothing until they are passed to `TrainingClient::step`"]
pub struct StepOptions {
    params: OptimParams,
    fenced: bool,
}

impl StepOptions {
    /// Creates options with the parameters of the optimizer.
    pub fn new(params: impl Into<OptimParams>) -> Self {
        Self { params: params.into(), fenced: false }
    }

    /// Sends the optimizer step only after the pass has succeeded (default: after the pass was
    /// accepted).
    ///
    /// A failed pass then changes no weights. Later calls of the model wait for the result of the
    /// pass too. A server that executes requests in fixed cycles, as the hosted service does,
    /// executes the pass and the optimizer step in different cycles, so each step takes longer.
    pub fn fenced(mut self) -> Self {
        self.fenced = true;
        self
    }
}

impl From<OptimParams> for StepOptions {
    fn from(params: OptimParams) -> Self {
        Self::new(params)
    }
}

impl From<AdamParams> for StepOptions {
    fn from(params: AdamParams) -> Self {
        Self::new(params)
    }
}

impl From<DimuonParams> for StepOptions {
    fn from(params: DimuonParams) -> Self {
        Self::new(params)
    }
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

    /// Returns the mean loss per target token, before the update. See [`BatchOutput::mean_loss`].
    #[must_use]
    pub fn mean_loss(&self) -> Option<f64> {
        self.pass.mean_loss()
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

impl TrainingClient {
    /// Starts a training step: [`forward_backward`](Self::forward_backward) and the
    /// [`optim_step`](Self::optim_step) that applies its gradient.
    ///
    /// The optimizer step is sent as soon as the server has accepted every request of the pass,
    /// without waiting for its result, so that the server executes both without a pause. If the
    /// server refuses a request of the pass, the optimizer step is not sent, and later calls
    /// continue in order. If the pass fails after it was accepted, the optimizer step is already
    /// sent and applies the gradients that were accumulated; [`StepOptions::fenced`] prevents that.
    ///
    /// ```no_run
    /// # async fn run(model: tinkex::TrainingClient, batch: Vec<tinkex::Datum>) -> tinkex::Result<()> {
    /// use tinkex::{AdamParams, LossFn};
    ///
    /// let params = AdamParams::with_learning_rate(1e-4);
    /// // Two steps in flight at the same time.
    /// let first = model.step(batch.clone(), LossFn::CrossEntropy, params);
    /// let second = model.step(batch, LossFn::CrossEntropy, params);
    /// println!("{:?} {:?}", first.await?.loss(), second.await?.loss());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the batch or an optimizer parameter is invalid; nothing is
    /// queued in that case. Otherwise fails like [`forward_backward`](Self::forward_backward) or
    /// [`optim_step`](Self::optim_step). The message says whether the optimizer step was sent.
    /// [`Error::accumulated_datums`] returns the datums whose gradients the server holds.
    pub fn step(
        &self,
        data: Vec<Datum>,
        loss: impl Into<LossSpec>,
        options: impl Into<StepOptions>,
    ) -> ApiFuture<StepOutput> {
        let (pass, optim) = self.split_step(data, loss, options);
        let _entered = self.0.session.settings().enter_runtime();
        ApiFuture::start(async {
            let (pass, optim) = join(pass, optim).await;
            Ok(StepOutput { pass: pass?, optim: optim? })
        })
    }

    /// Starts a training step like [`step`](Self::step), and returns one future for the pass and
    /// one for the optimizer step.
    ///
    /// # Errors
    /// Fails like [`step`](Self::step). If the optimizer step is not sent because the pass failed,
    /// its future resolves to the error of the pass.
    pub fn split_step(
        &self,
        data: Vec<Datum>,
        loss: impl Into<LossSpec>,
        options: impl Into<StepOptions>,
    ) -> (ApiFuture<BatchOutput>, ApiFuture<OptimOutput>) {
        let StepOptions { params, fenced } = options.into();
        let prepared = self.0.prepare_step(params).and_then(|step| {
            let pass = self.prepare_pass(PassMode::ForwardBackward, data, &loss.into())?;
            Ok((pass, step))
        });
        match prepared {
            Ok((pass, step)) => self.enqueue_both(pass, step, fenced),
            Err(error) => {
                let error = error.during("step");
                (ApiFuture::failed(error.clone()), ApiFuture::failed(error))
            }
        }
    }

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
            // `skip` has no effect if the optimizer step was already sent.
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
                // Do not record the error again: the pass has recorded it.
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

/// Channel on which a pass reports whether its optimizer step is sent, and the position in the call
/// order that the pass and the step share. `None` after the decision.
struct StepDecision(Option<(oneshot::Sender<Result<Reservation>>, Reservation)>);

impl StepDecision {
    fn reservation(&mut self) -> &mut Reservation {
        &mut self.0.as_mut().expect("the pass has not decided yet").1
    }

    /// Decides to send the optimizer step, at the position of the pass.
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

    /// Runs a pass. Decides to send its optimizer step once the server has accepted the pass or, if
    /// `fenced`, once the pass has succeeded. The caller skips the optimizer step after an error.
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
