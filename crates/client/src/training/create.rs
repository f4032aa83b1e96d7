//! Making a model to train: a new adapter, or one from a checkpoint.

use std::future::IntoFuture;
use std::pin::Pin;
use std::sync::Arc;

use tinkex_wire::{
    CheckpointKind, CreateModel, JsonObject, LoadWeights, LoraConfig, ModelId, OptimizerConfig,
    Secret, SubmitRequest, TinkerPath, WeightsInfo, WeightsInfoRequest,
};
use tokio::time::Instant;

use crate::error::{Error, ErrorKind, Result};
use crate::future::poll::{Poller, Submitted};
use crate::future::queue_log::{QueueLog, QueuedWork};
use crate::service::ServiceClient;
use crate::session::{OtherKeyConnection, Session};
use crate::transport::RequestOptions;

use super::{RestoreMode, TrainingClient};

/// Collects the settings of a new adapter; made by
/// [`ServiceClient::create_lora_training_client`].
#[derive(Clone, Debug)]
#[must_use]
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

    /// The rank of its matrices.
    pub fn rank(mut self, rank: u32) -> Self {
        self.lora.rank = rank;
        self
    }

    /// Where its random start comes from.
    pub fn seed(mut self, seed: u64) -> Self {
        self.lora.seed = Some(seed);
        self
    }

    /// Rank, seed and layers at once.
    pub fn lora(mut self, lora: LoraConfig) -> Self {
        self.lora = lora;
        self
    }

    /// The optimizer it is trained with.
    pub fn optimizer(mut self, optimizer: OptimizerConfig) -> Self {
        self.optimizer = optimizer;
        self
    }

    /// Anything to remember with it.
    pub fn user_metadata(mut self, metadata: JsonObject) -> Self {
        self.user_metadata = Some(metadata);
        self
    }

    /// Makes the model, and waits until it is there.
    ///
    /// # Errors
    /// If the server has no such base model, or the settings make no sense.
    pub async fn create(self) -> Result<TrainingClient> {
        let session = self.service.session().await?;
        let request = CreateModel {
            lora_config: Some(self.lora),
            optimizer_config: self.optimizer,
            user_metadata: self.user_metadata,
            ..CreateModel::new(session.id().clone(), session.next_model(), self.base_model.as_str())
        };
        let created = make(&session, &request, self.base_model).await?;
        Ok(TrainingClient::new(session, created.model_id))
    }
}

/// Sends a request that makes a model, and waits for it. It stands in no line: there is no model yet.
async fn make<S: SubmitRequest>(session: &Session, request: &S, name: String) -> Result<S::Output> {
    let start = Instant::now();
    let ticket = session.transport().send(request, &RequestOptions::default()).await;
    let ticket = session.connection().record_failure(ticket)?;
    let request_type = request.request_type();
    let taken = Submitted { response: ticket, request_type, submit_duration: start.elapsed() };
    let log = QueueLog::new(QueuedWork::ModelCreation, name);
    session.connection().record_failure(Poller::new(session, &log).result::<S>(&taken).await)
}

/// Collects the settings of a model that goes on from a checkpoint; made by
/// [`ServiceClient::create_training_client_from`].
#[derive(Clone, Debug)]
#[must_use]
pub struct CreateFromState {
    service: ServiceClient,
    path: TinkerPath,
    restore: RestoreMode,
    base_model: Option<String>,
    optimizer: Option<OptimizerConfig>,
    user_metadata: Option<JsonObject>,
    key: Option<Secret>,
}

impl CreateFromState {
    pub(crate) fn new(service: ServiceClient, path: TinkerPath, restore: RestoreMode) -> Self {
        let (base_model, optimizer, user_metadata) = (None, None, None);
        Self { service, path, restore, base_model, optimizer, user_metadata, key: None }
    }

    /// Another base model than the checkpoint's, with the same layers.
    pub fn base_model(mut self, base_model: impl Into<String>) -> Self {
        self.base_model = Some(base_model.into());
        self
    }

    /// Another optimizer than the checkpoint's.
    pub fn optimizer(mut self, optimizer: OptimizerConfig) -> Self {
        self.optimizer = Some(optimizer);
        self
    }

    /// Anything to remember with the model.
    pub fn user_metadata(mut self, metadata: JsonObject) -> Self {
        self.user_metadata = Some(metadata);
        self
    }

    /// Another key that may read the checkpoint, if this client's own may not.
    pub fn weights_key(mut self, key: impl Into<Secret>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Makes the model, and waits until the checkpoint is loaded.
    ///
    /// # Errors
    /// If there is no such checkpoint, or it holds nothing to go on training from.
    pub async fn create(self) -> Result<TrainingClient> {
        if self.path.kind() != CheckpointKind::Training {
            let why = format!("{} was not saved to go on training from", self.path);
            let hint = "save it with save_state";
            return Err(Error::new(ErrorKind::InvalidInput, why).with_hint(hint));
        }
        let session = self.service.session().await?;
        let foreign = self.key.as_ref().map(|key| session.with_other_key(key)).transpose()?;
        let token = match &foreign {
            Some(foreign) => Some(foreign.access_token().await?),
            None => None,
        };
        if session.config().create_model_via_load_weights {
            self.create_by_loading(&session, token).await
        } else {
            self.create_and_load(&session, foreign, token).await
        }
    }

    /// One request makes the model and loads it; its id follows from its number.
    async fn create_by_loading(
        self,
        session: &Arc<Session>,
        weights_access_token: Option<Secret>,
    ) -> Result<TrainingClient> {
        let n = session.next_model();
        let name = ModelId::in_session(session.id(), n);
        let request = LoadWeights {
            base_model: self.base_model,
            user_metadata: self.user_metadata,
            optimizer: self.restore == RestoreMode::WithOptimizer,
            optimizer_config: self.optimizer,
            weights_access_token,
            ..LoadWeights::as_new_model(session.id().clone(), n, self.path.to_string())
        };
        let loaded = make(session, &request, name.as_str().to_owned()).await?;
        let model_id = loaded.model_id.unwrap_or(name);
        Ok(TrainingClient::new(Arc::clone(session), model_id))
    }

    /// Asks what the checkpoint holds, makes a model like that, and loads the checkpoint into it.
    async fn create_and_load(
        self,
        session: &Arc<Session>,
        foreign: Option<OtherKeyConnection>,
        token: Option<Secret>,
    ) -> Result<TrainingClient> {
        let ask = WeightsInfoRequest { tinker_path: self.path.to_string() };
        // Only whoever may read the checkpoint may ask about it.
        let transport = foreign.as_ref().map_or(session.transport(), OtherKeyConnection::transport);
        let info = transport.send(&ask, &RequestOptions::default()).await;
        let info = session.connection().record_failure(info)?;
        let restored =
            (self.restore == RestoreMode::WithOptimizer).then(|| info.optimizer_config.clone());
        let create = CreateLora {
            lora: lora(&info)?,
            optimizer: self.optimizer.or(restored).unwrap_or_default(),
            user_metadata: self.user_metadata,
            ..CreateLora::new(self.service, self.base_model.unwrap_or(info.base_model))
        };
        let model = create.create().await?;
        model.load(&self.path, self.restore, token).await?;
        Ok(model)
    }
}

/// The adapter that a checkpoint holds. Layers that nobody speaks of were trained.
fn lora(info: &WeightsInfo) -> Result<LoraConfig> {
    let (true, Some(rank)) = (info.is_lora, info.lora_rank) else {
        return Err(Error::new(ErrorKind::InvalidInput, "the checkpoint does not hold an adapter"));
    };
    Ok(LoraConfig {
        rank,
        seed: None,
        train_unembed: info.train_unembed.unwrap_or(true),
        train_mlp: info.train_mlp.unwrap_or(true),
        train_attn: info.train_attn.unwrap_or(true),
    })
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
