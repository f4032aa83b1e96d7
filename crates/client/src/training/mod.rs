//! [`TrainingClient`]: trains, saves and loads one model.

mod call_order;
mod chunk;
mod create;
mod custom;
mod datum_index;
mod enqueue;
mod finite;
mod forward_backward;
mod interface;
mod loss_inputs;
mod merge;
mod pass;
mod pass_encoding;
mod save;
mod step;
#[cfg(feature = "tokenizer")]
mod tokenizer;
mod unapplied;

#[cfg(test)]
mod tests;

use std::fmt;
use std::future::ready;
use std::sync::Arc;

use tinkex_wire::{
    Datum, GetInfo, LoadWeights, LossConfig, LossFn, ModelId, ModelInfo, OptimParams, PassMode,
    SaveWeights, SaveWeightsExternal, SaveWeightsForSampler, Secret, TensorData, TinkerPath,
};

use crate::call_options::ApplyOptions as _;
use crate::error::{Error, ErrorKind, Result, convert};
use crate::future::queue_log::{QueueLog, QueuedWork};
use crate::future::{ApiFuture, RequestFuture};
use crate::loss::{CustomLoss, LossValue};
use crate::sampling::SamplingClient;
use crate::session::{PendingCalls, Session};
use crate::transport::CallOptions;

use call_order::CallOrder;
use custom::{ComputedLoss, LossError};
use save::SaveKind;
use unapplied::UnappliedPasses;

pub use create::{LoraOptions, RestoreOptions};
pub use interface::Training;
pub use merge::{BatchOutput, MetricValue};
pub use save::{ExternalWeights, SaveOptions};
pub use step::{OptimOutput, StepOptions, StepOutput};

/// Client for one model in training.
///
/// Created by [`ServiceClient::create_lora_training_client`] or
/// [`ServiceClient::create_training_client_from`]. Cloning is cheap; clones share the model and its
/// call order.
///
/// The server executes the requests of a model in call order. Each call
/// [starts at once](crate#calls), so issue the next request before awaiting the previous result to
/// keep the server busy:
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
///
/// # Cancel safety
/// Dropping a returned [`ApiFuture`] discards the result only: the request is still sent and
/// executed, because later requests of the model depend on it.
///
/// [`ServiceClient::create_lora_training_client`]: crate::ServiceClient::create_lora_training_client
/// [`ServiceClient::create_training_client_from`]: crate::ServiceClient::create_training_client_from
#[derive(Clone)]
pub struct TrainingClient(Arc<TrainingShared>);

/// State shared by all clones of a [`TrainingClient`].
struct TrainingShared {
    session: Arc<Session>,
    model_id: ModelId,
    call_order: CallOrder,
    pending_calls: Arc<PendingCalls>,
    log: Arc<QueueLog>,
    /// Passes whose gradients no optimizer step has applied.
    unapplied: UnappliedPasses,
    options: CallOptions,
}

/// Loss function and its configuration: built into the server ([`LossFn`]), traced by the caller
/// ([`CustomLoss`]), or computed by the caller ([`LossSpec::computed`]).
///
/// [`LossFn`] and [`CustomLoss`] convert into a `LossSpec`, so most calls pass them directly.
///
/// ```
/// use tinkex::{LossConfig, LossFn, LossSpec};
///
/// let default = LossSpec::from(LossFn::Ppo);
/// let clipped = LossSpec::new(LossFn::Ppo, LossConfig::new().set("clip_low_threshold", 0.9));
/// assert_ne!(default, clipped);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LossSpec(LossSource);

/// Variants of a [`LossSpec`].
#[derive(Clone, Debug, PartialEq)]
enum LossSource {
    BuiltIn(LossFn, LossConfig),
    Traced(CustomLoss),
    Computed(ComputedLoss),
}

impl LossSpec {
    /// Creates the specification of a built-in loss with non-default settings.
    #[must_use]
    pub fn new(function: LossFn, config: LossConfig) -> Self {
        Self(LossSource::BuiltIn(function, config))
    }

    /// Returns the function and the settings of a built-in loss; `None` for a traced or computed
    /// loss.
    #[must_use]
    pub fn built_in(&self) -> Option<(&LossFn, &LossConfig)> {
        match &self.0 {
            LossSource::BuiltIn(function, config) => Some((function, config)),
            LossSource::Traced(_) | LossSource::Computed(_) => None,
        }
    }
}

impl LossSpec {
    /// Creates the specification of a loss that a Rust function computes from the log-probabilities
    /// of each datum's target tokens, with its gradient. Unlike a traced loss, a computed loss may
    /// depend on several data together, as the loss of a preference pair does.
    ///
    /// The data is sent twice, as for
    /// [`forward_backward_custom`](TrainingClient::forward_backward_custom). The function must
    /// fulfil the requirements that are documented there.
    pub fn computed<F>(loss: F) -> Self
    where
        F: Fn(&[Datum], &[TensorData]) -> std::result::Result<LossValue, LossError>
            + Send
            + Sync
            + 'static,
    {
        Self(LossSource::Computed(ComputedLoss(Arc::new(loss))))
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

/// Parts of a checkpoint to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RestoreMode {
    /// Load the weights and reset the optimizer state.
    WeightsOnly,
    /// Load the weights and the optimizer state.
    WithOptimizer,
}

impl TrainingClient {
    pub(crate) fn new(session: Arc<Session>, model_id: ModelId) -> Self {
        let log = Arc::new(QueueLog::new(
            QueuedWork::Training,
            model_id.as_str(),
            session.queue_observer(),
        ));
        Self(Arc::new(TrainingShared {
            pending_calls: session.track_calls(),
            call_order: CallOrder::new(),
            unapplied: UnappliedPasses::default(),
            options: session.settings().options,
            session,
            model_id,
            log,
        }))
    }

    /// Returns a client of the same model whose calls have these options. The returned client
    /// shares the call order with this client. Options that are not set keep the value of this
    /// client.
    ///
    /// ```no_run
    /// # async fn run(model: tinkex::TrainingClient) -> tinkex::Result<()> {
    /// use std::time::Duration;
    /// use tinkex::CallOptions;
    ///
    /// let with_timeout = model.with_options(CallOptions::new().timeout(Duration::from_secs(60)));
    /// with_timeout.save_state("step-100").await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn with_options(&self, options: CallOptions) -> Self {
        let TrainingShared { session, model_id, call_order, pending_calls, log, unapplied, .. } =
            &*self.0;
        Self(Arc::new(TrainingShared {
            session: Arc::clone(session),
            model_id: model_id.clone(),
            call_order: call_order.clone(),
            pending_calls: Arc::clone(pending_calls),
            log: Arc::clone(log),
            unapplied: unapplied.clone(),
            options: options.or(&self.0.options),
        }))
    }

    /// Returns the id that the server gave the model.
    #[must_use]
    pub fn model_id(&self) -> &ModelId {
        &self.0.model_id
    }

    /// Computes `loss` over `data` and adds its gradient to the model's accumulated gradient.
    ///
    /// A batch that exceeds the server's request limits is sent in several requests, and their
    /// outputs are merged. All requests are validated before the first one is sent.
    ///
    /// **If a request fails, the gradients of the other requests stay on the server**, and the next
    /// [`optim_step`](Self::optim_step), even one that is already queued, applies them. To avoid
    /// this, train with [`step`](Self::step), which does not send its optimizer step after a
    /// refused request, or with a [`fenced`](StepOptions::fenced) step, which waits for the result
    /// of the pass. After such a failure, [`Error::accumulated_datums`] returns the datums whose
    /// gradients the server holds; [`discard_gradient`](Self::discard_gradient) discards them.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if `data` is empty, holds NaN or infinite weights, advantages or
    /// clip bounds, has a loss input that a built-in loss does not read (the message names the most
    /// similar input), or cannot be encoded; nothing is queued in that case.
    /// [`ErrorKind::WorkFailed`] if the server cannot compute the loss. Indices in messages refer
    /// to `data`.
    pub fn forward_backward(
        &self,
        data: Vec<Datum>,
        loss: impl Into<LossSpec>,
    ) -> ApiFuture<BatchOutput> {
        match self.prepare_pass(PassMode::ForwardBackward, data, &loss.into()) {
            Ok(pass) => self.enqueue_pass(pass),
            Err(error) => ApiFuture::failed(error.during("forward_backward")),
        }
    }

    /// Computes `loss` over `data` without a gradient.
    ///
    /// # Errors
    /// Fails like [`forward_backward`](Self::forward_backward).
    pub fn forward(&self, data: Vec<Datum>, loss: impl Into<LossSpec>) -> ApiFuture<BatchOutput> {
        match self.prepare_pass(PassMode::Forward, data, &loss.into()) {
            Ok(pass) => self.enqueue_pass(pass),
            Err(error) => ApiFuture::failed(error.during("forward")),
        }
    }

    /// Updates the weights with the gradient accumulated since the previous step.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if a parameter is out of range; nothing is queued in that case.
    /// If the server refuses the step or fails to execute it, the gradient stays on the server. The
    /// message says how many passes and datums the gradient contains;
    /// [`discard_gradient`](Self::discard_gradient) discards it.
    pub fn optim_step(&self, params: impl Into<OptimParams>) -> ApiFuture<OptimOutput> {
        self.enqueue_step(params.into())
    }

    /// Discards the gradient that was accumulated since the last optimizer step. The weights and the
    /// state of the optimizer do not change.
    ///
    /// Keeps the call order like every other call. An [`optim_step`](Self::optim_step) with a
    /// learning rate of 0 is no replacement: it changes the moments of the optimizer.
    ///
    /// ```no_run
    /// # async fn run(model: tinkex::TrainingClient, batch: Vec<tinkex::Datum>) -> tinkex::Result<()> {
    /// use tinkex::{AdamParams, LossFn, StepOptions};
    ///
    /// let options = StepOptions::new(AdamParams::with_learning_rate(1e-4)).fenced();
    /// if let Err(error) = model.step(batch, LossFn::CrossEntropy, options).await {
    ///     eprintln!("skipped a batch: {error}");
    ///     model.discard_gradient().await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the server has no such request: it is an extension of `tinkex`
    /// servers, and the hosted service does not have it. [`ErrorKind::Rejected`] if the model is on
    /// an upstream of a `tinkex` server. In both cases create a training client from the last
    /// checkpoint instead, with
    /// [`ServiceClient::create_training_client_from`](crate::ServiceClient::create_training_client_from):
    /// its model has no gradient.
    pub fn discard_gradient(&self) -> ApiFuture<()> {
        self.enqueue_discard()
    }

    /// Saves the weights and the optimizer state, and returns the path of the checkpoint.
    ///
    /// Continue training from the checkpoint with [`load_state`](Self::load_state) or
    /// [`ServiceClient::create_training_client_from`](crate::ServiceClient::create_training_client_from).
    ///
    /// ```no_run
    /// # async fn run(model: tinkex::TrainingClient) -> tinkex::Result<()> {
    /// use tinkex::SaveOptions;
    ///
    /// let path = model.save_state("step-100").await?;
    /// let latest = model.save_state(SaveOptions::new("latest").overwrite()).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the options are invalid; nothing is queued in that case.
    /// [`ErrorKind::Conflict`] if the name exists and
    /// [`overwrite`](SaveOptions::overwrite) is not set.
    pub fn save_state(&self, options: impl Into<SaveOptions>) -> ApiFuture<TinkerPath> {
        let options = options.into();
        if let Err(error) = options.validate(SaveKind::State) {
            return ApiFuture::failed(error.during("save_state"));
        }
        let request = move |model, seq| {
            SaveWeights::new(model, seq, options.name.as_str())
                .ttl_seconds(options.ttl_seconds())
                .overwrite(options.overwrite)
                .user_metadata(options.user_metadata())
        };
        self.enqueue_save(SaveKind::State, request, |saved| Ok(saved.path.parse()?))
    }

    /// Saves the weights for sampling, and returns the path of the checkpoint.
    ///
    /// Sample from the checkpoint with
    /// [`ServiceClient::create_sampling_client_from`](crate::ServiceClient::create_sampling_client_from).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the options are invalid; nothing is queued in that case.
    /// [`ErrorKind::Conflict`] if the name exists.
    pub fn save_weights_for_sampler(
        &self,
        options: impl Into<SaveOptions>,
    ) -> ApiFuture<TinkerPath> {
        let options = options.into();
        if let Err(error) = options.validate(SaveKind::Sampler) {
            return ApiFuture::failed(error.during("save_weights_for_sampler"));
        }
        let request = move |model, seq| {
            SaveWeightsForSampler::named(model, seq, options.name.as_str())
                .ttl_seconds(options.ttl_seconds())
                .user_metadata(options.user_metadata())
        };
        self.enqueue_save(SaveKind::Sampler, request, |saved| match saved.path {
            Some(path) => save::sampler_path(&path),
            None => Err(missing_path()),
        })
    }

    /// Saves the weights as downloadable files.
    ///
    /// [`RestClient::get_external_weights_urls`](crate::RestClient::get_external_weights_urls)
    /// returns the URLs of the files.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the options are invalid; nothing is queued in that case.
    /// [`ErrorKind::Conflict`] if the name exists.
    pub fn save_weights_external(
        &self,
        options: impl Into<SaveOptions>,
    ) -> ApiFuture<ExternalWeights> {
        let options = options.into();
        if let Err(error) = options.validate(SaveKind::External) {
            return ApiFuture::failed(error.during("save_weights_external"));
        }
        let request = move |model, seq| {
            let ttl_seconds = options.ttl_seconds();
            let recipients = (!options.recipients.is_empty()).then_some(options.recipients);
            SaveWeightsExternal::new(model, seq, options.name)
                .ttl_seconds(ttl_seconds)
                .age_encryption_recipients(recipients)
        };
        self.enqueue_save(SaveKind::External, request, |saved| {
            let path = saved.path.ok_or_else(missing_path)?.parse()?;
            Ok(ExternalWeights { path, size_bytes: saved.size_bytes })
        })
    }

    /// Saves the weights without a name, and returns a client that samples from them.
    ///
    /// The saved weights cannot be listed or loaded. The server keeps them until
    /// [`SamplingClient::close`] is called, until the session ends or, on a `tinkex` server, until
    /// they are unused for 6 hours (a setting of the server).
    ///
    /// # Errors
    /// [`ErrorKind::WorkFailed`] if the server cannot save the weights.
    pub fn save_weights_and_get_sampling_client(&self) -> ApiFuture<SamplingClient> {
        let session = Arc::clone(&self.0.session);
        // Assign the index once, so that a retry creates the same sampling session.
        let index = session.next_sampler();
        let options = self.0.options;
        self.enqueue(
            move |model, seq| SaveWeightsForSampler::ephemeral(model, seq, index),
            move |saved| match saved.sampling_session_id {
                Some(id) => Ok(SamplingClient::of_creator(session, id).with_options(options)),
                None => Err(Error::new(
                    ErrorKind::Decode,
                    "cannot sample from the saved weights: the server returned no sampling session",
                )),
            },
        )
    }

    /// Loads a checkpoint into this model.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the path is invalid; nothing is queued in that case.
    /// [`ErrorKind::NotFound`] if the checkpoint does not exist; [`ErrorKind::Rejected`] or
    /// [`ErrorKind::WorkFailed`] if it does not fit this model.
    pub fn load_state(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        restore: RestoreMode,
    ) -> ApiFuture<()> {
        match convert("load_state", path) {
            Ok(path) => self.load(&path, restore, ready(Ok(None))),
            Err(error) => ApiFuture::failed(error),
        }
    }

    /// Loads a checkpoint that only another API key may read.
    ///
    /// # Errors
    /// Fails like [`load_state`](Self::load_state), and if the server does not accept `key`.
    pub fn load_state_with_key(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        restore: RestoreMode,
        key: impl Into<Secret>,
    ) -> ApiFuture<()> {
        let path = match convert("load_state_with_key", path) {
            Ok(path) => path,
            Err(error) => return ApiFuture::failed(error),
        };
        let shared = Arc::clone(&self.0);
        let key = key.into();
        let token = async move {
            let other_key = shared.session.with_other_key(&key)?;
            Ok(Some(other_key.access_token().await?))
        };
        self.load(&path, restore, token)
    }

    /// Loads a checkpoint. `token` resolves to a token that grants access to the checkpoint, or to
    /// `None` if the credential of this client does.
    fn load(
        &self,
        path: &TinkerPath,
        restore: RestoreMode,
        token: impl Future<Output = Result<Option<Secret>>> + Send + 'static,
    ) -> ApiFuture<()> {
        let path = path.to_string();
        let optimizer = restore == RestoreMode::WithOptimizer;
        let request = move |token, model, seq| {
            LoadWeights::into_model(model, seq, path)
                .optimizer(optimizer)
                .weights_access_token(token)
        };
        self.enqueue_after(token, request, |_| Ok(()))
    }

    /// Waits until every request of this model that was queued before has a result or an error.
    ///
    /// Does not change the results of these requests, and also waits for requests whose futures
    /// were dropped. Requests that are queued during the wait do not prolong the wait. Returns at
    /// once if nothing is queued, for example after
    /// [`ServiceClient::abort`](crate::ServiceClient::abort).
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future only ends the wait.
    pub fn flush(&self) -> impl Future<Output = ()> + Send + use<> {
        self.0.pending_calls.ended()
    }

    /// Returns the model's base model, LoRA rank and tokenizer.
    ///
    /// The request is sent at once, independently of the call order.
    ///
    /// # Errors
    /// Fails if the request fails.
    ///
    /// # Cancel safety
    /// Cancel safe: the request changes nothing on the server.
    pub fn get_info(&self) -> RequestFuture<ModelInfo> {
        let shared = Arc::clone(&self.0);
        let _entered = self.0.session.settings().enter_runtime();
        RequestFuture::start(async move {
            let request = GetInfo::new(shared.model_id.clone());
            let options = shared.options.request_options();
            let sent = shared.session.transport().send(&request, &options);
            let info = shared.options.limit(sent).await;
            shared.session.connection().record_failure(info)
        })
    }
}

fn missing_path() -> Error {
    Error::new(ErrorKind::Decode, "checkpoint saved, but the server returned no path")
}

impl fmt::Debug for TrainingClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainingClient").field("model_id", self.model_id()).finish_non_exhaustive()
    }
}
