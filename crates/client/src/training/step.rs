//! Training steps: a pass and the optimizer step that applies its gradient.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join;
use serde::{Deserialize, Serialize};
use tinkex_wire::{
    AdamParams, Datum, DimuonParams, DiscardGradient, OptimParams, OptimStep, OptimStepOutput,
    PassMode, Seq,
};
use tokio::sync::oneshot;

use crate::error::{Error, ErrorKind, Result};
use crate::future::ApiFuture;
use crate::validated::Validated;

use super::call_order::{AssignedSeq, Reservation};
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
    /// [`Error::accumulated_datums`] returns the datums whose gradients the server holds; the next
    /// optimizer step would apply them, and [`discard_gradient`](Self::discard_gradient) discards
    /// them.
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
            let result = shared.send_step(reservation, step).await;
            result.map_err(|failed| failed.describe(&shared, None))
        })
    }

    /// Queues a request to discard the gradient.
    pub(super) fn enqueue_discard(&self) -> ApiFuture<()> {
        self.enqueue_work(|shared, mut reservation| async move {
            reservation.wait().await;
            let AssignedSeq { seq, sent } = reservation.assign_one();
            let request = DiscardGradient::new(shared.model_id.clone()).seq_id(seq);
            let discarded = shared.send_numbered(reservation, sent, &request).await;
            discarded.map_err(|error| {
                if !error.is_missing_endpoint() {
                    return error;
                }
                let cannot = |message| format!("{message}; this server cannot discard a gradient");
                error.map_message(cannot).with_hint(
                    "Create a training client from the last checkpoint with \
                     ServiceClient::create_training_client_from; its model has no gradient.",
                )
            })?;
            shared.unapplied.clear_before(seq);
            Ok(())
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
        let (pass_task, pass_finished) = oneshot::channel::<()>();
        let pass = self.enqueue_work(|shared, reservation| async move {
            // Dropped at the end of the task.
            let _pass_task = pass_task;
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
                Ok(Ok((reservation, pass))) => {
                    let result = match shared.send_step(reservation, step).await {
                        Ok(output) => Ok(output),
                        Err(failed) => {
                            // Until the result of the pass is known, it is not known which
                            // gradients the server holds.
                            let _ = pass_finished.await;
                            Err(failed.describe(&shared, pass))
                        }
                    };
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
struct StepDecision(Option<(oneshot::Sender<Result<SentPass>>, Reservation)>);

/// Position in the call order that a pass leaves to its optimizer step, and the sequence number of
/// the first chunk of the pass.
type SentPass = (Reservation, Option<Seq>);

/// Error of an optimizer step.
struct FailedStep {
    error: Error,
    seq: Seq,
    /// Whether the server certainly did not apply the gradient.
    not_applied: bool,
}

impl FailedStep {
    /// Returns the error, with the gradients that the step did not apply. `pass` is the pass of the
    /// same call, if any.
    fn describe(self, shared: &TrainingShared, pass: Option<Seq>) -> Error {
        let Self { error, seq, not_applied } = self;
        if not_applied { shared.unapplied.describe(error, seq, pass) } else { error }
    }
}

impl StepDecision {
    fn reservation(&mut self) -> &mut Reservation {
        &mut self.0.as_mut().expect("the pass has not decided yet").1
    }

    /// Decides to send the optimizer step, at the position of the pass, whose first chunk has the
    /// sequence number `pass`.
    fn send(&mut self, pass: Option<Seq>) {
        if let Some((decision, reservation)) = self.0.take() {
            // The receiver is dropped only if the client is closed.
            let _ = decision.send(Ok((reservation, pass)));
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
        mut reservation: Reservation,
        mut step: Validated<OptimStep>,
    ) -> std::result::Result<OptimOutput, FailedStep> {
        let AssignedSeq { seq, sent } = reservation.assign_one();
        step.set_seq(seq);
        match self.send_numbered(reservation, sent.clone(), &step).await {
            Ok(output) => {
                self.unapplied.clear_before(seq);
                Ok(output.into())
            }
            Err(error) => {
                // After any other error, the server may have executed the step. An error with the
                // id of the request is an error of a poll: the server had accepted the step.
                let refused = error.request_id().is_none()
                    && error.status().is_some_and(|status| (400..500).contains(&status));
                let failed = error.kind() == ErrorKind::WorkFailed;
                let not_applied = refused || failed || !sent.get();
                Err(FailedStep { error, seq, not_applied })
            }
        }
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
        let pass = submitted.first_seq();
        if fenced {
            let output = self.poll_pass(submitted).await.map_err(not_sent)?;
            decision.send(pass);
            return Ok(output);
        }
        decision.send(pass);
        self.poll_pass(submitted).await.map_err(|error| {
            error.map_message(|message| format!("{message}; the optimizer step was already sent"))
        })
    }
}
