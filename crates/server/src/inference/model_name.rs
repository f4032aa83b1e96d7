//! [`NamedModel`]: the weights that the `model` of an inference request names.

use std::sync::Arc;

use tinkex_text::{Tokenizer, nearest_names};
use tinkex_wire::{CheckpointKind, ModelId, SamplerId, SessionId, TinkerPath};

use super::error::InferenceError;
use crate::admit::require_session;
use crate::error::ServerError;
use crate::models::BaseModel;
use crate::operation::WeightsKey;
use crate::state::ServerState;
use crate::store::{CheckpointRecord, INFERENCE_SESSION, Store, UnixMicros};

/// Prefix of checkpoint paths.
const TINKER: &str = "tinker://";

/// Weights to sample from, found by name.
#[derive(Clone, Debug)]
pub(crate) struct NamedModel {
    /// Name in the request; responses repeat it.
    pub(crate) name: String,
    pub(crate) base: Arc<BaseModel>,
    pub(crate) weights: WeightsKey,
    /// Session whose usage the request counts for.
    pub(crate) session: SessionId,
    /// Time at which the weights were saved; the current time for base models.
    pub(crate) created_at: UnixMicros,
}

impl NamedModel {
    /// Finds the weights that `name` names: an alias, a base model, the `tinker://` path of a
    /// checkpoint, a training run (its latest checkpoint), or a sampling session.
    ///
    /// # Errors
    /// - [`ServerError::NotFound`] with the nearest names if there is no such model.
    /// - [`ServerError::Forbidden`] if the session of the sampling session has ended.
    pub(crate) fn resolve(state: &ServerState, name: &str) -> Result<Self, InferenceError> {
        let param = Some("model".to_owned());
        Self::find(state, name).map_err(|error| InferenceError { error, param })
    }

    /// Returns the tokenizer, reading it on the blocking pool on first use; `None` if the model has
    /// none that can be read, which the log says.
    pub(crate) async fn tokenizer(&self) -> Option<Tokenizer> {
        if let Some(loaded) = self.base.loaded_tokenizer() {
            return loaded;
        }
        let base = Arc::clone(&self.base);
        tokio::task::spawn_blocking(move || base.tokenizer()).await.ok().flatten()
    }

    fn find(state: &ServerState, name: &str) -> Result<Self, ServerError> {
        let aliases = &state.options.aliases;
        let target = aliases.iter().find(|(alias, _)| alias == name);
        let target = target.map_or(name, |(_, target)| target);
        let inference = SessionId::from(INFERENCE_SESSION);
        let found = |base_model: String, folder, session, created_at| {
            let base = state.base_model(&base_model)?;
            let weights = WeightsKey { base_model, folder };
            Ok(Self { name: name.to_owned(), base, weights, session, created_at })
        };
        if state.models.get(target).is_some() {
            return found(target.to_owned(), None, inference, state.clock.now());
        }
        let store = state.store();
        let checkpoint = if target.starts_with(TINKER) {
            Some(find_checkpoint(&store, target)?)
        } else {
            latest_checkpoint(&store, &ModelId::from(target))?
        };
        if let Some(row) = checkpoint {
            let (base_model, folder) = (row.base_model.clone(), row.folder.clone());
            return found(base_model, Some(folder), inference, row.created_at);
        }
        if let Some(sampler) = store.samplers.get(&SamplerId::from(target)) {
            let row = sampler.row.clone();
            require_session(&store, &row.session)?;
            return found(row.base_model, row.folder, row.session, state.clock.now());
        }
        drop(store);
        Err(unknown(state, name))
    }

    /// Lists the models that requests can name: base models, aliases, and checkpoints, newest
    /// first. Names of training runs and sampling sessions are accepted too, but not listed.
    pub(crate) fn list(state: &ServerState) -> Vec<Self> {
        let mut names = state.models.names();
        names.extend(state.options.aliases.iter().map(|(alias, _)| alias.clone()));
        let mut checkpoints: Vec<(UnixMicros, String)> = {
            let (store, now) = (state.store(), state.clock.now());
            let rows = store.checkpoints.values().map(|entry| &entry.row);
            let usable = rows.filter(|row| can_sample(row) && !row.is_expired(now));
            usable.map(|row| (row.created_at, row.path.to_string())).collect()
        };
        checkpoints.sort_by(|a, b| b.cmp(a));
        names.extend(checkpoints.into_iter().map(|(_, path)| path));
        names.iter().filter_map(|name| Self::resolve(state, name).ok()).collect()
    }
}

fn can_sample(row: &CheckpointRecord) -> bool {
    row.path.kind() != CheckpointKind::External
}

/// Finds the checkpoint with a `tinker://` path.
fn find_checkpoint<'a>(store: &'a Store, name: &str) -> Result<&'a CheckpointRecord, ServerError> {
    let path: TinkerPath =
        name.parse().map_err(|error| ServerError::not_found(format!("model {name:?}: {error}")))?;
    let row = store.checkpoint(&path).map(|entry| &entry.row).ok_or_else(|| {
        let others = store.checkpoints_of(path.run());
        let others = others.into_iter().filter(|row| can_sample(row));
        let names: Vec<String> = others.map(|row| row.path.to_string()).collect();
        let nearest = nearest(name, names.iter().map(String::as_str));
        ServerError::not_found(format!("checkpoint {path} does not exist{nearest}"))
    })?;
    if !can_sample(row) {
        return Err(ServerError::not_found(format!(
            "checkpoint {path} was saved for download and cannot be sampled from"
        )));
    }
    Ok(row)
}

/// Returns the latest checkpoint of a training run, or `None` if there is no such run.
fn latest_checkpoint<'a>(
    store: &'a Store,
    run: &ModelId,
) -> Result<Option<&'a CheckpointRecord>, ServerError> {
    if !store.runs.contains_key(run) {
        return Ok(None);
    }
    let latest = store.checkpoints_of(run).into_iter().rfind(|row| can_sample(row));
    latest.map(Some).ok_or_else(|| {
        ServerError::not_found(format!(
            "training run {run} has no checkpoint yet; save weights, or use the id of a sampling \
             session"
        ))
    })
}

/// Returns `"; nearest: a, b"` with the names that are most similar to `name`, or an empty string
/// if none is similar.
fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> String {
    let names = nearest_names(name, names);
    if names.is_empty() { String::new() } else { format!("; nearest: {}", names.join(", ")) }
}

/// Creates the error for a name that is no model.
fn unknown(state: &ServerState, name: &str) -> ServerError {
    let aliases = state.options.aliases.iter().map(|(alias, _)| alias.as_str());
    let models = state.models.names();
    let names: Vec<&str> = models.iter().map(String::as_str).chain(aliases).collect();
    let runs: Vec<String> = match name.contains(":train:") {
        true => state.store().runs.keys().map(|run| run.as_str().to_owned()).collect(),
        false => Vec::new(),
    };
    let nearest = nearest(name, names.into_iter().chain(runs.iter().map(String::as_str)));
    let shown: String = name.chars().take(200).collect();
    ServerError::not_found(format!(
        "model {shown:?} does not exist{nearest}; expected a base model, an alias, a tinker:// \
         path, a training run or a sampling session"
    ))
}
