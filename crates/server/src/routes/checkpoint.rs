//! Checkpoints: looking at them, and what can be done to them without a model.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tinkex_wire::codec::json;
use tinkex_wire::rest::{
    CheckpointPage, CheckpointTtl, Cursor, ExternalWeightsUrls, ListUserCheckpoints,
};
use tinkex_wire::{
    CheckpointKind, CopyWeights, ModelId, TinkerPath, WeightsCopied, WeightsInfo,
    WeightsInfoRequest,
};

use super::session::page;
use super::{FILES, Reply, done, from_query, to_json};
use crate::admit::check_ttl;
use crate::commit;
use crate::error::ApiError;
use crate::state::{Download, Shared};
use crate::store::{Checkpoint, Fact, Run, Store, now, timestamp};

/// How long a download may be begun.
const DOWNLOAD: Duration = Duration::from_secs(3_600);
/// Such URLs at a time; the oldest end before their hour.
const MOST_DOWNLOADS: usize = 10_000;

pub(super) fn of_run(shared: &Shared, run: &str) -> Reply {
    let run = ModelId::from(run);
    let store = shared.store();
    if !store.runs.contains_key(&run) {
        return Err(ApiError::not_found(format!("there is no training run {run}")));
    }
    let checkpoints = store.checkpoints_of(&run).into_iter().map(Checkpoint::shown).collect();
    to_json(&CheckpointPage::new(checkpoints, None))
}

pub(super) fn list(shared: &Shared, query: &str) -> Reply {
    let call: ListUserCheckpoints = from_query(query)?;
    let store = shared.store();
    let mut all: Vec<&Checkpoint> =
        store.checkpoints.values().map(|kept| &kept.row).filter(|row| !row.is_expired()).collect();
    all.sort_by_key(|row| std::cmp::Reverse(row.created_at));
    let total_count = u64::try_from(all.len()).unwrap_or(u64::MAX);
    let cursor = Some(Cursor { offset: call.offset, limit: call.limit, total_count });
    let checkpoints = page(all, call.offset, call.limit).map(Checkpoint::shown).collect();
    to_json(&CheckpointPage::new(checkpoints, cursor))
}

fn find(store: &Store, path: &TinkerPath) -> Result<Checkpoint, ApiError> {
    let kept = store.checkpoint(path);
    let kept = kept.ok_or_else(|| ApiError::not_found(format!("there is no checkpoint {path}")))?;
    Ok(kept.row.clone())
}

fn address(run: &str, kind: &str, name: &str) -> Result<TinkerPath, ApiError> {
    let Some(kind) = CheckpointKind::from_segment(kind) else {
        return Err(ApiError::bad(format!(
            "{kind:?} is not one of weights, sampler_weights and external_weights"
        )));
    };
    Ok(TinkerPath::new(run, kind, name)?)
}

pub(super) fn info(shared: &Shared, body: &Bytes) -> Reply {
    let call: WeightsInfoRequest = json::decode(body)?;
    let row = find(&shared.store(), &call.tinker_path.parse()?)?;
    to_json(&WeightsInfo {
        base_model: row.base_model,
        optimizer_config: row.optimizer,
        is_lora: true,
        lora_rank: Some(row.lora.rank),
        train_unembed: Some(row.lora.train_unembed),
        train_mlp: Some(row.lora.train_mlp),
        train_attn: Some(row.lora.train_attn),
    })
}

pub(super) async fn delete(shared: &Arc<Shared>, run: &str, kind: &str, name: &str) -> Reply {
    let path = address(run, kind, name)?;
    commit::change(shared, |store| {
        find(store, &path)?;
        Ok((vec![Fact::Gone { path }], ()))
    })
    .await?;
    done()
}

pub(super) async fn publish(
    shared: &Arc<Shared>,
    run: &str,
    kind: &str,
    name: &str,
    public: bool,
) -> Reply {
    let path = address(run, kind, name)?;
    change(shared, &path, |row| {
        if row.public == public {
            let state = if public { "public" } else { "private" };
            return Err(ApiError::bad(format!("{path} is {state} already")));
        }
        row.public = public;
        Ok(())
    })
    .await
}

pub(super) async fn set_ttl(
    shared: &Arc<Shared>,
    run: &str,
    kind: &str,
    name: &str,
    body: &Bytes,
) -> Reply {
    let call: CheckpointTtl = json::decode(body)?;
    check_ttl(call.ttl_seconds)?;
    let path = address(run, kind, name)?;
    change(shared, &path, |row| {
        row.expires_at = call.ttl_seconds.map(until);
        Ok(())
    })
    .await
}

/// So many seconds from now.
fn until(seconds: u64) -> i64 {
    now().saturating_add(i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1_000_000))
}

async fn change(
    shared: &Arc<Shared>,
    path: &TinkerPath,
    edit: impl FnOnce(&mut Checkpoint) -> Result<(), ApiError>,
) -> Reply {
    commit::change(shared, |store| {
        let mut row = find(store, path)?;
        edit(&mut row)?;
        Ok((vec![Fact::Checkpoint(row)], ()))
    })
    .await?;
    done()
}

/// A copy is a run of its own that cannot be trained; it shares the files.
pub(super) async fn copy(shared: &Arc<Shared>, body: &Bytes) -> Reply {
    let call: CopyWeights = json::decode(body)?;
    check_ttl(call.ttl_seconds)?;
    let source: TinkerPath = call.source_path.parse()?;
    if source.kind() == CheckpointKind::External {
        return Err(ApiError::bad(format!("source_path: {source} was saved for download")));
    }
    let path = commit::change(shared, |store| {
        let row = find(store, &source)?;
        let (id, session) =
            match (&call.session_id, call.model_seq_id, &call.destination_project_id) {
                (Some(session), Some(n), _) => {
                    if store.open_session(session).is_none() {
                        return Err(ApiError::not_found(format!(
                            "there is no open session {session}"
                        )));
                    }
                    (ModelId::in_session(session, n), session.clone())
                }
                (_, _, Some(_)) => {
                    (format!("copy-{}:train:0", uuid::Uuid::new_v4()).into(), "".into())
                }
                _ => {
                    let why = "give a destination_project_id, or a session_id and model_seq_id";
                    return Err(ApiError::bad(why));
                }
            };
        if store.runs.contains_key(&id) {
            return Err(ApiError::bad(format!("{id} exists already")));
        }
        let run = Run {
            id: id.clone(),
            session,
            number: call.model_seq_id.unwrap_or_default(),
            base_model: row.base_model.clone(),
            lora: row.lora,
            optimizer: row.optimizer.clone(),
            user_metadata: None,
            created_at: now(),
            closed: Some(
                "it is a copy of a checkpoint; load it into a model of your own".to_owned(),
            ),
            snapshot: None,
            last_seq: None,
            project_id: Some(call.destination_project_id.unwrap_or_else(|| "default".to_owned())),
        };
        let path = TinkerPath::new(id, source.kind(), source.name())?;
        let expires_at = call.ttl_seconds.map(until);
        let copy = Checkpoint {
            path: path.clone(),
            request: None,
            seq: None,
            created_at: now(),
            expires_at,
            public: false,
            ..row
        };
        Ok((vec![Fact::Run(run), Fact::Checkpoint(copy)], path))
    })
    .await?;
    to_json(&WeightsCopied { tinker_path: path.to_string() })
}

/// Where the files of a checkpoint can be fetched, for a while and without a key.
pub(super) fn urls(
    shared: &Shared,
    run: &str,
    kind: &str,
    name: &str,
    host: Option<&str>,
) -> Reply {
    let path = address(run, kind, name)?;
    if path.kind() != CheckpointKind::External {
        return Err(ApiError::bad(format!("{path} was not saved for download")));
    }
    let row = find(&shared.store(), &path)?;
    let folder = shared.folders.join(&row.folder);
    let entries = std::fs::read_dir(&folder).map_err(|why| ApiError::disk(&why))?;
    let token = uuid::Uuid::new_v4().simple().to_string();
    let host = host.unwrap_or("127.0.0.1");
    let urls: BTreeMap<String, String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .map(|file| {
            let url = format!("http://{host}{FILES}{token}/{file}");
            (file, url)
        })
        .collect();
    let download = Download { folder: row.folder, until: Instant::now() + DOWNLOAD };
    let mut downloads = shared.downloads();
    while downloads.len() >= MOST_DOWNLOADS {
        // Whoever asks for so many has the newest.
        let oldest = downloads.iter().min_by_key(|(_, download)| download.until);
        let Some(oldest) = oldest.map(|(token, _)| token.clone()) else { break };
        downloads.remove(&oldest);
    }
    downloads.insert(token, download);
    drop(downloads);
    let expires = timestamp(until(DOWNLOAD.as_secs()));
    to_json(&ExternalWeightsUrls::new(urls, expires))
}
