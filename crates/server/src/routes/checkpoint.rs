//! Checkpoints: listing, metadata, deletion, publication, copies and downloads.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use tinkex_backend::upstream::{UpstreamJob, WeightsDownload};
use tinkex_store::clock::timestamp;
use tinkex_store::error::ServerError;
use tinkex_store::store::{CheckpointRecord, ModelRunRecord, Record, Store};
use tinkex_store::weights::{RemoteWeights, WeightsLocation};
use tinkex_weights::{AdapterConversion, Error as FileError};
use tinkex_wire::codec::json;
use tinkex_wire::rest::{
    CheckpointPage, CheckpointTtl, Cursor, ExternalWeightsUrls, ListUserCheckpoints,
};
use tinkex_wire::{
    CheckpointKind, CopyWeights, LoraConfig, ModelId, TinkerPath, WeightsCopied, WeightsInfo,
    WeightsInfoRequest,
};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::session::page;
use super::{FILES, RouteResult, empty, from_query, to_json};
use crate::admit::validate_ttl;
use crate::downloads::DownloadGrant;
use crate::state::ServerState;

/// Time for which a download URL is valid.
const DOWNLOAD_TTL: Duration = Duration::from_secs(3_600);

pub(super) fn list_of_run(state: &ServerState, run: &str) -> RouteResult {
    let run = ModelId::from(run);
    let store = state.store();
    if !store.runs.contains_key(&run) {
        return Err(super::run::no_run(&run).into());
    }
    let checkpoints =
        store.checkpoints_of(&run).into_iter().map(CheckpointRecord::to_wire).collect();
    to_json(&CheckpointPage::new(checkpoints, None))
}

pub(super) fn list(state: &ServerState, query: &str) -> RouteResult {
    let request: ListUserCheckpoints = from_query(query)?;
    let store = state.store();
    let now = state.clock.now();
    let mut all: Vec<&CheckpointRecord> = store
        .checkpoints
        .values()
        .map(|entry| &entry.row)
        .filter(|row| !row.is_expired(now))
        .collect();
    all.sort_by_key(|row| std::cmp::Reverse(row.created_at));
    let total_count = u64::try_from(all.len()).unwrap_or(u64::MAX);
    let cursor = Some(Cursor::new(request.offset, request.limit, total_count));
    let checkpoints =
        page(all, request.offset, request.limit).map(CheckpointRecord::to_wire).collect();
    to_json(&CheckpointPage::new(checkpoints, cursor))
}

/// Returns a checkpoint that exists and has not expired.
pub(super) fn find(store: &Store, path: &TinkerPath) -> Result<CheckpointRecord, ServerError> {
    let entry = store.checkpoint(path).ok_or_else(|| ServerError::no_checkpoint(path))?;
    Ok(entry.row.clone())
}

fn path_of(run: &str, kind: &str, name: &str) -> Result<TinkerPath, ServerError> {
    let Some(kind) = CheckpointKind::from_segment(kind) else {
        return Err(ServerError::invalid(format!(
            "unknown checkpoint type {kind:?}; expected weights, sampler_weights or \
             external_weights"
        )));
    };
    Ok(TinkerPath::new(run, kind, name)?)
}

pub(super) fn info(state: &ServerState, body: &Bytes) -> RouteResult {
    let request: WeightsInfoRequest = json::decode(body)?;
    let row = find(&state.store(), &request.tinker_path.parse()?)?;
    let lora = LoraConfig::with_rank(row.lora.rank)
        .train_unembed(row.lora.train_unembed)
        .train_mlp(row.lora.train_mlp)
        .train_attn(row.lora.train_attn);
    to_json(&WeightsInfo::new(row.base_model, row.optimizer).lora(lora))
}

pub(super) async fn delete(
    state: &Arc<ServerState>,
    run: &str,
    kind: &str,
    name: &str,
) -> RouteResult {
    let path = path_of(run, kind, name)?;
    let weights = state
        .store
        .change(|store| {
            let row = match find(store, &path) {
                Ok(row) => row,
                // The request may be a retry whose first response was lost.
                Err(_) if store.deleted_checkpoints.contains_key(&path) => {
                    return Ok((Vec::new(), None));
                }
                Err(missing) => return Err(missing),
            };
            let deleted = Record::CheckpointDeleted { path, at: store.clock.now() };
            Ok((vec![deleted], Some(row.weights)))
        })
        .await?;
    let is_unused = |weights: &WeightsLocation| !state.store().weights_in_use().contains(weights);
    if let Some(weights) = weights.filter(is_unused) {
        state.backends.discard(weights);
    }
    empty()
}

pub(super) async fn set_public(
    state: &Arc<ServerState>,
    run: &str,
    kind: &str,
    name: &str,
    public: bool,
) -> RouteResult {
    let path = path_of(run, kind, name)?;
    // A checkpoint that already has the visibility is a success: the request may be a retry whose
    // first response was lost.
    update(state, &path, |row| row.public = public).await
}

pub(super) async fn set_ttl(
    state: &Arc<ServerState>,
    run: &str,
    kind: &str,
    name: &str,
    body: &Bytes,
) -> RouteResult {
    let request: CheckpointTtl = json::decode(body)?;
    validate_ttl(request.ttl_seconds)?;
    let path = path_of(run, kind, name)?;
    let expires_at = request.ttl_seconds.map(|ttl| state.clock.in_seconds(ttl));
    update(state, &path, |row| row.expires_at = expires_at).await
}

/// Applies `edit` to a checkpoint and waits until the change is durable.
async fn update(
    state: &Arc<ServerState>,
    path: &TinkerPath,
    edit: impl FnOnce(&mut CheckpointRecord),
) -> RouteResult {
    state
        .store
        .change(|store| {
            let mut row = find(store, path)?;
            edit(&mut row);
            Ok((vec![Record::Checkpoint(row)], ()))
        })
        .await?;
    empty()
}

/// Copies a checkpoint into a new run that cannot be trained. The copy shares the files.
///
/// A request with the same idempotency key, or for the same new run, is a retry and returns the
/// existing copy.
pub(super) async fn copy(
    state: &Arc<ServerState>,
    body: &Bytes,
    idempotency_key: Option<&str>,
) -> RouteResult {
    let request: CopyWeights = json::decode(body)?;
    validate_ttl(request.ttl_seconds)?;
    let source: TinkerPath = request.source_path.parse()?;
    if source.kind() == CheckpointKind::External {
        let message = format!("source_path: {source} was saved for download and cannot be copied");
        return Err(ServerError::invalid(message).into());
    }
    let path = state
        .store
        .change(|store| {
            let row = find(store, &source)?;
            let destination =
                (&request.session_id, request.model_seq_id, &request.destination_project_id);
            let (id, session) = match destination {
                (Some(session), Some(n), _) => {
                    if store.open_session(session).is_none() {
                        return Err(ServerError::not_found(format!(
                            "session {session} does not exist or has ended"
                        )));
                    }
                    (ModelId::in_session(session, n), session.clone())
                }
                (_, _, Some(_)) => {
                    (format!("copy-{}:train:0", copy_id(state, idempotency_key)).into(), "".into())
                }
                _ => {
                    return Err(ServerError::invalid(
                        "expected destination_project_id, or session_id and model_seq_id",
                    ));
                }
            };
            let path = TinkerPath::new(id.clone(), source.kind(), source.name())?;
            if store.runs.contains_key(&id) {
                return match store.checkpoint(&path) {
                    Some(existing) if existing.row.weights == row.weights => Ok((Vec::new(), path)),
                    _ => Err(ServerError::Conflict(format!("training run {id} already exists"))),
                };
            }
            let run = ModelRunRecord {
                id,
                session,
                number: request.model_seq_id.unwrap_or_default(),
                base_model: row.base_model.clone(),
                lora: row.lora,
                optimizer: row.optimizer.clone(),
                user_metadata: None,
                created_at: store.clock.now(),
                closed: Some(
                    "it is a copy of a checkpoint; load it into a new model to train it".to_owned(),
                ),
                snapshot: None,
                last_seq: None,
                project_id: Some(
                    request.destination_project_id.unwrap_or_else(|| "default".to_owned()),
                ),
                upstream: None,
            };
            let copy = CheckpointRecord {
                path: path.clone(),
                request: None,
                seq: None,
                created_at: store.clock.now(),
                expires_at: request.ttl_seconds.map(|ttl| store.clock.in_seconds(ttl)),
                public: false,
                ..row
            };
            Ok((vec![Record::Run(run), Record::Checkpoint(copy)], path))
        })
        .await?;
    to_json(&WeightsCopied::new(path.to_string()))
}

/// Returns the unique part of the id of a copy: derived from the idempotency key, so that a retry
/// finds the copy that the first attempt made, also after a restart.
fn copy_id(state: &ServerState, idempotency_key: Option<&str>) -> uuid::Uuid {
    match idempotency_key {
        Some(key) => {
            let digest = Sha256::digest(key);
            let mut bytes = [0; 16];
            bytes.copy_from_slice(&digest[..16]);
            uuid::Builder::from_custom_bytes(bytes).into_uuid()
        }
        None => state.random.uuid(),
    }
}

/// Copy of weights from an upstream in a folder under `weights/`. The expiry task removes the
/// folder after the value is dropped, unless [`keep`](Self::keep) was called.
struct WeightsCopy<'a> {
    state: &'a ServerState,
    folder: String,
}

impl WeightsCopy<'_> {
    /// Keeps the folder, because a [`DownloadGrant`] will refer to it. Returns the name of the
    /// folder.
    fn keep(mut self) -> String {
        std::mem::take(&mut self.folder)
    }
}

impl Drop for WeightsCopy<'_> {
    fn drop(&mut self) {
        self.state.store().unfinished_folders.remove(&self.folder);
    }
}

/// Checks that the files of an adapter can be read, and calls `convert`.
async fn check_adapter(
    state: &ServerState,
    path: &TinkerPath,
    folder: PathBuf,
    convert: fn(AdapterConversion) -> Result<(), FileError>,
) -> Result<(), ServerError> {
    let check = move || match AdapterConversion::open(&folder)? {
        Some(conversion) => convert(conversion),
        None => Ok(()),
    };
    let checked = state.executor.run_job(check).await?;
    checked.map_err(|error| ServerError::Internal(format!("cannot download {path}: {error}")))
}

/// Renames the tensors of an adapter from a server that uses the names of the hosted service, which
/// `peft` does not read.
fn convert_service_names(conversion: AdapterConversion) -> Result<(), FileError> {
    if conversion.is_needed(None) { conversion.apply(None) } else { Ok(()) }
}

/// Folder with the files of a checkpoint.
enum DownloadFiles<'a> {
    /// The folder of the checkpoint.
    Own(String),
    /// A copy of weights that are on an upstream.
    Copied(WeightsCopy<'a>),
}

impl DownloadFiles<'_> {
    /// Returns the name of the folder under `weights/`.
    fn folder(&self) -> &str {
        match self {
            Self::Own(folder) => folder,
            Self::Copied(copy) => &copy.folder,
        }
    }

    /// Keeps the folder of a copy, because a [`DownloadGrant`] will refer to it. Returns the name
    /// of the folder.
    fn keep(self) -> String {
        match self {
            Self::Own(folder) => folder,
            Self::Copied(copy) => copy.keep(),
        }
    }
}

/// Copies the files of a checkpoint that is on an upstream into a folder.
async fn copy_from_upstream<'a>(
    state: &'a ServerState,
    row: &CheckpointRecord,
    RemoteWeights { upstream, path }: &RemoteWeights,
) -> Result<WeightsCopy<'a>, ServerError> {
    let unavailable = |reason: String| {
        let message = format!("cannot copy {} from upstream {upstream}: {reason}", row.path);
        ServerError::Unavailable(message)
    };
    let entry = state.backends.upstream(upstream);
    let entry = entry.ok_or_else(|| unavailable("it is not configured".to_owned()))?;
    let folder = format!("download-{}", state.random.id());
    state.store().unfinished_folders.insert(folder.clone());
    let copy = WeightsCopy { state, folder };
    let (done, copied) = oneshot::channel();
    entry.add_job(UpstreamJob::Download(WeightsDownload {
        base_model: row.base_model.clone(),
        path: path.clone(),
        folder: state.weights_dir.join(&copy.folder),
        done,
    }));
    let copied = copied.await.unwrap_or_else(|_| Err("the server is shutting down".to_owned()));
    copied.map_err(unavailable)?;
    Ok(copy)
}

/// Returns URLs of the checkpoint's files that are valid for a limited time without an API key.
pub(super) async fn download_urls(
    state: &ServerState,
    run: &str,
    kind: &str,
    name: &str,
    host: Option<&str>,
) -> RouteResult {
    let path = path_of(run, kind, name)?;
    if path.kind() == CheckpointKind::Training {
        let message = format!("checkpoint {path} was not saved for download");
        return Err(ServerError::invalid(message).into());
    }
    let row = find(&state.store(), &path)?;
    let files = match &row.weights {
        WeightsLocation::Local(folder) => {
            check_adapter(state, &path, state.weights_dir.join(folder), |_| Ok(())).await?;
            DownloadFiles::Own(folder.clone())
        }
        WeightsLocation::Upstream(remote) => {
            let copy = copy_from_upstream(state, &row, remote).await?;
            let folder = state.weights_dir.join(&copy.folder);
            check_adapter(state, &path, folder, convert_service_names).await?;
            DownloadFiles::Copied(copy)
        }
    };
    let folder = state.weights_dir.join(files.folder());
    let entries = std::fs::read_dir(&folder).map_err(|error| ServerError::read_failed(&error))?;
    let token = state.random.id();
    let host = host.unwrap_or("127.0.0.1");
    let urls: BTreeMap<String, String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        // Files that are being written have temporary names.
        .filter(|file| !file.starts_with('.'))
        .map(|file| {
            let url = format!("http://{host}{FILES}{token}/{file}");
            (file, url)
        })
        .collect();
    let grant = DownloadGrant { folder: files.keep(), expires: Instant::now() + DOWNLOAD_TTL };
    for folder in state.downloads.insert(token, grant) {
        state.store().unfinished_folders.remove(&folder);
    }
    let expires = timestamp(state.clock.in_seconds(DOWNLOAD_TTL.as_secs()));
    to_json(&ExternalWeightsUrls::new(urls, expires))
}
