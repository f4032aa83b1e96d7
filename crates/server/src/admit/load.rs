//! Admission of requests that load weights.
//!
//! A request loads a training checkpoint into an existing model, as the first request after the
//! model's creation, or it creates a model from the checkpoint. New requests and requests that are
//! restored after a restart become operations in the same way: [`load_operation`]. Only new
//! requests are validated.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::MutexGuard;
use tinkex_backend::operation::CheckpointLoad;
use tinkex_backend::upstream::UpstreamOperation;
use tinkex_engine::Trainer;
use tinkex_store::error::ServerError;
use tinkex_store::store::{
    AdmittedRequest, CheckpointRecord, LoraSettings, MetadataRecord, ModelRunRecord, Record,
    RequestKind, RequestRecord, SequenceScope, SharedWith, Store, UpstreamRun, UserStore,
};
use tinkex_store::user::Principal;
use tinkex_store::weights::{Backend, WeightsLocation};
use tinkex_wire::codec::json;
use tinkex_wire::{
    ApiRequest as _, CheckpointKind, LoadWeights, ModelId, OptimizerConfig, Seq, SessionId,
    TinkerPath,
};

use super::readmit::backend_of;
use super::training::{ModelRequest, enqueue_restored, random_seed, validate_optimizer};
use super::{
    Admission, CREATION_SEQ, NextStep, Submission, digest, find_original, next_seq,
    reject_seq_on_error, require_run, submit,
};
use crate::backends::RunBackend;
use crate::operation::{EngineOperation, Operation, RunOperation};

/// Sequence number of the first request after the creation of a model.
const FIRST_SEQ: u64 = CREATION_SEQ + 1;

/// Admits loading a checkpoint: into an existing model, or as a new model.
pub(crate) fn load_weights(
    admission: &Arc<Admission>,
    principal: &Principal,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    let request: LoadWeights = json::decode(&body)?;
    let admitted = validate_and_submit(admission, principal, &request, body);
    match &request.model_id {
        Some(model) => {
            let seq = request.seq_id.map(Seq::get);
            reject_seq_on_error(admission, principal, model, seq, admitted)
        }
        None => admitted,
    }
}

/// Decodes a stored request to load weights. Returns the step that enqueues the request again. The
/// location of the weights was fixed when the request was admitted, so the checkpoint may have been
/// deleted since.
pub(super) fn restore(
    admission: &Admission,
    row: &RequestRecord,
    body: &Bytes,
) -> Result<NextStep, ServerError> {
    let request: LoadWeights = json::decode(body)?;
    let path: TinkerPath = request.path.parse()?;
    let Some(source) = row.source.clone() else {
        return Err(ServerError::Internal("the stored request names no weights".to_owned()));
    };
    enqueue_restored(row, |model| {
        load_operation(backend_of(admission, model)?, &request, source, path, row.seq)
    })
}

/// Returns the operation that loads the checkpoint `path`, whose weights are at `source`. The
/// sequence number `seq` determines whether the operation creates the model.
///
/// # Errors
/// If the backend of the model cannot read the weights.
fn load_operation(
    backend: RunBackend,
    request: &LoadWeights,
    source: WeightsLocation,
    path: TinkerPath,
    seq: u64,
) -> Result<RunOperation, ServerError> {
    let optimizer = request.optimizer;
    let creates = seq == CREATION_SEQ;
    match (backend, source) {
        (RunBackend::Engine, WeightsLocation::Local(weights)) => {
            let load = CheckpointLoad { weights, path, optimizer, creates };
            Ok(RunOperation::Engine(EngineOperation::Load(load)))
        }
        (RunBackend::Upstream(upstream), WeightsLocation::Upstream(weights))
            if *weights.upstream == *upstream.name =>
        {
            let load = CheckpointLoad { weights, path, optimizer, creates };
            Ok(RunOperation::Upstream(upstream, UpstreamOperation::Load(load)))
        }
        _ => Err(ServerError::invalid(format!(
            "path: {path} is on another server than the model; create the model from the checkpoint"
        ))),
    }
}

/// Model into which a checkpoint is loaded.
enum LoadTarget {
    Existing(ModelId),
    /// A new model, model `number` of the session.
    New {
        session: SessionId,
        number: u32,
    },
}

impl LoadTarget {
    /// Returns the model that the request names.
    fn of(request: &LoadWeights) -> Result<Self, ServerError> {
        match (&request.model_id, &request.session_id, request.model_seq_id) {
            (Some(model), ..) => Ok(Self::Existing(model.clone())),
            (None, Some(session), Some(number)) => {
                Ok(Self::New { session: session.clone(), number })
            }
            _ => Err(ServerError::invalid(
                "expected either model_id, or session_id and model_seq_id",
            )),
        }
    }
}

/// A new request that names a training checkpoint, which may not exist.
struct LoadRequest<'a> {
    request: &'a LoadWeights,
    body: Bytes,
    digest: String,
    path: TinkerPath,
}

fn validate_and_submit(
    admission: &Arc<Admission>,
    principal: &Principal,
    request: &LoadWeights,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    request.validate()?;
    let path = training_path(&request.path)?;
    let target = LoadTarget::of(request)?;
    let load = LoadRequest { request, digest: digest::of_bytes(&body), body, path };
    match target {
        LoadTarget::Existing(model) => load.submit_to_existing_model(admission, principal, model),
        LoadTarget::New { session, number } => {
            load.submit_as_new_model(admission, principal, session, number)
        }
    }
}

/// Parses the path of a checkpoint that can be trained further.
fn training_path(path: &str) -> Result<TinkerPath, ServerError> {
    let path: TinkerPath = path.parse()?;
    let purpose = match path.kind() {
        CheckpointKind::Training => return Ok(path),
        CheckpointKind::Sampler => "sampling",
        _ => "download",
    };
    Err(ServerError::invalid(format!(
        "path: {path} was saved for {purpose} and cannot be trained further"
    )))
}

impl LoadRequest<'_> {
    /// Submits loading the checkpoint into an existing model.
    fn submit_to_existing_model(
        self,
        admission: &Arc<Admission>,
        principal: &Principal,
        model: ModelId,
    ) -> Result<AdmittedRequest, ServerError> {
        let user_store = admission.store_of(principal);
        let run = require_run(&user_store, &model)?;
        let source = self.source(&user_store);
        let store = user_store.into_inner();
        let scope = SequenceScope::Model(model);
        let seq = self.request.seq_id.map(Seq::get);
        let seq = seq.unwrap_or_else(|| next_seq(admission, &store, &scope));
        if seq != FIRST_SEQ {
            return Err(ServerError::invalid(format!(
                "LoadWeights is not permitted with seq_id {seq}: only the first request of a model \
                 may load"
            )));
        }
        let Some(source) = source else {
            return self.without_source(&store, &scope, seq);
        };
        check_compatible(self.request, &run, &source)?;
        self.check_optimizer_state(admission, &source)?;
        let model_request = ModelRequest {
            kind: RequestKind::LoadWeights,
            seq: Some(seq),
            digest: self.digest,
            tokens: 0,
            body: self.body,
            operation: load_operation(
                admission.backends.of_run(&run)?,
                self.request,
                source.weights,
                source.path,
                seq,
            )?,
        };
        model_request.submit(admission, store, &run)
    }

    /// Submits loading the checkpoint as a new model, model `number` of the session.
    fn submit_as_new_model(
        self,
        admission: &Arc<Admission>,
        principal: &Principal,
        session: SessionId,
        number: u32,
    ) -> Result<AdmittedRequest, ServerError> {
        let user_store = admission.store_of(principal);
        user_store.open_session(&session)?;
        let source = self.source(&user_store);
        let store = user_store.into_inner();
        let model = ModelId::in_session(&session, number);
        let scope = SequenceScope::Model(model.clone());
        let seq = CREATION_SEQ;
        let Some(source) = source else {
            return self.without_source(&store, &scope, seq);
        };
        self.check_optimizer_state(admission, &source)?;
        let metadata = self.request.user_metadata.as_ref();
        let name = MetadataRecord::run_name(metadata);
        let metadata = MetadataRecord::new(&model, metadata);
        let run = ModelRunRecord {
            id: model.clone(),
            owner: store.account(&session).owner,
            session: session.clone(),
            number,
            base_model: base_model(admission, self.request, &source)?,
            lora: LoraSettings { seed: random_seed(admission), ..source.lora },
            optimizer: optimizer(self.request, &source)?,
            metadata_bytes: metadata.bytes(),
            name,
            created_at: store.clock.now(),
            closed: None,
            snapshot: None,
            last_seq: None,
            project_id: None,
            upstream: self.upstream_run(admission, &source)?,
            dropped_pass: None,
            shared_with: SharedWith::default(),
        };
        let backend = admission.backends.of_run(&run)?;
        let operation = load_operation(backend, self.request, source.weights, source.path, seq)?;
        let submission = Submission {
            kind: RequestKind::LoadWeights,
            session,
            scope,
            seq: Some(seq),
            digest: self.digest,
            seed: run.lora.seed,
            samples: 0,
            tokens: 0,
            body: self.body,
            records: vec![Record::Run(run), Record::Metadata(metadata)],
            next: NextStep::Enqueue(Operation::Model { model, seq, operation }),
        };
        submit(admission, store, submission)
    }

    /// Checks that the checkpoint has the optimizer state that the request asks for. Imported
    /// adapters have no optimizer state.
    fn check_optimizer_state(
        &self,
        admission: &Admission,
        source: &CheckpointRecord,
    ) -> Result<(), ServerError> {
        let has_state = match &source.weights {
            WeightsLocation::Local(folder) => {
                Trainer::has_optimizer_state(&admission.weights_dir.join(folder))
            }
            WeightsLocation::Upstream(_) => true,
        };
        if !self.request.optimizer || has_state {
            return Ok(());
        }
        Err(ServerError::invalid(format!(
            "optimizer: {} has no optimizer state; load its weights only",
            source.path
        )))
    }

    /// Returns the upstream on which to create a new model from the checkpoint `source`: the
    /// upstream that has the checkpoint. Returns `None` if the engine has the checkpoint.
    fn upstream_run(
        &self,
        admission: &Admission,
        source: &CheckpointRecord,
    ) -> Result<Option<UpstreamRun>, ServerError> {
        match source.weights.backend() {
            Backend::Engine => Ok(None),
            Backend::Upstream(name) => {
                admission.backends.require_upstream(&name)?;
                Ok(Some(UpstreamRun { name: name.to_string(), model: None }))
            }
        }
    }

    /// Returns the checkpoint to load, if it exists for the principal.
    fn source(&self, store: &UserStore<'_, MutexGuard<'_, Store>>) -> Option<CheckpointRecord> {
        store.checkpoint(&self.path).ok().cloned()
    }

    /// Handles a request whose checkpoint does not exist. If the request is a retry, returns the id
    /// of the original request: the checkpoint may have been deleted since. Otherwise returns the
    /// error for the missing checkpoint.
    fn without_source(
        &self,
        store: &Store,
        scope: &SequenceScope,
        seq: u64,
    ) -> Result<AdmittedRequest, ServerError> {
        let original = find_original(store, scope, seq, &self.digest)?;
        original.ok_or_else(|| ServerError::no_checkpoint(&self.path))
    }
}

/// Returns the base model of a new model that starts from the checkpoint `source`.
fn base_model(
    admission: &Admission,
    request: &LoadWeights,
    source: &CheckpointRecord,
) -> Result<String, ServerError> {
    let base = request.base_model.as_ref().unwrap_or(&source.base_model);
    admission.base_model(base)?;
    if *base != source.base_model {
        return Err(ServerError::invalid(format!(
            "base_model: {} was trained from {}, not from {base}",
            source.path, source.base_model
        )));
    }
    Ok(base.clone())
}

/// Returns the optimizer of a new model that starts from the checkpoint `source`.
fn optimizer(
    request: &LoadWeights,
    source: &CheckpointRecord,
) -> Result<OptimizerConfig, ServerError> {
    let optimizer = match &request.optimizer_config {
        Some(config) if request.optimizer && *config != source.optimizer => {
            return Err(ServerError::invalid(
                "optimizer_config: differs from the saved optimizer; omit it, or load without the \
                 optimizer state",
            ));
        }
        Some(config) => config.clone(),
        None if request.optimizer => source.optimizer.clone(),
        None => OptimizerConfig::default(),
    };
    validate_optimizer(&optimizer)?;
    Ok(optimizer)
}

/// Checks that a checkpoint can be loaded into an existing model.
fn check_compatible(
    request: &LoadWeights,
    run: &ModelRunRecord,
    source: &CheckpointRecord,
) -> Result<(), ServerError> {
    if source.base_model != run.base_model {
        return Err(ServerError::invalid(format!(
            "path: {} was trained from {}, the model from {}",
            source.path, source.base_model, run.base_model
        )));
    }
    let shape =
        |lora: &LoraSettings| (lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed);
    if shape(&source.lora) != shape(&run.lora) {
        return Err(ServerError::invalid(format!(
            "path: (rank, train_attn, train_mlp, train_unembed) is {:?} in {} and {:?} in the \
             model",
            shape(&source.lora),
            source.path,
            shape(&run.lora)
        )));
    }
    if request.optimizer && source.optimizer.kind != run.optimizer.kind {
        return Err(ServerError::invalid(format!(
            "optimizer: {} was saved with {}, the model uses {}",
            source.path, source.optimizer.kind, run.optimizer.kind
        )));
    }
    match &request.optimizer_config {
        Some(config) if *config != run.optimizer => Err(ServerError::invalid(
            "optimizer_config: differs from the optimizer that the model was created with",
        )),
        _ => Ok(()),
    }
}
