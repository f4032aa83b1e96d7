//! Exports a training checkpoint as files, for the duration of its download.

use std::time::Duration;

use serde_json::Value;
use tinkex_wire::{JsonObject, ModelId, TinkerPath};

use crate::error::Result;
use crate::service::ServiceClient;
use crate::training::{RestoreMode, RestoreOptions, SaveOptions};

/// Time after which the server deletes the export, counted from the last request for its URLs.
pub(super) const TTL: Duration = Duration::from_secs(3600);

/// External weights that were saved from a training checkpoint, in a session of their own.
#[derive(Debug)]
pub(super) struct Export {
    service: ServiceClient,
    /// Client that stays open when the session of the export ends.
    parent: ServiceClient,
    pub(super) path: TinkerPath,
}

impl Export {
    /// Loads the checkpoint into a model of a new session and saves it as external weights.
    pub(super) async fn create(parent: &ServiceClient, path: &TinkerPath) -> Result<Self> {
        let service = parent.with_new_session();
        let parent = parent.clone();
        let mut run = None;
        match Self::save(&service, path, &mut run).await {
            Ok(path) => Ok(Self { service, parent, path }),
            Err(error) => {
                service.finish_with_error(&error).await;
                if let Some(run) = run {
                    delete_run(&parent, run).await;
                }
                Err(error)
            }
        }
    }

    async fn save(
        service: &ServiceClient,
        path: &TinkerPath,
        run: &mut Option<ModelId>,
    ) -> Result<TinkerPath> {
        let creator = ("created_by".to_owned(), Value::from("tinkex checkpoint download"));
        let metadata: JsonObject = std::iter::once(creator).collect();
        let options = RestoreOptions::new(RestoreMode::WeightsOnly).user_metadata(metadata);
        let model = service.create_training_client_from(path, options).await?;
        *run = Some(model.model_id().clone());
        Ok(model.save_weights_external(SaveOptions::new("download").ttl(TTL)).await?.path)
    }

    /// Deletes the export, closes its session, and deletes its run if the server can. Failures are
    /// only logged: the server deletes the export when it expires, and ends a session without
    /// heartbeats.
    pub(super) async fn remove(self, success: bool) {
        if let Err(error) = self.service.rest().delete_checkpoint(&self.path).await {
            let path = &self.path;
            tracing::warn!(%error, %path, "cannot delete the export; it expires within an hour");
        }
        if success {
            self.service.finish().await;
        } else {
            self.service.finish_with_error(&"the download failed").await;
        }
        delete_run(&self.parent, self.path.run().clone()).await;
    }
}

/// Deletes the run that an export was saved from, after the end of its session. Only `tinkex`
/// servers can: on others, the empty run remains.
async fn delete_run(service: &ServiceClient, run: ModelId) {
    if let Err(error) = service.rest().delete_training_run(run.clone()).await {
        tracing::debug!(%error, %run, "cannot delete the run of an export");
    }
}
