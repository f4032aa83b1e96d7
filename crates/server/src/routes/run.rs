//! Models, training runs and sampling sessions.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_store::clock::timestamp;
use tinkex_store::error::ServerError;
use tinkex_store::store::{ModelRunRecord, Record, SamplerEnd, SamplerRecord, Store, Tracked};
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::codec::json;
use tinkex_wire::rest::{Cursor, ListTrainingRuns, SamplerInfo, TrainingRun, TrainingRunPage};
use tinkex_wire::{
    ApiRequest as _, CheckpointKind, CreateSamplingSession, GetInfo, JoinSamplingSession,
    ModelData, ModelId, ModelInfo, SamplerId, SamplingSessionCreated, SamplingSessionJoined,
    TinkerPath,
};

use super::session::{OWNER, page, string_metadata};
use super::{RouteResult, empty, from_query, to_json};
use crate::admit::require_session;
use crate::state::ServerState;

pub(super) fn info(state: &ServerState, body: &Bytes) -> RouteResult {
    let request: GetInfo = json::decode(body)?;
    let store = state.store();
    let run = &store.runs.get(&request.model_id).ok_or_else(|| no_run(&request.model_id))?.row;
    let base = state.models.get(&run.base_model);
    let data = ModelData::default()
        .arch(
            base.as_ref()
                .and_then(|base| Some(format!("{:?}", base.config()?.architecture).to_lowercase())),
        )
        .model_name(Some(run.base_model.clone()))
        .tokenizer_id(base.map(|base| base.tokenizer_id()));
    let info = ModelInfo::new(run.id.clone(), data, run.optimizer.clone());
    to_json(&info.is_lora(Some(true)).lora_rank(Some(run.lora.rank)))
}

pub(super) fn no_run(id: &ModelId) -> ServerError {
    ServerError::not_found(format!("training run {id} does not exist"))
}

pub(super) fn list(state: &ServerState, query: &str) -> RouteResult {
    let request: ListTrainingRuns = from_query(query)?;
    let store = state.store();
    let project = request.project_id.as_deref().filter(|project| !project.is_empty());
    let mut all: Vec<&Tracked<ModelRunRecord>> =
        store.runs.values().filter(|entry| in_project(&store, &entry.row, project)).collect();
    all.sort_by_key(|entry| std::cmp::Reverse((entry.row.created_at, entry.row.id.clone())));
    let total_count = u64::try_from(all.len()).unwrap_or(u64::MAX);
    let cursor = Cursor::new(request.offset, request.limit, total_count);
    let runs =
        page(all, request.offset, request.limit).map(|entry| to_wire(&store, entry)).collect();
    to_json(&TrainingRunPage::new(runs, cursor))
}

/// Returns whether a run, or its session, belongs to `project`. `None` matches every run.
fn in_project(store: &Store, run: &ModelRunRecord, project: Option<&str>) -> bool {
    let Some(project) = project else { return true };
    let session = store.sessions.get(&run.session);
    let project_of_run = run.project_id.as_deref().or_else(|| session?.row.project_id.as_deref());
    project_of_run == Some(project)
}

pub(super) fn get(state: &ServerState, id: &str) -> RouteResult {
    let id = ModelId::from(id);
    let store = state.store();
    to_json(&to_wire(&store, store.runs.get(&id).ok_or_else(|| no_run(&id))?))
}

/// Deletes a run with its checkpoints and metrics. The files are removed at the next expiry
/// interval, like the files of deleted checkpoints.
pub(super) async fn delete(state: &Arc<ServerState>, id: &str) -> RouteResult {
    let id = ModelId::from(id);
    let weights = state
        .store
        .change(|store| {
            let run = &store.runs.get(&id).ok_or_else(|| no_run(&id))?.row;
            if store.is_in_use(run) {
                return Err(ServerError::Conflict(format!(
                    "training run {id} is in use: a client trains it; stop the client first"
                )));
            }
            let snapshot = run.snapshot.as_ref().map(|snapshot| snapshot.weights.clone());
            let checkpoints = store.checkpoints_of(&id).into_iter().map(|row| row.weights.clone());
            let weights: Vec<WeightsLocation> = checkpoints.chain(snapshot).collect();
            Ok((vec![Record::RunDeleted { id: id.clone() }], weights))
        })
        .await?;
    let in_use = state.store().weights_in_use();
    for weights in weights.into_iter().filter(|weights| !in_use.contains(weights)) {
        state.backends.discard(weights);
    }
    empty()
}

fn to_wire(store: &Store, entry: &Tracked<ModelRunRecord>) -> TrainingRun {
    let run = &entry.row;
    let last = |kind| store.last_checkpoint(&run.id, kind).map(|row| row.to_wire());
    TrainingRun::new(run.id.clone(), run.base_model.clone(), OWNER, timestamp(entry.last_used))
        .is_lora(true)
        .corrupted(run.has_failed())
        .lora_rank(Some(run.lora.rank))
        .last_checkpoint(last(CheckpointKind::Training))
        .last_sampler_checkpoint(last(CheckpointKind::Sampler))
        .user_metadata(string_metadata(run.user_metadata.as_ref()))
}

pub(super) async fn create_sampler(state: &Arc<ServerState>, body: &Bytes) -> RouteResult {
    let request: CreateSamplingSession = json::decode(body)?;
    request.validate()?;
    let id = SamplerId::in_session(&request.session_id, request.sampling_session_seq_id);
    // Use `change` instead of `create`: a concurrent retry must wait until the first write is
    // durable.
    state
        .store
        .change(|store| {
            require_session(store, &request.session_id)?;
            if store.samplers.contains_key(&id) {
                let existing = store.open_sampler(&id)?;
                // Accept a retry of the same request: the response to the first attempt may have
                // been lost. Check this before looking up the checkpoint, which may have been
                // deleted since the first attempt.
                if is_created_by(existing, &request) {
                    return Ok((Vec::new(), ()));
                }
                return Err(ServerError::Conflict(format!(
                    "sampling session {id} already exists with another model"
                )));
            }
            let row = resolve_sampler(state, store, &request, id.clone())?;
            store.touch(&request.session_id);
            Ok((vec![Record::Sampler(row)], ()))
        })
        .await?;
    to_json(&SamplingSessionCreated::new(id))
}

/// Returns whether an existing sampling session has the weights that `request` names. A sampling
/// session that a training client created without a checkpoint has a folder but no path, and
/// matches no request.
fn is_created_by(row: &SamplerRecord, request: &CreateSamplingSession) -> bool {
    let base = request.base_model.as_ref();
    match &request.model_path {
        None => row.weights.is_none() && base == Some(&row.base_model),
        path => row.model_path == *path && base.is_none_or(|base| *base == row.base_model),
    }
}

/// Resolves the weights of a new sampling session.
fn resolve_sampler(
    state: &ServerState,
    store: &Store,
    request: &CreateSamplingSession,
    id: SamplerId,
) -> Result<SamplerRecord, ServerError> {
    let (base_model, weights) = match (&request.model_path, &request.base_model) {
        (Some(path), base) => {
            let path: TinkerPath = path.parse()?;
            if path.kind() == CheckpointKind::External {
                return Err(ServerError::invalid(format!(
                    "model_path: {path} was saved for download and cannot be sampled from"
                )));
            }
            let row = super::checkpoint::find(store, &path)?;
            if base.as_ref().is_some_and(|base| *base != row.base_model) {
                return Err(ServerError::invalid(format!(
                    "base_model: {path} was trained from {}; omit base_model",
                    row.base_model
                )));
            }
            (row.base_model, Some(row.weights))
        }
        (None, Some(base)) => (base.clone(), None),
        (None, None) => return Err(ServerError::invalid("expected base_model or model_path")),
    };
    state.base_model(&base_model)?;
    Ok(SamplerRecord {
        id,
        session: request.session_id.clone(),
        base_model,
        model_path: request.model_path.clone(),
        weights,
        run: None,
        clients: 1,
        end: None,
        weights_released: false,
    })
}

pub(super) async fn join_sampler(state: &Arc<ServerState>, body: &Bytes) -> RouteResult {
    let request: JoinSamplingSession = json::decode(body)?;
    let client_counter = state
        .store
        .change(|store| {
            let row = store.open_sampler(&request.sampling_session_id)?;
            let number = row.clients;
            let row = SamplerRecord { clients: number + 1, ..row.clone() };
            Ok((vec![Record::Sampler(row)], number))
        })
        .await?;
    to_json(&SamplingSessionJoined::new(client_counter))
}

/// Ends a sampling session. Requests that were accepted before are still executed; then the expiry
/// task releases the weights.
pub(super) async fn close_sampler(state: &Arc<ServerState>, id: &str) -> RouteResult {
    let id = SamplerId::from(id);
    state
        .store
        .change(|store| {
            let entry = store.samplers.get(&id);
            let row = &entry.ok_or_else(|| ServerError::no_sampling_session(&id))?.row;
            if row.end.is_some() {
                return Ok((Vec::new(), ()));
            }
            let row = SamplerRecord { end: Some(SamplerEnd::Closed), ..row.clone() };
            Ok((vec![Record::Sampler(row)], ()))
        })
        .await?;
    empty()
}

/// Describes a sampling session. Only clients on this machine get the path of the weights: other
/// clients cannot use it.
pub(super) fn sampler(state: &ServerState, id: &str, is_local: bool) -> RouteResult {
    let id = SamplerId::from(id);
    let store = state.store();
    let row = store.open_sampler(&id)?;
    let base = state.models.get(&row.base_model);
    let weights = base.as_ref().filter(|_| is_local).and_then(|base| base.weights_path());
    let weights = weights.map(|path| path.to_string_lossy().into_owned());
    to_json(
        &SamplerInfo::new(id, row.base_model.clone())
            .model_path(row.model_path.clone())
            .base_model_path(weights)
            .tokenizer_id(base.map(|base| base.tokenizer_id())),
    )
}
