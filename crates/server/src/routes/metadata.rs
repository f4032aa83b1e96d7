//! [`ReadMetadata`]: the metadata of the objects in one response.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use tinkex_store::error::ServerError;
use tinkex_wire::codec::json;
use tinkex_wire::rest::{Checkpoint, TrainingRun};
use tinkex_wire::{JSON, JsonObject, Metadata};
use tokio::sync::OwnedSemaphorePermit;

use super::{RouteResult, respond};
use crate::state::ServerState;

/// Maximum size of the metadata in one response, in bytes, except that the first object always has
/// its metadata.
pub(super) const MAX_METADATA: u64 = 4 << 20;
/// Memory that a response needs per byte of metadata: decoded, as strings, and encoded.
const MEMORY_FACTOR: u64 = 8;

/// An object whose metadata a response contains.
#[derive(Clone, Debug)]
pub(super) struct MetadataOf {
    pub(super) object: String,
    /// Size of the metadata in bytes.
    pub(super) bytes: u64,
}

/// Metadata of the objects in one response, and its share of the budget for responses.
#[derive(Default)]
pub(super) struct ReadMetadata {
    values: HashMap<String, JsonObject>,
    permit: Option<OwnedSemaphorePermit>,
}

impl MetadataOf {
    pub(super) fn new(object: &impl ToString, bytes: u64) -> Self {
        Self { object: object.to_string(), bytes }
    }
}

impl ReadMetadata {
    /// Reads the metadata of objects, in order, up to [`MAX_METADATA`] bytes. The other objects have
    /// no metadata in the response; a request for one of them returns it.
    pub(super) async fn read(
        state: &Arc<ServerState>,
        objects: Vec<MetadataOf>,
    ) -> Result<Self, ServerError> {
        let mut total = 0;
        let mut read = Vec::new();
        for MetadataOf { object, bytes } in objects.into_iter().filter(|object| object.bytes > 0) {
            if total > 0 && total + bytes > MAX_METADATA {
                break;
            }
            total += bytes;
            read.push(object);
        }
        if read.is_empty() {
            return Ok(Self::default());
        }
        let size = usize::try_from(total.saturating_mul(MEMORY_FACTOR)).unwrap_or(usize::MAX);
        let permit = state.result_reads.reserve(size).await?;
        let reader = state.store.metadata().clone();
        let job = move || {
            let connection = reader.connect()?;
            let mut values = HashMap::new();
            for object in read {
                if let Some(value) = connection.get(&object)? {
                    values.insert(object, value);
                }
            }
            Ok::<_, std::io::Error>(values)
        };
        let values = state.executor.run_job(job).await?;
        let values = values.map_err(|error| ServerError::read_failed(&error))?;
        Ok(Self { values, permit: Some(permit) })
    }

    /// Removes the metadata of an object and returns it as strings, as the API has it.
    pub(super) fn take(&mut self, object: &str) -> Option<Metadata> {
        self.values.remove(object).map(|metadata| string_metadata(&metadata))
    }

    /// Adds the metadata to a checkpoint.
    pub(super) fn add_to_checkpoint(&mut self, checkpoint: &mut Checkpoint) {
        checkpoint.user_metadata = self.take(&checkpoint.tinker_path);
    }

    /// Adds the metadata to a run and to its last checkpoints.
    pub(super) fn add_to_run(&mut self, run: &mut TrainingRun) {
        run.user_metadata = self.take(run.training_run_id.as_str());
        let checkpoints = [&mut run.last_checkpoint, &mut run.last_sampler_checkpoint];
        checkpoints.into_iter().flatten().for_each(|checkpoint| self.add_to_checkpoint(checkpoint));
    }

    /// Returns a response, which keeps its share of the budget until it was sent.
    pub(super) fn respond(self, value: &impl Serialize) -> RouteResult {
        let Self { values, permit } = self;
        drop(values);
        let body = BudgetedBody { bytes: json::encode(value)?, _permit: permit };
        Ok(respond(JSON, Bytes::from_owner(body)))
    }
}

/// Body of a response with its share of the budget.
struct BudgetedBody {
    bytes: Bytes,
    _permit: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for BudgetedBody {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Converts metadata values to strings, as the API returns them.
pub(super) fn string_metadata(metadata: &JsonObject) -> Metadata {
    let text = |value: &serde_json::Value| match value {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    metadata.iter().map(|(key, value)| (key.clone(), text(value))).collect()
}
