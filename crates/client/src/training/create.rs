//! Creates models to train: a new LoRA adapter, or one restored from a checkpoint.

use std::sync::Arc;

use tinkex_wire::{
    CheckpointKind, CreateModel, JsonObject, LoadWeights, LoraConfig, ModelId, OptimizerConfig,
    Secret, SubmitRequest, TinkerPath, WeightsInfo, WeightsInfoRequest,
};

use crate::call_options::ApplyOptions as _;
use crate::error::{Error, ErrorKind, Result, convert};
use crate::future::queue_log::{QueueLog, QueuedWork};
use crate::future::{Poller, RequestFuture, Submitted};
use crate::service::ServiceClient;
use crate::session::{OtherKeyConnection, Session};
use crate::transport::CallOptions;

use super::{RestoreMode, TrainingClient};

/// Base model of a new LoRA adapter, with optional settings, for
/// [`ServiceClient::create_lora_training_client`].
///
/// A plain string converts into options with the default settings for that base model.
///
/// ```
/// use tinkex::LoraOptions;
///
/// let options = LoraOptions::new("Qwen/Qwen3-8B").rank(16).seed(7);
/// ```
#[derive(Clone, Debug)]
#[must_use = "options do nothing until they are passed to `create_lora_training_client`"]
pub struct LoraOptions {
    base_model: String,
    lora: LoraConfig,
    optimizer: OptimizerConfig,
    user_metadata: Option<JsonObject>,
}

impl LoraOptions {
    /// Creates options for an adapter of `base_model`.
    pub fn new(base_model: impl Into<String>) -> Self {
        Self {
            base_model: base_model.into(),
            lora: LoraConfig::default(),
            optimizer: OptimizerConfig::default(),
            user_metadata: None,
        }
    }

    /// Sets the LoRA rank (default 32).
    pub fn rank(mut self, rank: u32) -> Self {
        self.lora.rank = rank;
        self
    }

    /// Sets the seed of the initial weights (default: chosen by the server).
    pub fn seed(mut self, seed: u64) -> Self {
        self.lora.seed = Some(seed);
        self
    }

    /// Replaces the whole LoRA configuration: rank, seed and trained layers.
    pub fn lora(mut self, lora: LoraConfig) -> Self {
        self.lora = lora;
        self
    }

    /// Sets the optimizer (default AdamW).
    pub fn optimizer(mut self, optimizer: OptimizerConfig) -> Self {
        self.optimizer = optimizer;
        self
    }

    /// Stores a JSON object with the training run (default: none).
    pub fn user_metadata(mut self, metadata: JsonObject) -> Self {
        self.user_metadata = Some(metadata);
        self
    }
}

impl From<&str> for LoraOptions {
    fn from(base_model: &str) -> Self {
        Self::new(base_model)
    }
}

impl From<&String> for LoraOptions {
    fn from(base_model: &String) -> Self {
        Self::new(base_model)
    }
}

impl From<String> for LoraOptions {
    fn from(base_model: String) -> Self {
        Self::new(base_model)
    }
}

impl ServiceClient {
    /// Creates a new LoRA adapter, waits until the server has loaded its model, and returns a
    /// client that trains it.
    ///
    /// ```no_run
    /// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
    /// use tinkex::LoraOptions;
    ///
    /// let model = service.create_lora_training_client("Qwen/Qwen3-8B").await?;
    /// let options = LoraOptions::new("Qwen/Qwen3-8B").rank(16).seed(7);
    /// let small = service.create_lora_training_client(options).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if a setting is out of range, in which case nothing is sent;
    /// [`ErrorKind::NotFound`] if the server does not serve the base model; [`ErrorKind::Rejected`]
    /// if it refuses the settings. A server that accepts the request before it checks the base model
    /// reports [`ErrorKind::WorkFailed`] instead.
    ///
    /// # Cancel safety
    /// If the future is dropped after the request was sent, the server creates the model, but no
    /// client for it exists.
    pub fn create_lora_training_client(
        &self,
        options: impl Into<LoraOptions>,
    ) -> RequestFuture<TrainingClient> {
        let service = self.clone();
        let options = options.into();
        if let Err(error) = options.lora.validate() {
            return RequestFuture::failed(Error::from(error).during("create_lora_training_client"));
        }
        self.start(async move { create_lora(&service, options).await })
    }

    /// Creates a model that continues from a training checkpoint, waits until the checkpoint is
    /// loaded, and returns a client that trains it.
    ///
    /// ```no_run
    /// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
    /// use tinkex::{RestoreMode, RestoreOptions};
    ///
    /// let path = "tinker://run/weights/step-100";
    /// let model = service.create_training_client_from(path, RestoreMode::WithOptimizer).await?;
    /// let options = RestoreOptions::new(RestoreMode::WeightsOnly).weights_key("tml-other");
    /// let other = service.create_training_client_from(path, options).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the path is not a training checkpoint or the checkpoint holds
    /// no LoRA adapter; [`ErrorKind::NotFound`] if the checkpoint does not exist;
    /// [`ErrorKind::WorkFailed`] if the server cannot load it.
    ///
    /// # Cancel safety
    /// If the future is dropped after the request was sent, the server creates the model, but no
    /// client for it exists.
    pub fn create_training_client_from(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        options: impl Into<RestoreOptions>,
    ) -> RequestFuture<TrainingClient> {
        const CALL: &str = "create_training_client_from";
        let path = match convert(CALL, path) {
            Ok(path) => path,
            Err(error) => return RequestFuture::failed(error),
        };
        if path.kind() != CheckpointKind::Training {
            let message = format!("cannot train from {path}: not a training checkpoint");
            let error = Error::new(ErrorKind::InvalidInput, message);
            let error = error.with_hint("Save the model with save_state.").during(CALL);
            return RequestFuture::failed(error);
        }
        let service = self.clone();
        let options = options.into();
        self.start(async move { options.create(&service, &path).await })
    }
}

async fn create_lora(service: &ServiceClient, options: LoraOptions) -> Result<TrainingClient> {
    let LoraOptions { base_model, lora, optimizer, user_metadata } = options;
    let session = service.session().await?;
    let request = CreateModel::new(session.id().clone(), session.next_model(), base_model.as_str())
        .lora_config(Some(lora))
        .optimizer_config(optimizer)
        .user_metadata(user_metadata);
    let created = create_model(&session, &request, base_model, service.options()).await?;
    Ok(TrainingClient::new(session, created.model_id).with_options(*service.options()))
}

/// Sends a request that creates a model and waits for its result. Log messages show `name` for the
/// model.
///
/// The request needs no position in the call order, because the model does not exist yet.
async fn create_model<S: SubmitRequest>(
    session: &Session,
    request: &S,
    name: String,
    options: &CallOptions,
) -> Result<S::Output> {
    let submitted = Submitted::send(session, request, &options.request_options()).await;
    let submitted = session.connection().record_failure(submitted)?;
    let log = QueueLog::new(QueuedWork::ModelCreation, name, session.queue_observer());
    let poller = Poller::new(session, &log).with_options(options);
    session.connection().record_failure(poller.result::<S>(&submitted).await)
}

/// Parts of a checkpoint to load into a new model, with optional settings, for
/// [`ServiceClient::create_training_client_from`].
///
/// A [`RestoreMode`] converts into options without further settings.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until they are passed to `create_training_client_from`"]
pub struct RestoreOptions {
    restore: RestoreMode,
    base_model: Option<String>,
    optimizer: Option<OptimizerConfig>,
    user_metadata: Option<JsonObject>,
    key: Option<Secret>,
}

impl RestoreOptions {
    /// Creates options that load the given parts.
    pub fn new(restore: RestoreMode) -> Self {
        Self { restore, base_model: None, optimizer: None, user_metadata: None, key: None }
    }

    /// Sets the base model (default: the base model of the checkpoint). Another base model must
    /// have the same layers.
    pub fn base_model(mut self, base_model: impl Into<String>) -> Self {
        self.base_model = Some(base_model.into());
        self
    }

    /// Sets the optimizer (default: the optimizer of the checkpoint with
    /// [`RestoreMode::WithOptimizer`], else AdamW).
    pub fn optimizer(mut self, optimizer: OptimizerConfig) -> Self {
        self.optimizer = Some(optimizer);
        self
    }

    /// Stores a JSON object with the training run (default: none).
    pub fn user_metadata(mut self, metadata: JsonObject) -> Self {
        self.user_metadata = Some(metadata);
        self
    }

    /// Sets the API key with which the checkpoint is read (default: the API key of this client).
    pub fn weights_key(mut self, key: impl Into<Secret>) -> Self {
        self.key = Some(key.into());
        self
    }

    async fn create(self, service: &ServiceClient, path: &TinkerPath) -> Result<TrainingClient> {
        let session = service.session().await?;
        let other_key = self.key.as_ref().map(|key| session.with_other_key(key)).transpose()?;
        let token = match &other_key {
            Some(other_key) => Some(other_key.access_token().await?),
            None => None,
        };
        if session.config().create_model_via_load_weights {
            self.create_by_loading(service, &session, path, token).await
        } else {
            self.create_and_load(service, &session, path, other_key, token).await
        }
    }

    /// Creates and loads the model with one request. The server derives the model id from the index
    /// of the model in the session.
    async fn create_by_loading(
        self,
        service: &ServiceClient,
        session: &Arc<Session>,
        path: &TinkerPath,
        weights_access_token: Option<Secret>,
    ) -> Result<TrainingClient> {
        let index = session.next_model();
        let expected_id = ModelId::in_session(session.id(), index);
        let request = LoadWeights::as_new_model(session.id().clone(), index, path.to_string())
            .base_model(self.base_model)
            .user_metadata(self.user_metadata)
            .optimizer(self.restore == RestoreMode::WithOptimizer)
            .optimizer_config(self.optimizer)
            .weights_access_token(weights_access_token);
        let options = *service.options();
        let name = expected_id.as_str().to_owned();
        let loaded = create_model(session, &request, name, &options).await?;
        let model_id = loaded.model_id.unwrap_or(expected_id);
        Ok(TrainingClient::new(Arc::clone(session), model_id).with_options(options))
    }

    /// Reads the checkpoint's configuration, creates a model with it, and loads the checkpoint.
    async fn create_and_load(
        self,
        service: &ServiceClient,
        session: &Arc<Session>,
        path: &TinkerPath,
        other_key: Option<OtherKeyConnection>,
        token: Option<Secret>,
    ) -> Result<TrainingClient> {
        let request = WeightsInfoRequest::new(path.to_string());
        // The configuration is readable only with a key that may read the checkpoint.
        let transport =
            other_key.as_ref().map_or(session.transport(), OtherKeyConnection::transport);
        let info = transport.send(&request, &service.options().request_options()).await;
        let info = session.connection().record_failure(info)?;
        let restored_optimizer =
            (self.restore == RestoreMode::WithOptimizer).then(|| info.optimizer_config.clone());
        let options = LoraOptions {
            lora: lora_config(path, &info)?,
            optimizer: self.optimizer.or(restored_optimizer).unwrap_or_default(),
            user_metadata: self.user_metadata,
            base_model: self.base_model.unwrap_or(info.base_model),
        };
        let model = create_lora(service, options).await?;
        model.load(path, self.restore, std::future::ready(Ok(token))).await?;
        Ok(model)
    }
}

impl From<RestoreMode> for RestoreOptions {
    fn from(restore: RestoreMode) -> Self {
        Self::new(restore)
    }
}

/// Returns the LoRA configuration of a checkpoint. Groups of layers that the server does not report
/// count as trained.
fn lora_config(path: &TinkerPath, info: &WeightsInfo) -> Result<LoraConfig> {
    let (true, Some(rank)) = (info.is_lora, info.lora_rank) else {
        let message = format!("cannot train from {path}: it holds no LoRA adapter");
        return Err(Error::new(ErrorKind::InvalidInput, message));
    };
    Ok(LoraConfig::with_rank(rank)
        .train_unembed(info.train_unembed.unwrap_or(true))
        .train_mlp(info.train_mlp.unwrap_or(true))
        .train_attn(info.train_attn.unwrap_or(true)))
}
