//! Exports a training checkpoint as files, for the duration of its download.

use std::time::Duration;

use serde_json::Value;
use tinkex_wire::{JsonObject, TinkerPath};

use crate::error::Result;
use crate::service::ServiceClient;
use crate::training::{RestoreMode, SaveOptions};

/// Time after which the server deletes the export, counted from the last request for its URLs.
pub(super) const TTL: Duration = Duration::from_secs(3600);

/// External weights that were saved from a training checkpoint, in a session of their own.
#[derive(Debug)]
pub(super) struct Export {
    service: ServiceClient,
    pub(super) path: TinkerPath,
}

impl Export {
    /// Loads the checkpoint into a model of a new session and saves it as external weights.
    pub(super) async fn create(service: &ServiceClient, path: &TinkerPath) -> Result<Self> {
        let service = service.with_new_session();
        match Self::save(&service, path).await {
            Ok(path) => Ok(Self { service, path }),
            failed @ Err(_) => {
                service.finish(&failed).await;
                failed.map(|path| Self { service, path })
            }
        }
    }

    async fn save(service: &ServiceClient, path: &TinkerPath) -> Result<TinkerPath> {
        let creator = ("created_by".to_owned(), Value::from("tinkex checkpoint download"));
        let metadata: JsonObject = std::iter::once(creator).collect();
        let create = service.create_training_client_from(path, RestoreMode::WeightsOnly);
        let model = create.user_metadata(metadata).create().await?;
        Ok(model.save_weights_external(SaveOptions::new("download").ttl(TTL)).await?.path)
    }

    /// Deletes the export and closes its session. Failures are only logged: the server deletes the
    /// export when it expires, and ends a session without heartbeats.
    pub(super) async fn remove(self, success: bool) {
        if let Err(error) = self.service.rest().delete_checkpoint(&self.path).await {
            let path = &self.path;
            tracing::warn!(%error, %path, "cannot delete the export; it expires within an hour");
        }
        let result = if success { Ok(()) } else { Err("the download failed") };
        self.service.finish(&result).await;
    }
}
