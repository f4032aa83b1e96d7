//! Models, training runs and sampling sessions.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_wire::codec::json;
use tinkex_wire::rest::{Cursor, ListTrainingRuns, SamplerInfo, TrainingRun, TrainingRunPage};
use tinkex_wire::{
    ApiRequest as _, CheckpointKind, CreateSamplingSession, GetInfo, JoinSamplingSession,
    ModelData, ModelId, ModelInfo, SamplerId, SamplingSessionCreated, SamplingSessionJoined,
    TinkerPath,
};

use super::session::{OWNER, page, texts};
use super::{Reply, from_query, to_json};
use crate::commit;
use crate::error::ApiError;
use crate::state::Shared;
use crate::store::{Fact, Kept, Run, Sampler, Store, timestamp};

pub(super) fn info(shared: &Shared, body: &Bytes) -> Reply {
    let call: GetInfo = json::decode(body)?;
    let store = shared.store();
    let run = &store.runs.get(&call.model_id).ok_or_else(|| missing(&call.model_id))?.row;
    let base = shared.models.get(&run.base_model);
    to_json(&ModelInfo {
        model_data: ModelData {
            arch: base.map(|base| format!("{:?}", base.config.architecture).to_lowercase()),
            model_name: Some(run.base_model.clone()),
            tokenizer_id: base.map(|base| base.tokenizer_id()),
        },
        model_id: run.id.clone(),
        optimizer_config: run.optimizer.clone(),
        is_lora: Some(true),
        lora_rank: Some(run.lora.rank),
        model_name: Some(run.base_model.clone()),
    })
}

fn missing(id: &ModelId) -> ApiError {
    ApiError::not_found(format!("there is no training run {id}"))
}

pub(super) fn list(shared: &Shared, query: &str) -> Reply {
    let call: ListTrainingRuns = from_query(query)?;
    let store = shared.store();
    let project = call.project_id.as_deref().filter(|project| !project.is_empty());
    let mut all: Vec<&Kept<Run>> =
        store.runs.values().filter(|kept| in_project(&store, &kept.row, project)).collect();
    all.sort_by_key(|kept| std::cmp::Reverse((kept.row.created_at, kept.row.id.clone())));
    let total_count = u64::try_from(all.len()).unwrap_or(u64::MAX);
    let cursor = Cursor { offset: call.offset, limit: call.limit, total_count };
    let runs = page(all, call.offset, call.limit).map(|kept| shown(&store, kept)).collect();
    to_json(&TrainingRunPage::new(runs, cursor))
}

fn in_project(store: &Store, run: &Run, project: Option<&str>) -> bool {
    let Some(wanted) = project else { return true };
    let session = store.sessions.get(&run.session);
    let own = run.project_id.as_deref().or_else(|| session?.row.project_id.as_deref());
    own == Some(wanted)
}

pub(super) fn get(shared: &Shared, id: &str) -> Reply {
    let id = ModelId::from(id);
    let store = shared.store();
    to_json(&shown(&store, store.runs.get(&id).ok_or_else(|| missing(&id))?))
}

fn shown(store: &Store, kept: &Kept<Run>) -> TrainingRun {
    let run = &kept.row;
    let last = |kind| store.last_checkpoint(&run.id, kind).map(|row| row.shown());
    TrainingRun::new(run.id.clone(), run.base_model.clone(), OWNER, timestamp(kept.seen))
        .is_lora(true)
        .corrupted(run.closed.is_some() && run.project_id.is_none())
        .lora_rank(Some(run.lora.rank))
        .last_checkpoint(last(CheckpointKind::Training))
        .last_sampler_checkpoint(last(CheckpointKind::Sampler))
        .user_metadata(texts(run.user_metadata.as_ref()))
}

pub(super) async fn create_sampler(shared: &Arc<Shared>, body: &Bytes) -> Reply {
    let call: CreateSamplingSession = json::decode(body)?;
    call.validate()?;
    let id = SamplerId::in_session(&call.session_id, call.sampling_session_seq_id);
    // In turn: a second call for the same must not be told of one that is not written yet.
    commit::change(shared, |store| {
        match store.sessions.get(&call.session_id) {
            None => {
                let why = format!("there is no session {}", call.session_id);
                return Err(ApiError::not_found(why));
            }
            Some(kept) if kept.row.end.is_some() => {
                return Err(ApiError::forbidden(format!("session {} is over", call.session_id)));
            }
            Some(_) => {}
        }
        let row = source(shared, store, &call, id.clone())?;
        if let Some(before) = store.samplers.get(&id) {
            // The same again is the same; the reply to the first may have been lost.
            let same = (&before.row.model_path, &before.row.base_model)
                == (&row.model_path, &row.base_model);
            if same {
                return Ok((Vec::new(), ()));
            }
            return Err(ApiError::bad(format!(
                "{id} exists already and samples from something else"
            )));
        }
        store.touch(&call.session_id);
        Ok((vec![Fact::Sampler(row)], ()))
    })
    .await?;
    to_json(&SamplingSessionCreated { sampling_session_id: id })
}

/// What a sampling session samples from.
fn source(
    shared: &Shared,
    store: &Store,
    call: &CreateSamplingSession,
    id: SamplerId,
) -> Result<Sampler, ApiError> {
    let (base_model, folder) = match (&call.model_path, &call.base_model) {
        (Some(path), base) => {
            let path: TinkerPath = path.parse()?;
            if path.kind() == CheckpointKind::External {
                return Err(ApiError::bad(format!("model_path: {path} was saved for download")));
            }
            let kept = store.checkpoint(&path);
            let row = &kept
                .ok_or_else(|| ApiError::not_found(format!("there is no checkpoint {path}")))?
                .row;
            if base.as_ref().is_some_and(|base| *base != row.base_model) {
                return Err(ApiError::bad(format!(
                    "base_model: {path} was trained from {}, leave it out",
                    row.base_model
                )));
            }
            (row.base_model.clone(), Some(row.folder.clone()))
        }
        (None, Some(base)) => (base.clone(), None),
        (None, None) => return Err(ApiError::bad("give a base_model or a model_path")),
    };
    if shared.models.get(&base_model).is_none() {
        return Err(ApiError::not_found(shared.models.missing(&base_model)));
    }
    let (session, model_path) = (call.session_id.clone(), call.model_path.clone());
    Ok(Sampler { id, session, base_model, model_path, folder, clients: 1 })
}

pub(super) async fn join_sampler(shared: &Arc<Shared>, body: &Bytes) -> Reply {
    let call: JoinSamplingSession = json::decode(body)?;
    let client_counter = commit::change(shared, |store| {
        let kept = store.samplers.get(&call.sampling_session_id);
        let row = &kept.ok_or_else(|| no_sampler(&call.sampling_session_id))?.row;
        let (row, number) = (Sampler { clients: row.clients + 1, ..row.clone() }, row.clients);
        Ok((vec![Fact::Sampler(row)], number))
    })
    .await?;
    to_json(&SamplingSessionJoined { client_counter })
}

fn no_sampler(id: &SamplerId) -> ApiError {
    ApiError::not_found(format!("there is no sampling session {id}"))
}

pub(super) fn sampler(shared: &Shared, id: &str) -> Reply {
    let id = SamplerId::from(id);
    let store = shared.store();
    let row = &store.samplers.get(&id).ok_or_else(|| no_sampler(&id))?.row;
    let tokenizer_id = shared.models.get(&row.base_model).map(|base| base.tokenizer_id());
    to_json(
        &SamplerInfo::new(id, row.base_model.clone())
            .model_path(row.model_path.clone())
            .tokenizer_id(tokenizer_id),
    )
}
