//! [`NamedModel`]: the weights that the `model` of an inference request names.

use std::sync::Arc;

use parking_lot::MutexGuard;
use tinkex_inference::InferenceError;
use tinkex_inference::openai::ModelDescription;
use tinkex_store::error::ServerError;
use tinkex_store::executor::Executor;
use tinkex_store::store::{CheckpointRecord, INFERENCE_SESSION, Store, UnixMicros, UserStore};
use tinkex_store::user::{Account, Principal};
use tinkex_store::weights::WeightsKey;
use tinkex_suggest::nearest_names;
use tinkex_wire::{CheckpointKind, ModelId, SamplerId, SessionId, TinkerPath};

use super::Inference;
use super::error::inference_error;
use crate::models::BaseModel;

/// Prefix of checkpoint paths.
const TINKER: &str = "tinker://";

/// Weights to sample from, found by name.
#[derive(Clone, Debug)]
pub(crate) struct NamedModel {
    /// Name in the request, which responses repeat.
    pub(crate) name: String,
    pub(crate) base: Arc<BaseModel>,
    pub(crate) weights: WeightsKey,
    /// Account to which the usage of the request is charged.
    pub(crate) account: Account,
    /// Time at which the weights were saved; the current time for base models.
    pub(crate) created_at: UnixMicros,
}

impl NamedModel {
    /// Finds the weights that `name` names: an alias, a base model, the `tinker://` path of a
    /// checkpoint, a training run (its latest checkpoint), or a sampling session.
    ///
    /// # Errors
    /// - [`ServerError::NotFound`] with the most similar names if there is no such model.
    /// - [`ServerError::Forbidden`] if the session of the named sampling session has ended.
    pub(crate) fn resolve(
        inference: &Inference,
        principal: &Principal,
        name: &str,
    ) -> Result<Self, InferenceError> {
        Self::find(inference, principal, name)
            .map_err(|error| inference_error(error).caused_by("model"))
    }

    /// Reads the tokenizer on the blocking thread pool, unless it is in memory. Also reads the chat
    /// template if `with_chat` is true.
    ///
    /// # Errors
    /// Fails if reading the chat template panics.
    pub(crate) async fn load_text_files(
        &self,
        executor: &Executor,
        with_chat: bool,
    ) -> Result<(), ServerError> {
        let base = Arc::clone(&self.base);
        if with_chat {
            if self.base.loaded_chat().is_none() {
                executor.run_job(move || drop(base.chat())).await?;
            }
        } else if self.base.loaded_tokenizer().is_none() {
            // A tokenizer that cannot be read is logged, and the request continues without it.
            let _ = executor.run_job(move || base.tokenizer()).await;
        }
        Ok(())
    }

    /// Describes the model for the list of models.
    pub(crate) fn description(self) -> ModelDescription {
        ModelDescription {
            name: self.name,
            created: self.created_at.div_euclid(1_000_000),
            base_model: self.base.name.clone(),
            context: self.base.known_context(),
        }
    }

    fn find(inference: &Inference, principal: &Principal, name: &str) -> Result<Self, ServerError> {
        let admission = &inference.admission;
        let target = inference.aliases.iter().find(|(alias, _)| alias == name);
        let target = target.map_or(name, |(_, target)| target);
        let owner = principal.user.clone();
        let inference_account = Account { owner, session: SessionId::from(INFERENCE_SESSION) };
        let found = |base_model: String, location, account, created_at| {
            let base = admission.base_model(&base_model)?;
            let weights = WeightsKey { base_model, location };
            Ok(Self { name: name.to_owned(), base, weights, account, created_at })
        };
        let mut store = admission.store_of(principal);
        let now = store.all().clock.now();
        if admission.models.get(target).is_some() {
            return found(target.to_owned(), None, inference_account, now);
        }
        let checkpoint = if target.starts_with(TINKER) {
            Some(find_checkpoint(&store, target)?)
        } else {
            latest_checkpoint(&store, &ModelId::from(target))?
        };
        if let Some(row) = checkpoint {
            let weights = Some(row.weights.clone());
            return found(row.base_model.clone(), weights, inference_account, row.created_at);
        }
        let sampler = SamplerId::from(target);
        if store.sampler(&sampler).is_ok() {
            let row = store.open_sampler(&sampler)?.clone();
            store.open_session(&row.session)?;
            store.all_mut().touch_sampler(&sampler);
            let account = store.all().account(&row.session);
            return found(row.base_model, row.weights, account, now);
        }
        drop(store);
        Err(unknown(inference, principal, name))
    }

    /// Lists the models that requests of the principal can name: base models, aliases, and checkpoints, newest
    /// first. Names of training runs and sampling sessions are accepted too, but not listed.
    pub(crate) fn list(inference: &Inference, principal: &Principal) -> Vec<Self> {
        let mut names = inference.admission.models.names();
        names.extend(inference.aliases.iter().map(|(alias, _)| alias.clone()));
        let mut checkpoints: Vec<(UnixMicros, String)> = {
            let store = inference.admission.store_of(principal);
            let now = store.all().clock.now();
            let usable = store.checkpoints().filter(|row| can_sample(row) && !row.is_expired(now));
            usable.map(|row| (row.created_at, row.path.to_string())).collect()
        };
        checkpoints.sort_by(|a, b| b.cmp(a));
        names.extend(checkpoints.into_iter().map(|(_, path)| path));
        names.iter().filter_map(|name| Self::resolve(inference, principal, name).ok()).collect()
    }
}

/// The locked store, as a principal may see it.
type LockedStore<'a> = UserStore<'a, MutexGuard<'a, Store>>;

fn can_sample(row: &CheckpointRecord) -> bool {
    row.path.kind() != CheckpointKind::External
}

/// Finds the checkpoint with a `tinker://` path.
fn find_checkpoint<'a>(
    store: &'a LockedStore<'_>,
    name: &str,
) -> Result<&'a CheckpointRecord, ServerError> {
    let path: TinkerPath =
        name.parse().map_err(|error| ServerError::not_found(format!("model {name:?}: {error}")))?;
    let row = store.checkpoint(&path).map_err(|_| {
        let visible = store.run(path.run()).map(|run| store.all().checkpoints_of(&run.row.id));
        let others = visible.unwrap_or_default().into_iter().filter(|row| can_sample(row));
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
    store: &'a LockedStore<'_>,
    run: &ModelId,
) -> Result<Option<&'a CheckpointRecord>, ServerError> {
    if store.run(run).is_err() {
        return Ok(None);
    }
    let latest = store.all().checkpoints_of(run).into_iter().rfind(|row| can_sample(row));
    latest.map(Some).ok_or_else(|| {
        ServerError::not_found(format!(
            "training run {run} has no checkpoint yet; save weights, or use the id of a sampling \
             session"
        ))
    })
}

/// Returns `"; nearest: a, b"` with the names that are most similar to `name`, or an empty string
/// if no name is similar.
fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> String {
    let names = nearest_names(name, names);
    if names.is_empty() { String::new() } else { format!("; nearest: {}", names.join(", ")) }
}

/// Creates the error for a name that no model has.
fn unknown(inference: &Inference, principal: &Principal, name: &str) -> ServerError {
    let aliases = inference.aliases.iter().map(|(alias, _)| alias.as_str());
    let models = inference.admission.models.names();
    let names: Vec<&str> = models.iter().map(String::as_str).chain(aliases).collect();
    let mut runs: Vec<String> = Vec::new();
    if name.contains(":train:") {
        let store = inference.admission.store_of(principal);
        runs.extend(store.runs().map(|run| run.row.id.to_string()));
    }
    let nearest = nearest(name, names.into_iter().chain(runs.iter().map(String::as_str)));
    let shown: String = name.chars().take(200).collect();
    ServerError::not_found(format!(
        "model {shown:?} does not exist{nearest}; expected a base model, an alias, a tinker:// \
         path, a training run or a sampling session"
    ))
}
