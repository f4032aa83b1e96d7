//! [`TrainingClient`]: training one model.

mod call_order;
mod chunk;
mod create;
mod custom;
mod forward_backward;
mod merge;
mod save;
#[cfg(feature = "tokenizer")]
mod tokenizer;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use tinkex_wire::{
    Datum, GetInfo, LoadWeights, LossConfig, LossFn, ModelId, ModelInfo, OptimParams, OptimStep,
    OptimStepOutput, PassMode, SaveWeights, SaveWeightsExternal, SaveWeightsForSampler, Secret,
    Seq, SubmitRequest, TinkerPath,
};
use tokio::time::Instant;

use crate::error::{Error, ErrorKind, Result};
use crate::future::ApiFuture;
use crate::future::poll::{Poller, Submitted};
use crate::future::queue_log::{QueueLog, QueuedWork};
use crate::loss::CustomLoss;
use crate::sampling::SamplingClient;
use crate::session::Session;
use crate::transport::RequestOptions;

use call_order::CallOrder;
use forward_backward::BatchRequests;
use save::SaveKind;

pub use create::{CreateFromState, CreateLora};
pub use merge::{BatchOutput, MetricValue};
pub use save::{ExternalWeights, SaveOptions};

/// A model in training. Cheap to clone; all clones stand in one line.
///
/// Calls are queued when you make them and sent in that order, whenever you await them:
///
/// ```no_run
/// # async fn run(model: tinkex::TrainingClient, batch: Vec<tinkex::Datum>) -> tinkex::Result<()> {
/// use tinkex::{AdamParams, LossFn};
///
/// let gradients = model.forward_backward(batch, LossFn::CrossEntropy);
/// let step = model.optim_step(AdamParams::with_learning_rate(1e-4));
/// println!("{:?}", gradients.await?.metrics);
/// step.await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct TrainingClient(Arc<TrainingShared>);

struct TrainingShared {
    session: Arc<Session>,
    model_id: ModelId,
    call_order: CallOrder,
    log: QueueLog,
}

/// A loss and its settings: one that the service knows by name, or one of your own.
#[derive(Clone, Debug, PartialEq)]
pub struct LossSpec(LossSource);

#[derive(Clone, Debug, PartialEq)]
enum LossSource {
    Named(LossFn, LossConfig),
    Traced(CustomLoss),
}

impl LossSpec {
    /// A loss with settings of its own.
    #[must_use]
    pub fn new(function: LossFn, config: LossConfig) -> Self {
        Self(LossSource::Named(function, config))
    }
}

impl From<LossFn> for LossSpec {
    fn from(function: LossFn) -> Self {
        Self::new(function, LossConfig::new())
    }
}

impl From<CustomLoss> for LossSpec {
    fn from(loss: CustomLoss) -> Self {
        Self(LossSource::Traced(loss))
    }
}

impl From<&CustomLoss> for LossSpec {
    fn from(loss: &CustomLoss) -> Self {
        loss.clone().into()
    }
}

impl TrainingClient {
    pub(crate) fn new(session: Arc<Session>, model_id: ModelId) -> Self {
        let log = QueueLog::new(QueuedWork::Training, model_id.as_str());
        Self(Arc::new(TrainingShared { session, model_id, call_order: CallOrder::new(), log }))
    }

    /// The model's id.
    #[must_use]
    pub fn model_id(&self) -> &ModelId {
        &self.0.model_id
    }

    /// Adds the gradient of `loss` over `data` to this model.
    ///
    /// Large batches are cut up and put together again. Dropping the future stops the waiting, not
    /// the training.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if `data` is empty or cannot be trained on, and nothing was queued
    /// then; [`ErrorKind::WorkFailed`] if the server cannot compute the loss.
    pub fn forward_backward(
        &self,
        data: Vec<Datum>,
        loss: impl Into<LossSpec>,
    ) -> ApiFuture<BatchOutput> {
        self.pass(PassMode::ForwardBackward, data, &loss.into())
    }

    /// Computes `loss` over `data` without a gradient.
    ///
    /// # Errors
    /// As [`TrainingClient::forward_backward`].
    pub fn forward(&self, data: Vec<Datum>, loss: impl Into<LossSpec>) -> ApiFuture<BatchOutput> {
        self.pass(PassMode::Forward, data, &loss.into())
    }

    /// Applies the gradient gathered since the last step.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if a number makes no sense; then nothing was queued.
    pub fn optim_step(&self, params: impl Into<OptimParams>) -> ApiFuture<OptimStepOutput> {
        let params = params.into();
        if let Err(why) = params.validate() {
            return ApiFuture::failed(why.into());
        }
        self.one(move |model_id, seq| OptimStep { model_id, seq_id: Some(seq), params }, Ok)
    }

    /// Queues a pass and a step at once, which is what a fast loop does. If one of them makes no
    /// sense, neither is queued.
    ///
    /// # Errors
    /// As [`TrainingClient::forward_backward`] and [`TrainingClient::optim_step`], each for its own
    /// future.
    pub fn step(
        &self,
        data: Vec<Datum>,
        loss: impl Into<LossSpec>,
        params: impl Into<OptimParams>,
    ) -> (ApiFuture<BatchOutput>, ApiFuture<OptimStepOutput>) {
        let params = params.into();
        let checked = params.validate().map_err(Error::from);
        let pass = checked.and_then(|()| self.queue(PassMode::ForwardBackward, data, &loss.into()));
        match pass {
            Ok(pass) => (pass, self.optim_step(params)),
            Err(error) => (ApiFuture::failed(error.clone()), ApiFuture::failed(error)),
        }
    }

    /// Saves weights and optimizer state under a name, and returns the checkpoint's address.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`] if the name is taken and is not to be replaced.
    pub fn save_state(&self, save: impl Into<SaveOptions>) -> ApiFuture<TinkerPath> {
        let save = save.into();
        if let Err(error) = save.check(SaveKind::State) {
            return ApiFuture::failed(error);
        }
        let request = move |model, seq| SaveWeights {
            ttl_seconds: save.ttl_seconds(),
            overwrite: save.overwrite,
            user_metadata: save.user_metadata(),
            ..SaveWeights::new(model, seq, save.name)
        };
        self.one(request, |saved| Ok(saved.path.parse()?))
    }

    /// Saves weights to sample from under a name, and returns the checkpoint's address.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`] if the name is taken.
    pub fn save_weights_for_sampler(&self, save: impl Into<SaveOptions>) -> ApiFuture<TinkerPath> {
        let save = save.into();
        if let Err(error) = save.check(SaveKind::Sampler) {
            return ApiFuture::failed(error);
        }
        let request = move |model, seq| SaveWeightsForSampler {
            ttl_seconds: save.ttl_seconds(),
            user_metadata: save.user_metadata(),
            ..SaveWeightsForSampler::named(model, seq, save.name)
        };
        self.one(request, |saved| match saved.path {
            Some(path) => save::sampler_path(&path),
            None => Err(nowhere()),
        })
    }

    /// Saves weights as files to download, which
    /// [`RestClient::get_external_weights_urls`](crate::RestClient::get_external_weights_urls) leads
    /// to.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`] if the name is taken.
    pub fn save_weights_external(
        &self,
        save: impl Into<SaveOptions>,
    ) -> ApiFuture<ExternalWeights> {
        let save = save.into();
        if let Err(error) = save.check(SaveKind::External) {
            return ApiFuture::failed(error);
        }
        let request = move |model, seq| SaveWeightsExternal {
            ttl_seconds: save.ttl_seconds(),
            age_encryption_recipients: (!save.recipients.is_empty()).then_some(save.recipients),
            ..SaveWeightsExternal::new(model, seq, save.name)
        };
        self.one(request, |saved| {
            let path = saved.path.ok_or_else(nowhere)?.parse()?;
            Ok(ExternalWeights { path, size_bytes: saved.size_bytes })
        })
    }

    /// Saves weights under no name, only to sample from them, and returns a client that does.
    ///
    /// # Errors
    /// If the server cannot keep them.
    pub fn save_weights_and_get_sampling_client(&self) -> ApiFuture<SamplingClient> {
        let session = Arc::clone(&self.0.session);
        // Taken once, so that a resend asks for the same sampling session.
        let n = session.next_sampler();
        self.one(
            move |model, seq| SaveWeightsForSampler::ephemeral(model, seq, n),
            move |saved| match saved.sampling_session_id {
                Some(id) => Ok(SamplingClient::of(session, id)),
                None => {
                    Err(Error::new(ErrorKind::Decode, "saved, but there is nothing to sample from"))
                }
            },
        )
    }

    /// Loads a checkpoint's weights, and its optimizer state if wanted.
    ///
    /// # Errors
    /// [`ErrorKind::WorkFailed`] if the checkpoint does not fit this model.
    pub fn load_state(&self, path: &TinkerPath, optimizer: RestoreMode) -> ApiFuture<()> {
        self.load(path, optimizer, None)
    }

    /// The same for a checkpoint that another key may read and this client's may not.
    ///
    /// # Errors
    /// As [`TrainingClient::load_state`], and if the key cannot be used.
    pub fn load_state_with_key(
        &self,
        path: &TinkerPath,
        optimizer: RestoreMode,
        key: impl Into<Secret>,
    ) -> ApiFuture<()> {
        let (path, optimizer) = (path.to_string(), optimizer == RestoreMode::WithOptimizer);
        let (inner, key) = (Arc::clone(&self.0), key.into());
        let token = async move { inner.session.with_other_key(&key)?.access_token().await };
        let load = move |token, model, seq| LoadWeights {
            optimizer,
            weights_access_token: Some(token),
            ..LoadWeights::into_model(model, seq, path)
        };
        self.one_after(token, load, |_| Ok(()))
    }

    fn load(
        &self,
        path: &TinkerPath,
        optimizer: RestoreMode,
        weights_access_token: Option<Secret>,
    ) -> ApiFuture<()> {
        let (path, optimizer) = (path.to_string(), optimizer == RestoreMode::WithOptimizer);
        let load = move |model, seq| LoadWeights {
            optimizer,
            weights_access_token,
            ..LoadWeights::into_model(model, seq, path)
        };
        self.one(load, |_| Ok(()))
    }

    /// What this model is.
    ///
    /// # Errors
    /// If the server cannot be asked.
    pub async fn get_info(&self) -> Result<ModelInfo> {
        let call = GetInfo { model_id: self.0.model_id.clone() };
        self.0.session.transport().send(&call, &RequestOptions::default()).await
    }

    /// Queues one request, and turns its answer into what the caller wants.
    fn one<S, T>(
        &self,
        request: impl FnOnce(ModelId, Seq) -> S + Send + 'static,
        finish: impl FnOnce(S::Output) -> Result<T> + Send + 'static,
    ) -> ApiFuture<T>
    where
        S: SubmitRequest<Output: Send> + Send + Sync + 'static,
        T: Send + 'static,
    {
        let request = move |(), model, seq| request(model, seq);
        self.one_after(std::future::ready(Ok(())), request, finish)
    }

    /// The same for a request that needs something first. Its place in the line is taken now.
    fn one_after<P, S, T>(
        &self,
        first: impl Future<Output = Result<P>> + Send + 'static,
        request: impl FnOnce(P, ModelId, Seq) -> S + Send + 'static,
        finish: impl FnOnce(S::Output) -> Result<T> + Send + 'static,
    ) -> ApiFuture<T>
    where
        P: Send + 'static,
        S: SubmitRequest<Output: Send> + Send + Sync + 'static,
        T: Send + 'static,
    {
        let inner = Arc::clone(&self.0);
        let mut reservation = inner.call_order.reserve();
        ApiFuture::start(async move {
            let work = async {
                let first = first.await?;
                reservation.wait().await;
                let request = request(first, inner.model_id.clone(), reservation.assign_one());
                let taken = inner.submit(&request, &RequestOptions::default()).await;
                // The next one may be sent now; the answer is waited for beside it.
                drop(reservation);
                inner.poller().result::<S>(&taken?).await
            };
            let answer = inner.session.run_until_closed(work).await;
            finish(inner.session.connection().record_failure(answer)?)
        })
    }

    fn pass(&self, mode: PassMode, data: Vec<Datum>, loss: &LossSpec) -> ApiFuture<BatchOutput> {
        self.queue(mode, data, loss).unwrap_or_else(ApiFuture::failed)
    }

    /// Queues a pass, unless it makes no sense.
    fn queue(
        &self,
        mode: PassMode,
        data: Vec<Datum>,
        loss: &LossSpec,
    ) -> Result<ApiFuture<BatchOutput>> {
        if let LossSource::Traced(traced) = &loss.0
            && !traced.is_on_server()
        {
            return self.compute_traced(mode, data, traced.clone());
        }
        let inner = Arc::clone(&self.0);
        let batch = BatchRequests::of_loss(&inner, mode, data, loss)?;
        let mut reservation = inner.call_order.reserve();
        Ok(ApiFuture::start(async move {
            let work = async {
                reservation.wait().await;
                let taken = inner.submit_batch(&mut reservation, batch).await;
                drop(reservation);
                inner.batch_answer(taken).await
            };
            let answer = inner.session.run_until_closed(work).await;
            inner.session.connection().record_failure(answer)
        }))
    }
}

fn nowhere() -> Error {
    Error::new(ErrorKind::Decode, "saved, but the server does not say where")
}

impl TrainingShared {
    async fn submit<S: SubmitRequest>(
        &self,
        request: &S,
        options: &RequestOptions,
    ) -> Result<Submitted> {
        let start = Instant::now();
        let ticket = self.session.transport().send(request, options).await?;
        let request_type = request.request_type();
        Ok(Submitted { response: ticket, request_type, submit_duration: start.elapsed() })
    }

    fn poller(&self) -> Poller<'_> {
        Poller::new(&self.session, &self.log)
    }
}

/// What is restored from a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RestoreMode {
    /// The weights; the optimizer starts anew.
    WeightsOnly,
    /// The weights and the optimizer's state.
    WithOptimizer,
}

impl fmt::Debug for TrainingClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainingClient").field("model_id", self.model_id()).finish_non_exhaustive()
    }
}
