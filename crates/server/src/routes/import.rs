//! Import of PEFT adapters: the upload is written to a staging folder while it arrives, checked
//! against the base model, and published as two checkpoints of a new run.

use std::io;
use std::path::Path;
use std::sync::Arc;

use http::header::CONTENT_ENCODING;
use http::request::Parts;
use tinkex_engine::{LoraConfig, builtin};
use tinkex_files::{NotEnoughSpace, StagedFolder};
use tinkex_store::error::ServerError;
use tinkex_store::sealed;
use tinkex_store::store::{
    CheckpointRecord, LoraSettings, ModelRunRecord, Record, SharedWith, cost_of_records,
};
use tinkex_store::user::UserId;
use tinkex_store::weights::WeightsLocation;
use tinkex_weights::{
    AdapterConversion, AdapterFile, Error as FileError, GgufModel, ModelFolder, StoredAdapter,
    TensorFile,
};
use tinkex_wire::rest::{AdapterImported, ImportOptions};
use tinkex_wire::{CheckpointKind, ModelId, OptimizerConfig, TinkerPath};

use super::body::{announced_length, too_large};
use super::error::HttpError;
use super::upload::AdapterUpload;
use super::{Caller, IncomingBody, RouteResult, from_query, to_json};
use crate::admit::{check_stored_bytes, validate_name};
use crate::fault::engine_error;
use crate::models::{BaseModels, EngineModel};
use crate::state::ServerState;

/// Default name of the checkpoints.
const DEFAULT_NAME: &str = "imported";

/// Imports the adapter in the body of a request.
pub(super) async fn import(
    caller: Caller<'_>,
    parts: &Parts,
    body: &mut impl IncomingBody,
    id: &str,
) -> RouteResult {
    let state = caller.state;
    let options: ImportOptions = from_query(parts.uri.query().unwrap_or_default())?;
    let target = ImportTarget::new(&caller.principal.user, id, &options)?;
    if let Some(base_model) = &options.base_model {
        require_base_model(&state.models, base_model)?;
    }
    if parts.headers.contains_key(CONTENT_ENCODING) {
        return Err(HttpError::unsupported_encoding());
    }
    let limit = state.options.limits.import_bytes;
    let announced = announced_length(parts)?.map(|length| length as u64);
    if announced.is_some_and(|length| length > limit) {
        // Do not read the rest of the body, unlike below: its size has no limit.
        return Err(too_large(limit).into());
    }
    let mut upload = AdapterUpload::new(state, body);
    if let Some(imported) = target.existing(caller) {
        // This is a retry. Read the body: a client that is still sending would see a reset
        // connection instead of this response.
        while upload.fill().await? {}
        // `create` without records waits until the records of the first request are durable.
        return to_json(&state.store.create(|_| Ok((Vec::new(), imported))).await?);
    }
    let user = &caller.principal.user;
    let within_quota = check_stored_bytes(&state.store(), user, announced.unwrap_or(0));
    let accepted = match within_quota {
        Ok(()) => check_space(state, announced.unwrap_or(0)).await,
        spent => spent,
    };
    if let Err(error) = accepted {
        // Read the body: `drain` stops after 16 MiB, and a client that is still sending would see a
        // reset connection instead of this error.
        while upload.fill().await? {}
        return Err(error.into());
    }

    let name = target.folder();
    let (adapter, folder) = receive(state, &mut upload, name, options.base_model).await?;
    to_json(&target.publish(caller, &folder.name, adapter).await?)
}

/// Checks that an upload of `bytes` fits on the disk. The error is permanent, unlike the error of a
/// failed write: each retry would send the whole adapter again.
async fn check_space(state: &Arc<ServerState>, bytes: u64) -> Result<(), ServerError> {
    let disk = state.options.disk.clone();
    let folder = state.weights_dir.clone();
    let check = move || disk.check(folder, bytes);
    state.executor.run_job(check).await?.map_err(|shortage| no_space(&shortage))
}

/// Returns the error of an adapter that does not fit on the disk. The message does not contain the
/// server-side path.
fn no_space(shortage: &NotEnoughSpace) -> ServerError {
    let hint = "free space in the data folder of the server, or delete checkpoints";
    ServerError::TooLarge(format!(
        "cannot store the adapter on the server's disk: it {shortage}; {hint}"
    ))
}

/// Keeps the expiry task from removing a folder to which no record refers yet.
struct UnfinishedFolder {
    state: Arc<ServerState>,
    name: String,
}

impl UnfinishedFolder {
    fn new(state: &Arc<ServerState>, name: String) -> Self {
        state.store().unfinished_folders.insert(name.clone());
        Self { state: Arc::clone(state), name }
    }

    /// Adds the digest of the files to the name of the folder, which is complete.
    fn seal(self) -> io::Result<Self> {
        let path = self.state.weights_dir.join(&self.name);
        let mut sealed = None;
        sealed::seal(&path, |name| sealed = Some(Self::new(&self.state, name.to_owned())))?;
        Ok(sealed.unwrap_or(self))
    }
}

impl Drop for UnfinishedFolder {
    fn drop(&mut self) {
        self.state.store().unfinished_folders.remove(&self.name);
    }
}

/// Writes the upload to a staging folder, checks the adapter, and renames the folder to its final
/// name.
async fn receive(
    state: &Arc<ServerState>,
    upload: &mut AdapterUpload<'_, impl IncomingBody>,
    name: String,
    base_model: Option<String>,
) -> Result<(CheckedAdapter, UnfinishedFolder), HttpError> {
    let target = state.weights_dir.join(&name);
    let folder = UnfinishedFolder::new(state, name);
    let staged = StagedFolder::new(&target).map_err(|error| ServerError::write_failed(&error))?;
    upload.write_files(staged.path()).await?;
    let check_state = Arc::clone(state);
    let check = move || {
        let adapter = CheckedAdapter::read(&check_state, staged.path(), base_model)?;
        let sealed = staged.commit().and_then(|()| folder.seal());
        let folder = sealed.map_err(|error| ServerError::write_failed(&error))?;
        Ok::<_, ServerError>((adapter, folder))
    };
    // Pass the maximum size, so that the check always runs as a job: it reads the whole adapter.
    Ok(state.decode_jobs.run(usize::MAX, check).await?)
}

/// Run and name of the checkpoints that an import creates.
struct ImportTarget {
    run: ModelId,
    name: String,
}

impl ImportTarget {
    /// Returns the target of an import. Users choose the ids of their imports, so the id of the run
    /// of another user than the administrator has the name of the user: an import never finds the
    /// import of another user.
    fn new(user: &UserId, id: &str, options: &ImportOptions) -> Result<Self, ServerError> {
        let allowed = |c: u8| c.is_ascii_alphanumeric() || c == b'-';
        if id.len() > 64 || !id.bytes().all(allowed) {
            return Err(ServerError::invalid(
                "import_id: expected 1 to 64 letters, digits and dashes",
            ));
        }
        let name = options.name.clone().unwrap_or_else(|| DEFAULT_NAME.to_owned());
        validate_name(&name)?;
        let run = match user.is_administrator() {
            true => format!("import-{id}:train:0"),
            false => format!("import-{id}.{user}:train:0"),
        };
        Ok(Self { run: run.into(), name })
    }

    fn path(&self, kind: CheckpointKind) -> Result<TinkerPath, ServerError> {
        Ok(TinkerPath::new(self.run.clone(), kind, &*self.name)?)
    }

    /// Returns a new name for the folder of the adapter.
    fn folder(&self) -> String {
        let run = self.run.as_str().replace(':', "_");
        let unique = uuid::Uuid::new_v4().simple().to_string();
        format!("{run}-{}-{}", self.name, &unique[..8])
    }

    /// Returns the response of an earlier request with the same id.
    fn existing(&self, caller: Caller<'_>) -> Option<AdapterImported> {
        let store = caller.store();
        let path = self.path(CheckpointKind::Training).ok()?;
        let row = store.own_checkpoint(&path).ok()?.clone();
        self.response(&row).ok()
    }

    fn response(&self, row: &CheckpointRecord) -> Result<AdapterImported, ServerError> {
        let sampler = self.path(CheckpointKind::Sampler)?;
        Ok(AdapterImported::new(row.path.clone(), sampler)
            .adapter(&*row.base_model, row.lora.rank)
            .size_bytes(row.size_bytes))
    }

    /// Writes the records of the run and its checkpoints, and waits until they are durable.
    async fn publish(
        &self,
        caller: Caller<'_>,
        folder: &str,
        adapter: CheckedAdapter,
    ) -> Result<AdapterImported, ServerError> {
        let created_at = caller.state.clock.now();
        let run = ModelRunRecord {
            id: self.run.clone(),
            owner: caller.principal.user.clone(),
            session: "".into(),
            number: 0,
            base_model: adapter.base_model.clone(),
            lora: adapter.lora,
            optimizer: OptimizerConfig::default(),
            metadata_bytes: 0,
            name: None,
            created_at,
            closed: Some("it was imported; load it into a new model to train it".to_owned()),
            snapshot: None,
            last_seq: None,
            project_id: None,
            upstream: None,
            dropped_pass: None,
            shared_with: SharedWith::default(),
        };
        let checkpoint = |kind| {
            Ok::<_, ServerError>(CheckpointRecord {
                path: self.path(kind)?,
                weights: WeightsLocation::Local(folder.to_owned()),
                request: None,
                seq: None,
                created_at,
                expires_at: None,
                size_bytes: adapter.size_bytes,
                public: false,
                metadata_bytes: 0,
                base_model: adapter.base_model.clone(),
                lora: adapter.lora,
                optimizer: OptimizerConfig::default(),
            })
        };
        let weights = checkpoint(CheckpointKind::Training)?;
        let sampler = checkpoint(CheckpointKind::Sampler)?;
        let response = self.response(&weights)?;
        caller
            .change(|mut store| {
                // Another attempt of the same import may have ended while this attempt checked the
                // adapter.
                if let Ok(row) = store.own_checkpoint(&weights.path) {
                    return Ok((Vec::new(), self.response(row)?));
                }
                if store.all().runs.contains_key(&run.id) {
                    let message = format!("training run {} already exists", run.id);
                    return Err(ServerError::Conflict(message));
                }
                // Check again: other imports may have ended since this one began, and a client need
                // not announce the size.
                check_stored_bytes(store.all(), &run.owner, adapter.size_bytes)?;
                let records = vec![
                    Record::Run(run.clone()),
                    Record::Checkpoint(weights),
                    Record::Checkpoint(sampler),
                ];
                store.all_mut().reserve_records(&run.owner, cost_of_records(&records))?;
                Ok((records, response))
            })
            .await
    }
}

/// An adapter that fits its base model.
struct CheckedAdapter {
    base_model: String,
    lora: LoraSettings,
    size_bytes: u64,
}

impl CheckedAdapter {
    /// Checks the adapter in `folder` against its base model: `base_model`, or the model that the
    /// adapter's configuration names. Renames tensors that have the names of the hosted service;
    /// this needs disk space for a second copy of the tensors.
    fn read(
        state: &ServerState,
        folder: &Path,
        base_model: Option<String>,
    ) -> Result<Self, ServerError> {
        let adapter = StoredAdapter::open(folder).map_err(|error| file_error(&error))?;
        let pairs = adapter.read_pairs().map_err(|error| file_error(&error))?;
        let file = AdapterFile { config: adapter.config().clone(), pairs };
        let named = Some(file.config.base_model.clone()).filter(|name| !name.is_empty());
        let base_model = base_model.or(named).ok_or_else(|| {
            ServerError::invalid("adapter_config.json does not name the base model; pass its name")
        })?;
        let base = require_base_model(&state.models, &base_model)?;
        if adapter.has_frozen() {
            check_frozen(&adapter, &base).map_err(|error| file_error(&error))?;
        }
        let lora = LoraConfig::of_adapter(&base.config, file).map_err(engine_error)?;
        if let Some(conversion) =
            AdapterConversion::open(folder).map_err(|error| file_error(&error))?
            && conversion.is_needed(None)
        {
            let needed = conversion.space_needed().map_err(|error| file_error(&error))?;
            let fits = state.options.disk.check(folder, needed);
            fits.map_err(|shortage| no_space(&shortage))?;
            conversion.apply(None).map_err(|error| file_error(&error))?;
        }
        let size = |name: &str| Ok(std::fs::metadata(folder.join(name))?.len());
        let size_bytes = AdapterConversion::FILES.into_iter().map(size).sum::<io::Result<u64>>();
        let lora = LoraSettings {
            rank: u32::try_from(lora.rank).unwrap_or(u32::MAX),
            seed: lora.seed,
            train_unembed: lora.unembedding,
            train_mlp: lora.mlp,
            train_attn: lora.attention,
        };
        let size_bytes = size_bytes.map_err(|error| ServerError::read_failed(&error))?;
        Ok(Self { base_model, lora, size_bytes })
    }
}

/// Checks that the frozen weights in the file of an adapter equal the weights of its base model.
fn check_frozen(adapter: &StoredAdapter, base: &EngineModel) -> Result<(), FileError> {
    if base.built_in {
        let file = TensorFile::from_static(builtin::WEIGHTS, "model.safetensors")?;
        adapter.check_frozen(|name| file.tensor(name))
    } else if base.weights.is_file() {
        let model = GgufModel::open(&base.weights)?;
        adapter.check_frozen(|name| model.tensor(name))
    } else {
        let model = ModelFolder::open(&base.weights)?;
        adapter.check_frozen(|name| model.tensor(name))
    }
}

/// Returns a base model. The status of the error is not 404: clients interpret 404 as a server that
/// cannot import adapters.
fn require_base_model(models: &BaseModels, name: &str) -> Result<Arc<EngineModel>, ServerError> {
    let found = models.require_engine(name);
    found.map_err(|error| ServerError::invalid(error.to_string()))
}

/// Converts an error of reading the uploaded files. The message names the file without its folder,
/// the server-side path.
fn file_error(error: &FileError) -> ServerError {
    let name = |path: &Path| {
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    };
    match error {
        FileError::Io { source, .. } => ServerError::read_failed(source),
        FileError::BadFile { path, reason } => {
            ServerError::invalid(format!("{}: {reason}", name(path)))
        }
        FileError::MissingTensor { path, name: tensor } => {
            ServerError::invalid(format!("{}: tensor {tensor} is missing", name(path)))
        }
        _ => ServerError::invalid(error.to_string()),
    }
}
