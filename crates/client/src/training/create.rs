//! Making a model to train.

use tinkex_wire::{CreateModel, JsonObject, LoraConfig, OptimizerConfig, Submit as _};
use tokio::time::Instant;

use crate::error::Result;
use crate::future::observe::{QueueLog, Work};
use crate::future::poll::{Poller, Taken};
use crate::service::ServiceClient;
use crate::transport::Extras;

use super::TrainingClient;

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
        let start = Instant::now();
        let ticket = session.transport().call(&request, &Extras::default()).await?;
        let taken =
            Taken { ticket, request_type: request.request_type(), handed_over_in: start.elapsed() };
        let log = QueueLog::new(Work::ModelCreation, self.base_model);
        let paced = self.service.paced();
        let poller = Poller {
            transport: session.transport(),
            in_flight: session.downloads(),
            log: &log,
            paced,
        };
        let created = poller.answer::<CreateModel>(&taken).await?;
        Ok(TrainingClient::new(session, created.model_id, paced))
    }
}
