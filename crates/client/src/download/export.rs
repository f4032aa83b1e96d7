//! A training checkpoint has no files to download: it is exported first, and tidied afterwards.

use std::time::Duration;

use serde_json::Value;
use tinkex_wire::{FinishReason, JsonObject, TinkerPath};

use crate::error::Result;
use crate::service::ServiceClient;
use crate::training::{RestoreMode, SaveOptions};

/// How long the server keeps the export if nobody tidies it, counted from each look at it.
pub(super) const KEPT: Duration = Duration::from_secs(3600);

/// An export, and the stay at the server that it took.
#[derive(Debug)]
pub(super) struct Export {
    service: ServiceClient,
    pub(super) path: TinkerPath,
}

impl Export {
    /// Loads the checkpoint into a model of a session of its own, and saves its files.
    pub(super) async fn make(service: &ServiceClient, path: &TinkerPath) -> Result<Self> {
        let service = service.anew();
        let made = Self::save(&service, path).await;
        match made {
            Ok(path) => Ok(Self { service, path }),
            Err(error) => {
                let why = Some(error.to_string());
                let _ = service.close(FinishReason::Errored, why).await;
                Err(error)
            }
        }
    }

    async fn save(service: &ServiceClient, path: &TinkerPath) -> Result<TinkerPath> {
        let made_by = ("created_by".to_owned(), Value::from("tinkex checkpoint download"));
        let metadata: JsonObject = std::iter::once(made_by).collect();
        let create = service.create_training_client_from(path, RestoreMode::WeightsOnly);
        let model = create.user_metadata(metadata).create().await?;
        Ok(model.save_weights_external(SaveOptions::new("download").ttl(KEPT)).await?.path)
    }

    /// Tidies, whatever became of the download.
    pub(super) async fn end(self, success: bool) {
        if let Err(error) = self.service.rest().delete_checkpoint(&self.path).await {
            tracing::warn!(%error, path = %self.path, "the export goes by itself within an hour");
        }
        let reason = if success { FinishReason::Success } else { FinishReason::Errored };
        if let Err(error) = self.service.close(reason, None).await {
            tracing::debug!(%error, "the export's session goes by itself");
        }
    }
}
