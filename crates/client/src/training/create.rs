//! Creates models to train: a new LoRA adapter, or one restored from a checkpoint.

use std::future::IntoFuture;
use std::pin::Pin;
use std::sync::Arc;

use tinkex_wire::{
    CheckpointKind, CreateModel, JsonObject, LoadWeights, LoraConfig, ModelId, OptimizerConfig,
    Secret, SubmitRequest, TinkerPath, WeightsInfo, WeightsInfoRequest,
};

use crate::call_options::CallOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::future::queue_log::{QueueLog, QueuedWork};
use crate::future::{Poller, Submitted};
use crate::service::ServiceClient;
use crate::session::{OtherKeyConnection, Session};

use super::{RestoreMode, TrainingClient};

/// Builder for a new LoRA adapter, returned by
/// [`ServiceClient::create_lora_training_client`].
///
/// Await it, or call [`create`](Self::create).
///
/// ```no_run
/// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
/// let model = service.create_lora_training_client("Qwen/Qwen3-8B").rank(16).seed(7).await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "no model is created until the builder is awaited"]
pub struct CreateLora {
    service: ServiceClient,
    base_model: String,
    lora: LoraConfig,
    optimizer: OptimizerConfig,
    user_metadata: Option<JsonObject>,
}

impl CreateLora {
    pub(crate) fn new(service: ServiceClient, base_model: String) -> Self {
        let (lora, optimizer) = (LoraConfig::default(), OptimizerConfig::default());
        Self { service, base_model, lora, optimizer, user_metadata: None }
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

    /// Creates the model and waits until the server has loaded it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if a setting is out of range; [`ErrorKind::WorkFailed`] or
    /// [`ErrorKind::Rejected`] if the server does not serve the base model or refuses the settings.
    ///
    /// # Cancel safety
    /// Not cancel safe: after the request was sent, the server creates the model even if this
    /// future is dropped.
    pub async fn create(self) -> Result<TrainingClient> {
        let options = *self.service.options();
        options.limit(Box::pin(self.create_model(&options))).await
    }

    async fn create_model(self, options: &CallOptions) -> Result<TrainingClient> {
        let session = self.service.session().await?;
        let request =
            CreateModel::new(session.id().clone(), session.next_model(), self.base_model.as_str())
                .lora_config(Some(self.lora))
                .optimizer_config(self.optimizer)
                .user_metadata(self.user_metadata);
        let created = create_model(&session, &request, self.base_model, options).await?;
        Ok(TrainingClient::new(session, created.model_id).with_options(*options))
    }
}

/// Sends a request that creates a model and waits for its result. `name` names the model in logs.
///
/// It needs no position in the call order, because the model does not exist yet.
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

/// Builder for a model that continues from a checkpoint, returned by
/// [`ServiceClient::create_training_client_from`].
///
/// Await it, or call [`create`](Self::create).
///
/// ```no_run
/// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
/// use tinkex::RestoreMode;
///
/// let path = "tinker://run/weights/step-100";
/// let model = service.create_training_client_from(path, RestoreMode::WithOptimizer).await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "no model is created until the builder is awaited"]
pub struct CreateFromState {
    service: ServiceClient,
    /// Path, or the error if the argument is not one; `create` returns it.
    path: Result<TinkerPath>,
    restore: RestoreMode,
    base_model: Option<String>,
    optimizer: Option<OptimizerConfig>,
    user_metadata: Option<JsonObject>,
    key: Option<Secret>,
}

impl CreateFromState {
    pub(crate) fn new(
        service: ServiceClient,
        path: Result<TinkerPath>,
        restore: RestoreMode,
    ) -> Self {
        let (base_model, optimizer, user_metadata) = (None, None, None);
        Self { service, path, restore, base_model, optimizer, user_metadata, key: None }
    }

    /// Sets the base model (default: the checkpoint's). It must have the same layers.
    pub fn base_model(mut self, base_model: impl Into<String>) -> Self {
        self.base_model = Some(base_model.into());
        self
    }

    /// Sets the optimizer (default: the checkpoint's with [`RestoreMode::WithOptimizer`], else
    /// AdamW).
    pub fn optimizer(mut self, optimizer: OptimizerConfig) -> Self {
        self.optimizer = Some(optimizer);
        self
    }

    /// Stores a JSON object with the training run (default: none).
    pub fn user_metadata(mut self, metadata: JsonObject) -> Self {
        self.user_metadata = Some(metadata);
        self
    }

    /// Sets the API key that may read the checkpoint (default: this client's own).
    pub fn weights_key(mut self, key: impl Into<Secret>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Creates the model and waits until the checkpoint is loaded.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the path is not a training checkpoint or the checkpoint holds
    /// no LoRA adapter; otherwise fails if the server does not find the checkpoint or cannot load
    /// it.
    ///
    /// # Cancel safety
    /// Not cancel safe: after the request was sent, the server creates the model even if this
    /// future is dropped.
    pub async fn create(self) -> Result<TrainingClient> {
        let path = self.path.clone()?;
        if path.kind() != CheckpointKind::Training {
            let message = format!("cannot train from {path}: not a training checkpoint");
            let error = Error::new(ErrorKind::InvalidInput, message);
            return Err(error
                .with_hint("Save the model with save_state.")
                .during("create_training_client_from"));
        }
        let options = *self.service.options();
        options.limit(Box::pin(self.create_from(&path))).await
    }

    async fn create_from(self, path: &TinkerPath) -> Result<TrainingClient> {
        let session = self.service.session().await?;
        let other_key = self.key.as_ref().map(|key| session.with_other_key(key)).transpose()?;
        let token = match &other_key {
            Some(other_key) => Some(other_key.access_token().await?),
            None => None,
        };
        if session.config().create_model_via_load_weights {
            self.create_by_loading(&session, path, token).await
        } else {
            self.create_and_load(&session, path, other_key, token).await
        }
    }

    /// Creates and loads the model with one request. The model id follows from its index in the
    /// session.
    async fn create_by_loading(
        self,
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
        let (name, options) = (expected_id.as_str().to_owned(), *self.service.options());
        let loaded = create_model(session, &request, name, &options).await?;
        let model_id = loaded.model_id.unwrap_or(expected_id);
        Ok(TrainingClient::new(Arc::clone(session), model_id).with_options(options))
    }

    /// Reads the checkpoint's configuration, creates a model with it, and loads the checkpoint.
    async fn create_and_load(
        self,
        session: &Arc<Session>,
        path: &TinkerPath,
        other_key: Option<OtherKeyConnection>,
        token: Option<Secret>,
    ) -> Result<TrainingClient> {
        let request = WeightsInfoRequest::new(path.to_string());
        // The configuration is readable only with a key that may read the checkpoint.
        let transport =
            other_key.as_ref().map_or(session.transport(), OtherKeyConnection::transport);
        let info = transport.send(&request, &self.service.options().request_options()).await;
        let info = session.connection().record_failure(info)?;
        let restored_optimizer =
            (self.restore == RestoreMode::WithOptimizer).then(|| info.optimizer_config.clone());
        let create = CreateLora {
            lora: lora_config(path, &info)?,
            optimizer: self.optimizer.or(restored_optimizer).unwrap_or_default(),
            user_metadata: self.user_metadata,
            ..CreateLora::new(self.service, self.base_model.unwrap_or(info.base_model))
        };
        let model = create.create().await?;
        model.load(path, self.restore, std::future::ready(Ok(token))).await?;
        Ok(model)
    }
}

/// Returns the LoRA configuration of a checkpoint. Layers that the server does not mention were
/// trained.
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

impl IntoFuture for CreateLora {
    type Output = Result<TrainingClient>;
    type IntoFuture = CreateTrainingClientFuture;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.create())
    }
}

impl IntoFuture for CreateFromState {
    type Output = Result<TrainingClient>;
    type IntoFuture = CreateTrainingClientFuture;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.create())
    }
}

/// Future returned by awaiting [`CreateLora`] or [`CreateFromState`].
type CreateTrainingClientFuture = Pin<Box<dyn Future<Output = Result<TrainingClient>> + Send>>;
