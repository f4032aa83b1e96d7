//! Models, training runs and sampling sessions.

use bytes::Bytes;
use tinkex_store::clock::timestamp;
use tinkex_store::error::ServerError;
use tinkex_store::store::{
    AuditEvent, CheckpointRecord, ModelRunRecord, Record, SamplerEnd, SamplerRecord, SharedWith,
    Store, Tracked, UserStore, cost_of_records,
};
use tinkex_store::user::UserId;
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::codec::json;
use tinkex_wire::rest::{
    AccessScope, Cursor, ListTrainingRuns, SamplerInfo, ShareTarget, TrainingRun, TrainingRunPage,
};
use tinkex_wire::{
    ApiRequest as _, CheckpointKind, CreateSamplingSession, GetInfo, JoinSamplingSession,
    ModelData, ModelId, ModelInfo, SamplerId, SamplingSessionCreated, SamplingSessionJoined,
    TinkerPath,
};

use super::metadata::{MetadataOf, ReadMetadata};
use super::session::page;
use super::{Caller, RouteResult, empty, from_query, to_json};
use crate::state::ServerState;

/// Maximum number of users with whom a run is shared. Sharing a run with every user needs no list.
const MAX_SHARES: usize = 1_000;

pub(super) fn info(caller: Caller<'_>, body: &Bytes) -> RouteResult {
    let request: GetInfo = json::decode(body)?;
    let store = caller.store();
    let run = &store.run(&request.model_id)?.row;
    let base = caller.state.models.get(&run.base_model);
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

/// Lists runs: those of the user, and with the scope `accessible` also shared runs.
pub(super) async fn list(caller: Caller<'_>, query: &str) -> RouteResult {
    let (mut page, metadata) = list_page(caller, &from_query(query)?);
    let mut metadata = ReadMetadata::read(caller.state, metadata).await?;
    page.training_runs.iter_mut().for_each(|run| metadata.add_to_run(run));
    metadata.respond(&page)
}

/// Returns a page of runs without their metadata.
fn list_page(caller: Caller<'_>, request: &ListTrainingRuns) -> (TrainingRunPage, Vec<MetadataOf>) {
    let store = caller.store();
    let project = request.project_id.as_deref().filter(|project| !project.is_empty());
    let with_shared = request.access_scope == AccessScope::Accessible;
    let mut all: Vec<&Tracked<ModelRunRecord>> = store
        .runs()
        .filter(|entry| with_shared || caller.principal.controls(&entry.row.owner))
        .filter(|entry| in_project(store.all(), &entry.row, project))
        .collect();
    all.sort_by_key(|entry| std::cmp::Reverse((entry.row.created_at, entry.row.id.clone())));
    let total_count = u64::try_from(all.len()).unwrap_or(u64::MAX);
    let cursor = Cursor::new(request.offset, request.limit, total_count);
    let mut runs = Vec::new();
    let mut metadata = Vec::new();
    for entry in page(all, request.offset, request.limit) {
        let (run, objects) = to_wire(store.all(), entry);
        runs.push(run);
        metadata.extend(objects);
    }
    (TrainingRunPage::new(runs, cursor), metadata)
}

/// Returns whether a run, or its session, belongs to `project`. `None` matches every run.
fn in_project(store: &Store, run: &ModelRunRecord, project: Option<&str>) -> bool {
    let Some(project) = project else { return true };
    let session = store.sessions.get(&run.session);
    let project_of_run = run.project_id.as_deref().or_else(|| session?.row.project_id.as_deref());
    project_of_run == Some(project)
}

pub(super) async fn get(caller: Caller<'_>, id: &str) -> RouteResult {
    let (mut run, metadata) = {
        let store = caller.store();
        to_wire(store.all(), store.run(&ModelId::from(id))?)
    };
    let mut metadata = ReadMetadata::read(caller.state, metadata).await?;
    metadata.add_to_run(&mut run);
    metadata.respond(&run)
}

/// Lets a user, or every user, read a run and use its checkpoints.
pub(super) async fn share(caller: Caller<'_>, id: &str, query: &str) -> RouteResult {
    set_share(caller, id, query, "run.share", |shared, user| match user {
        Some(user) => drop(shared.users.insert(user)),
        None => shared.everybody = true,
    })
    .await
}

/// Ends the sharing of a run with a user, or with everybody.
pub(super) async fn unshare(caller: Caller<'_>, id: &str, query: &str) -> RouteResult {
    set_share(caller, id, query, "run.unshare", |shared, user| match user {
        Some(user) => drop(shared.users.remove(&user)),
        None => *shared = SharedWith::default(),
    })
    .await
}

async fn set_share(
    caller: Caller<'_>,
    id: &str,
    query: &str,
    event: &'static str,
    edit: impl FnOnce(&mut SharedWith, Option<UserId>),
) -> RouteResult {
    let target: ShareTarget = from_query(query)?;
    let user = target.user.as_deref().filter(|user| !user.is_empty());
    let user = user.map(UserId::parse).transpose()?;
    let id = ModelId::from(id);
    caller
        .change(|store| {
            let mut row = store.own_run(&id)?.row.clone();
            let with = user.as_ref().map_or("everybody", UserId::as_str);
            let audit = store.audit(AuditEvent::of_run(event, &id).detail("with", with));
            edit(&mut row.shared_with, user);
            if row.shared_with.users.len() > MAX_SHARES {
                return Err(ServerError::invalid(format!(
                    "a run can be shared with at most {MAX_SHARES} users; share it with every user \
                     instead"
                )));
            }
            Ok((vec![Record::Run(row), audit], ()))
        })
        .await?;
    empty()
}

/// Deletes a run with its checkpoints, metrics, prompts, completions and results. The payload file
/// is rewritten at once; the weights are removed at the next expiry interval, like the weights of
/// deleted checkpoints.
pub(super) async fn delete(caller: Caller<'_>, id: &str) -> RouteResult {
    let id = ModelId::from(id);
    let state = caller.state;
    let (weights, requests) = caller
        .change(|user_store| {
            let run = &user_store.own_run(&id)?.row;
            let store = user_store.all();
            if store.is_in_use(run) {
                return Err(ServerError::Conflict(format!(
                    "training run {id} is in use: a client trains it; stop the client first"
                )));
            }
            let snapshot = run.snapshot.as_ref().map(|snapshot| snapshot.weights.clone());
            let checkpoints = store.checkpoints_of(&id).into_iter().map(|row| row.weights.clone());
            let weights: Vec<WeightsLocation> = checkpoints.chain(snapshot).collect();
            let requests = store.finished_requests_of(run);
            let audit = user_store.audit(AuditEvent::of_run("run.delete", &id));
            Ok((vec![Record::RunDeleted { id: id.clone() }, audit], (weights, requests)))
        })
        .await?;
    state.store().remove_results(requests);
    state.expiry.compact_payloads(0);
    let in_use = state.store().weights_in_use();
    for weights in weights.into_iter().filter(|weights| !in_use.contains(weights)) {
        state.backends.discard(weights);
    }
    empty()
}

/// Describes a run without metadata, and returns the objects whose metadata belongs to it.
fn to_wire(store: &Store, entry: &Tracked<ModelRunRecord>) -> (TrainingRun, Vec<MetadataOf>) {
    let run = &entry.row;
    let last = |kind| store.last_checkpoint(&run.id, kind);
    let training = last(CheckpointKind::Training);
    let sampler = last(CheckpointKind::Sampler);
    let mut metadata = vec![MetadataOf::new(&run.id, run.metadata_bytes)];
    let checkpoints = [training, sampler].into_iter().flatten();
    metadata.extend(checkpoints.map(|row| MetadataOf::new(&row.path, row.metadata_bytes)));
    let described = TrainingRun::new(
        run.id.clone(),
        run.base_model.clone(),
        run.owner.as_str(),
        timestamp(entry.last_used),
    )
    .is_lora(true)
    .corrupted(run.has_failed())
    .lora_rank(Some(run.lora.rank))
    .last_checkpoint(training.map(CheckpointRecord::to_wire))
    .last_sampler_checkpoint(sampler.map(CheckpointRecord::to_wire));
    (described, metadata)
}

pub(super) async fn create_sampler(caller: Caller<'_>, body: &Bytes) -> RouteResult {
    let request: CreateSamplingSession = json::decode(body)?;
    request.validate()?;
    let id = SamplerId::in_session(&request.session_id, request.sampling_session_seq_id);
    // Use `change` instead of `create`: a concurrent retry must wait until the first write is
    // durable.
    caller
        .change(|mut store| {
            store.open_session(&request.session_id)?;
            if store.sampler(&id).is_ok() {
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
            let row = resolve_sampler(caller.state, &store, &request, id.clone())?;
            let store = store.all_mut();
            store.touch(&request.session_id);
            let owner = store.account(&request.session_id).owner;
            let records = vec![Record::Sampler(row)];
            store.reserve_records(&owner, cost_of_records(&records))?;
            Ok((records, ()))
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
    store: &UserStore<'_, &mut Store>,
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
            let row = store.checkpoint(&path)?.clone();
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

pub(super) async fn join_sampler(caller: Caller<'_>, body: &Bytes) -> RouteResult {
    let request: JoinSamplingSession = json::decode(body)?;
    let client_counter = caller
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
pub(super) async fn close_sampler(caller: Caller<'_>, id: &str) -> RouteResult {
    let id = SamplerId::from(id);
    caller
        .change(|store| {
            let row = store.sampler(&id)?;
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
pub(super) fn sampler(caller: Caller<'_>, id: &str, is_local: bool) -> RouteResult {
    let id = SamplerId::from(id);
    let store = caller.store();
    let row = store.open_sampler(&id)?;
    let base = caller.state.models.get(&row.base_model);
    let weights = base.as_ref().filter(|_| is_local).and_then(|base| base.weights_path());
    let weights = weights.map(|path| path.to_string_lossy().into_owned());
    to_json(
        &SamplerInfo::new(id, row.base_model.clone())
            .model_path(row.model_path.clone())
            .base_model_path(weights)
            .tokenizer_id(base.map(|base| base.tokenizer_id())),
    )
}
