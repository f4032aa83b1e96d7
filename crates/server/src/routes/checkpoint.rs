//! Checkpoints: listing, metadata, deletion, publication, copies and downloads.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use tinkex_backend::upstream::{UpstreamJob, WeightsDownload};
use tinkex_store::clock::timestamp;
use tinkex_store::error::{ServerError, with_causes};
use tinkex_store::sealed;
use tinkex_store::store::{
    AuditEvent, CheckpointRecord, ModelRunRecord, Record, SharedWith, cost_of_records,
};
use tinkex_store::weights::{RemoteWeights, WeightsLocation};
use tinkex_weights::{AdapterConversion, Error as FileError};
use tinkex_wire::codec::json;
use tinkex_wire::rest::{
    Checkpoint, CheckpointPage, CheckpointTtl, Cursor, ExternalWeightsUrls, ListUserCheckpoints,
};
use tinkex_wire::{
    CheckpointKind, CopyWeights, LoraConfig, ModelId, TinkerPath, WeightsCopied, WeightsInfo,
    WeightsInfoRequest,
};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::error::HttpError;
use super::metadata::{MetadataOf, ReadMetadata};
use super::session::{page, validate_label};
use super::{Caller, FILES, RouteResult, empty, from_query, to_json};
use crate::admit::{check_stored_bytes, validate_ttl};
use crate::downloads::DownloadGrant;
use crate::state::ServerState;

/// Time for which a download URL is valid.
const DOWNLOAD_TTL: Duration = Duration::from_secs(3_600);

pub(super) async fn list_of_run(caller: Caller<'_>, run: &str) -> RouteResult {
    let run = ModelId::from(run);
    let listed = {
        let store = caller.store();
        store.run(&run)?;
        ListedCheckpoints::new(store.all().checkpoints_of(&run).into_iter())
    };
    listed.respond(caller.state, None).await
}

/// Checkpoints of a response, without their metadata.
struct ListedCheckpoints {
    checkpoints: Vec<Checkpoint>,
    metadata: Vec<MetadataOf>,
}

impl ListedCheckpoints {
    fn new<'a>(rows: impl Iterator<Item = &'a CheckpointRecord>) -> Self {
        let described =
            rows.map(|row| (row.to_wire(), MetadataOf::new(&row.path, row.metadata_bytes)));
        let (checkpoints, metadata) = described.unzip();
        Self { checkpoints, metadata }
    }

    /// Reads the metadata and responds.
    async fn respond(self, state: &Arc<ServerState>, cursor: Option<Cursor>) -> RouteResult {
        let mut metadata = ReadMetadata::read(state, self.metadata).await?;
        let mut checkpoints = self.checkpoints;
        checkpoints.iter_mut().for_each(|checkpoint| metadata.add_to_checkpoint(checkpoint));
        metadata.respond(&CheckpointPage::new(checkpoints, cursor))
    }
}

/// Lists the checkpoints of the user's own runs.
pub(super) async fn list(caller: Caller<'_>, query: &str) -> RouteResult {
    let request: ListUserCheckpoints = from_query(query)?;
    let (listed, cursor) = list_page(caller, &request);
    listed.respond(caller.state, Some(cursor)).await
}

fn list_page(caller: Caller<'_>, request: &ListUserCheckpoints) -> (ListedCheckpoints, Cursor) {
    let store = caller.store();
    let now = caller.state.clock.now();
    let mut all: Vec<&CheckpointRecord> = store
        .checkpoints()
        .filter(|row| store.own_run(row.path.run()).is_ok() && !row.is_expired(now))
        .collect();
    all.sort_by_key(|row| std::cmp::Reverse(row.created_at));
    let total_count = u64::try_from(all.len()).unwrap_or(u64::MAX);
    let cursor = Cursor::new(request.offset, request.limit, total_count);
    (ListedCheckpoints::new(page(all, request.offset, request.limit)), cursor)
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

pub(super) fn info(caller: Caller<'_>, body: &Bytes) -> RouteResult {
    let request: WeightsInfoRequest = json::decode(body)?;
    let row = caller.store().checkpoint(&request.tinker_path.parse()?)?.clone();
    let lora = LoraConfig::with_rank(row.lora.rank)
        .train_unembed(row.lora.train_unembed)
        .train_mlp(row.lora.train_mlp)
        .train_attn(row.lora.train_attn);
    to_json(&WeightsInfo::new(row.base_model, row.optimizer).lora(lora))
}

pub(super) async fn delete(caller: Caller<'_>, run: &str, kind: &str, name: &str) -> RouteResult {
    let path = path_of(run, kind, name)?;
    let state = caller.state;
    let weights = caller
        .change(|store| {
            let row = match store.own_checkpoint(&path) {
                Ok(row) => row.clone(),
                // The request may be a retry whose first response was lost.
                Err(_)
                    if store.all().deleted_checkpoints.contains_key(&path)
                        && store.own_run(path.run()).is_ok() =>
                {
                    return Ok((Vec::new(), None));
                }
                Err(missing) => return Err(missing),
            };
            let audit = store.audit(AuditEvent::of_checkpoint("checkpoint.delete", &path));
            let deleted = Record::CheckpointDeleted { path, at: store.all().clock.now() };
            Ok((vec![deleted, audit], Some(row.weights)))
        })
        .await?;
    let is_unused = |weights: &WeightsLocation| !state.store().weights_in_use().contains(weights);
    if let Some(weights) = weights.filter(is_unused) {
        state.backends.discard(weights);
    }
    empty()
}

pub(super) async fn set_public(
    caller: Caller<'_>,
    run: &str,
    kind: &str,
    name: &str,
    public: bool,
) -> RouteResult {
    let path = path_of(run, kind, name)?;
    // A checkpoint that already has the visibility is a success: the request may be a retry whose
    // first response was lost.
    let event = if public { "checkpoint.publish" } else { "checkpoint.unpublish" };
    update(caller, &path, event, |row| row.public = public).await
}

pub(super) async fn set_ttl(
    caller: Caller<'_>,
    run: &str,
    kind: &str,
    name: &str,
    body: &Bytes,
) -> RouteResult {
    let request: CheckpointTtl = json::decode(body)?;
    validate_ttl(request.ttl_seconds)?;
    let path = path_of(run, kind, name)?;
    let expires_at = request.ttl_seconds.map(|ttl| caller.state.clock.in_seconds(ttl));
    update(caller, &path, "checkpoint.ttl", |row| row.expires_at = expires_at).await
}

/// Applies `edit` to a checkpoint and waits until the change is durable.
async fn update(
    caller: Caller<'_>,
    path: &TinkerPath,
    event: &'static str,
    edit: impl FnOnce(&mut CheckpointRecord),
) -> RouteResult {
    caller
        .change(|store| {
            let mut row = store.own_checkpoint(path)?.clone();
            edit(&mut row);
            let audit = store.audit(AuditEvent::of_checkpoint(event, path));
            Ok((vec![Record::Checkpoint(row), audit], ()))
        })
        .await?;
    empty()
}

/// Copies a checkpoint into a new run that cannot be trained. The copy shares the files.
///
/// A request with the same idempotency key, or for the same new run, is a retry and returns the
/// existing copy.
pub(super) async fn copy(
    caller: Caller<'_>,
    body: &Bytes,
    idempotency_key: Option<&str>,
) -> RouteResult {
    let request: CopyWeights = json::decode(body)?;
    validate_ttl(request.ttl_seconds)?;
    validate_label("destination_project_id", request.destination_project_id.as_deref())?;
    let source: TinkerPath = request.source_path.parse()?;
    if source.kind() == CheckpointKind::External {
        let message = format!("source_path: {source} was saved for download and cannot be copied");
        return Err(ServerError::invalid(message).into());
    }
    let path = caller
        .change(|mut store| {
            let row = store.checkpoint(&source)?.clone();
            check_stored_bytes(store.all(), &caller.principal.user, 0)?;
            let destination =
                (&request.session_id, request.model_seq_id, &request.destination_project_id);
            let (id, session) = match destination {
                (Some(session), Some(n), _) => {
                    if store.open_session(session).is_err() {
                        return Err(ServerError::not_found(format!(
                            "session {session} does not exist or has ended"
                        )));
                    }
                    (ModelId::in_session(session, n), session.clone())
                }
                (_, _, Some(_)) => {
                    (format!("copy-{}:train:0", copy_id(caller, idempotency_key)).into(), "".into())
                }
                _ => {
                    return Err(ServerError::invalid(
                        "expected destination_project_id, or session_id and model_seq_id",
                    ));
                }
            };
            let path = TinkerPath::new(id.clone(), source.kind(), source.name())?;
            if store.all().runs.contains_key(&id) {
                return match store.own_checkpoint(&path) {
                    Ok(existing) if existing.weights == row.weights => Ok((Vec::new(), path)),
                    _ => Err(ServerError::Conflict(format!("training run {id} already exists"))),
                };
            }
            let run = ModelRunRecord {
                id,
                owner: caller.principal.user.clone(),
                session,
                number: request.model_seq_id.unwrap_or_default(),
                base_model: row.base_model.clone(),
                lora: row.lora,
                optimizer: row.optimizer.clone(),
                metadata_bytes: 0,
                name: None,
                created_at: store.all().clock.now(),
                closed: Some(
                    "it is a copy of a checkpoint; load it into a new model to train it".to_owned(),
                ),
                snapshot: None,
                last_seq: None,
                project_id: Some(
                    request.destination_project_id.unwrap_or_else(|| "default".to_owned()),
                ),
                upstream: None,
                dropped_pass: None,
                shared_with: SharedWith::default(),
            };
            let copy = CheckpointRecord {
                path: path.clone(),
                request: None,
                seq: None,
                created_at: store.all().clock.now(),
                expires_at: request.ttl_seconds.map(|ttl| store.all().clock.in_seconds(ttl)),
                public: false,
                ..row
            };
            let owner = run.owner.clone();
            let copied = Record::MetadataCopied { from: source.clone(), to: path.clone() };
            let mut records = vec![Record::Run(run), Record::Checkpoint(copy), copied];
            store.all_mut().reserve_records(&owner, cost_of_records(&records))?;
            let event = AuditEvent::of_checkpoint("checkpoint.copy", &path);
            records.push(store.audit(event.detail("source", source.to_string())));
            Ok((records, path))
        })
        .await?;
    to_json(&WeightsCopied::new(path.to_string()))
}

/// Returns the unique part of the id of a copy: derived from the idempotency key, so that a retry
/// finds the copy that the first attempt made, also after a restart.
fn copy_id(caller: Caller<'_>, idempotency_key: Option<&str>) -> uuid::Uuid {
    let user = &caller.principal.user;
    match idempotency_key {
        Some(key) => {
            // Users choose their idempotency keys, so two users may choose the same key.
            let digest = Sha256::new().chain_update(key);
            let digest = match user.is_administrator() {
                true => digest.finalize(),
                false => digest.chain_update([0]).chain_update(user.as_str()).finalize(),
            };
            let mut bytes = [0; 16];
            bytes.copy_from_slice(&digest[..16]);
            uuid::Builder::from_custom_bytes(bytes).into_uuid()
        }
        None => caller.state.random.uuid(),
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
    let check = move || {
        sealed::verify(&folder).map_err(FileError::io("read", &folder))?;
        match AdapterConversion::open(&folder)? {
            Some(conversion) => convert(conversion),
            None => Ok(()),
        }
    };
    let checked = state.executor.run_job(check).await?;
    checked.map_err(|error| {
        ServerError::Internal(format!("cannot download {path}: {}", with_causes(&error)))
    })
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

/// Returns URLs of the checkpoint's files that are valid for a limited time without an API key. They
/// start with `base`, the URL of the server.
pub(super) async fn download_urls(
    caller: Caller<'_>,
    run: &str,
    kind: &str,
    name: &str,
    base: &str,
) -> RouteResult {
    let state = caller.state;
    let path = path_of(run, kind, name)?;
    if path.kind() == CheckpointKind::Training {
        let message = format!("checkpoint {path} was not saved for download");
        return Err(ServerError::invalid(message).into());
    }
    let row = caller.store().checkpoint(&path)?.clone();
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
    let urls: BTreeMap<String, String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        // Files that are being written have temporary names.
        .filter(|file| !file.starts_with('.'))
        .map(|file| {
            let url = format!("{base}{FILES}{token}/{file}");
            (file, url)
        })
        .collect();
    let key = caller.state.keyring.find_id(&caller.principal.key);
    let key = key.ok_or_else(HttpError::unauthorized)?;
    let expires = Instant::now() + DOWNLOAD_TTL;
    let grant = DownloadGrant { folder: files.keep(), expires, key };
    {
        let mut store = caller.store();
        let audit = store.audit(AuditEvent::of_checkpoint("checkpoint.export", &path));
        // Not confirmed: checkpoints can be downloaded while the disk is full.
        store.all_mut().put_unconfirmed(audit);
    }
    for folder in state.downloads.insert(token, grant) {
        state.store().unfinished_folders.remove(&folder);
    }
    let expires = timestamp(state.clock.in_seconds(DOWNLOAD_TTL.as_secs()));
    to_json(&ExternalWeightsUrls::new(urls, expires))
}
