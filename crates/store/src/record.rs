//! Records: changes to the server's durable state. The state is stored as database rows.
//!
//! A record that describes an object replaces the stored row with the same id. The JSON form of the
//! structs is the on-disk format: a field or variant that is renamed here must keep its stored name
//! with `#[serde(rename)]`.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tinkex_wire::{
    ErrorCategory, ErrorCode, FinishDetails, JsonObject, LossId, ModelId, OptimizerConfig,
    RequestId, SamplerId, SessionId, TinkerPath,
};

use crate::history::HistoryRecord;
use crate::user::{Account, KeyId, KeyRecord, UserId, UserRecord};
use crate::weights::{Backend, WeightsLocation};

/// Microseconds since the Unix epoch.
pub type UnixMicros = i64;

/// Time in microseconds for which the deletion of a checkpoint is remembered: one day.
pub const DELETION_RETENTION: UnixMicros = 24 * 3_600 * 1_000_000;

/// One change to the durable state.
#[derive(Clone, Debug)]
pub enum Record {
    Session(SessionRecord),
    /// Metadata of a session, run or checkpoint, written with its record. Removed with the object.
    Metadata(MetadataRecord),
    /// Gives the checkpoint `to` the metadata of the checkpoint `from`.
    MetadataCopied {
        from: TinkerPath,
        to: TinkerPath,
    },
    /// Removes ended sessions.
    SessionsRemoved {
        ids: Vec<SessionId>,
    },
    Run(ModelRunRecord),
    /// Removes a run with its checkpoints and its history.
    RunDeleted {
        id: ModelId,
    },
    Sampler(SamplerRecord),
    Checkpoint(CheckpointRecord),
    CheckpointDeleted {
        path: TinkerPath,
        at: UnixMicros,
    },
    /// An admitted request.
    Request(Arc<RequestRecord>),
    /// Increments the number of starts of requests that were restored after a restart.
    RequestsStarted {
        ids: Vec<RequestId>,
    },
    /// The result of an admitted request.
    Result(ResultRecord),
    /// Amounts of a request that is not stored, to add to the hourly usage counters.
    Usage(Vec<(UsageKey, u64)>),
    /// Merges the usage counters of hours before this one to one counter per day, owner, base model
    /// and meter.
    UsageMerged {
        before: i64,
    },
    /// Removes requests whose results were acknowledged or have expired.
    RequestsRemoved {
        ids: Vec<RequestId>,
    },
    /// History for the dashboard.
    History(Arc<HistoryRecord>),
    /// The current time.
    Clock(ClockRecord),
    Key(KeyRecord),
    /// Removes a key, which is refused from then on.
    KeyRemoved {
        id: KeyId,
    },
    User(UserRecord),
    /// Adds an entry to the audit log.
    Audit(AuditRecord),
}

/// Last time that the server stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockRecord {
    pub time: UnixMicros,
    /// Boot of the machine at that time; `None` if it was not known.
    pub boot: Option<BootTime>,
}

/// A time, measured from a boot of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootTime {
    /// Id of the boot.
    pub id: String,
    /// Microseconds since the boot, including those for which the machine was suspended.
    pub elapsed: UnixMicros,
}

/// Metadata that a user attached to an object. The server reads it from the database when a client
/// asks for it, and never keeps it in memory: the metadata of all objects may exceed the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataRecord {
    /// Id of the session or run, or path of the checkpoint.
    pub object: String,
    /// JSON object; `None` removes the metadata.
    pub json: Option<Arc<str>>,
}

/// Maximum length of [`ModelRunRecord::name`] in bytes.
const MAX_RUN_NAME: usize = 256;

impl MetadataRecord {
    /// Creates the record of an object. Empty metadata is not stored.
    pub fn new(object: &(impl ToString + ?Sized), metadata: Option<&impl Serialize>) -> Self {
        let json = metadata.and_then(|metadata| serde_json::to_string(metadata).ok());
        let json = json.filter(|json| json != "{}").map(Arc::from);
        Self { object: object.to_string(), json }
    }

    /// Returns the size of the metadata in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.json.as_ref().map_or(0, |json| json.len() as u64)
    }

    /// Returns the name of a run with this metadata, of at most 256 bytes.
    #[must_use]
    pub fn run_name(metadata: Option<&JsonObject>) -> Option<String> {
        let text = |key: &&str| metadata?.get(*key)?.as_str();
        let name = ["name", "run_name", "display_name"].iter().find_map(text)?;
        Some(name[..name.floor_char_boundary(MAX_RUN_NAME)].to_owned())
    }
}

/// A client session.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SessionRecord {
    pub id: SessionId,
    /// User to whom the session, its sampling sessions and its requests belong.
    #[serde(default)]
    pub owner: UserId,
    pub created_at: UnixMicros,
    pub tags: Vec<String>,
    /// Size of the metadata in bytes; 0 if the session has none. See [`MetadataRecord`].
    #[serde(default)]
    pub metadata_bytes: u64,
    pub project_id: Option<String>,
    pub display_name: Option<String>,
    /// Reason for the end of the session; `None` while it is open.
    pub end: Option<SessionEnd>,
    pub ended_at: Option<UnixMicros>,
}

/// Reason for the end of a session.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionEnd {
    /// The client finished it.
    Finished(FinishDetails),
    /// No request or heartbeat arrived within the session timeout.
    Expired,
}

/// A model and its training run, which share one id.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelRunRecord {
    pub id: ModelId,
    /// User to whom the run and its checkpoints belong. Stored here too, because a run outlives its
    /// session, and copies and imports have no session.
    #[serde(default)]
    pub owner: UserId,
    pub session: SessionId,
    /// The client's `model_seq_id`.
    pub number: u32,
    pub base_model: String,
    pub lora: LoraSettings,
    pub optimizer: OptimizerConfig,
    /// Size of the metadata in bytes; 0 if the run has none. See [`MetadataRecord`].
    #[serde(default)]
    pub metadata_bytes: u64,
    /// Name in the metadata. Kept here too, because the list of runs shows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub created_at: UnixMicros,
    /// Reason why the model cannot be trained; `None` if it can.
    pub closed: Option<String>,
    /// Latest recovery point.
    pub snapshot: Option<SnapshotRecord>,
    /// Sequence number of the last executed request. Stored in a separate column, because it
    /// changes with every request.
    #[serde(skip)]
    pub last_seq: Option<u64>,
    /// Project that the run was copied into; `None` for a run that was trained on this server.
    pub project_id: Option<String>,
    /// Set if the model is on an upstream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<UpstreamRun>,
    /// Why the server dropped an accepted pass, whose gradients are therefore missing; `None` if no
    /// gradients are missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped_pass: Option<String>,
    /// Other users who may read the run and use its checkpoints.
    #[serde(default, skip_serializing_if = "SharedWith::is_nobody")]
    pub shared_with: SharedWith,
}

/// Users, besides its owner, who may read a run and use its checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedWith {
    pub everybody: bool,
    pub users: BTreeSet<UserId>,
}

impl SharedWith {
    /// Returns whether only the owner may read the run.
    #[must_use]
    pub fn is_nobody(&self) -> bool {
        !self.everybody && self.users.is_empty()
    }

    /// Returns whether `user` may read the run.
    #[must_use]
    pub fn includes(&self, user: &UserId) -> bool {
        self.everybody || self.users.contains(user)
    }
}

/// Number of entries that the audit log keeps. Older entries are removed.
pub const AUDIT_ENTRIES: usize = 10_000;

/// An entry of the audit log: who did what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditRecord {
    /// Position in the log; later entries have greater numbers.
    #[serde(skip)]
    pub number: u64,
    pub at: UnixMicros,
    /// User who sent the request.
    pub user: UserId,
    pub key: KeyId,
    /// Name of the event, such as `run.delete`.
    pub event: String,
    pub run: Option<ModelId>,
    pub path: Option<TinkerPath>,
    pub details: JsonObject,
}

impl ModelRunRecord {
    /// Returns whether the creation of the model failed. A copy, which has a project, and an
    /// import, which has no session, are closed too, but their checkpoints can be used.
    pub fn has_failed(&self) -> bool {
        self.closed.is_some() && self.project_id.is_none() && !self.session.as_str().is_empty()
    }

    /// Returns the backend that executes the requests of the run.
    pub fn backend(&self) -> Backend {
        match &self.upstream {
            None => Backend::Engine,
            Some(upstream) => Backend::Upstream(upstream.name.as_str().into()),
        }
    }
}

/// A run whose model is on an upstream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpstreamRun {
    /// Name of the upstream.
    pub name: String,
    /// The model on the upstream; `None` until the model is created, and after the upstream has
    /// lost it.
    pub model: Option<RemoteModel>,
}

/// A model on an upstream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteModel {
    /// Session of this server on the upstream. Each session has only one model.
    pub session: SessionId,
    pub id: ModelId,
    /// Sequence number of the next request to the upstream.
    pub next_seq: u64,
    /// Requests that the upstream has accepted and whose results are not stored, in order.
    pub accepted: Vec<AcceptedRequest>,
}

/// A request that an upstream has accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedRequest {
    /// Sequence number of the request at this server.
    pub seq: u64,
    /// Id of the request at the upstream.
    pub id: RequestId,
}

/// Settings that determine the initial state of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoraSettings {
    pub rank: u32,
    pub seed: u64,
    pub train_unembed: bool,
    pub train_mlp: bool,
    pub train_attn: bool,
}

/// A model's saved state after request `seq`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SnapshotRecord {
    pub seq: u64,
    pub weights: WeightsLocation,
}

/// A sampling session: fixed weights to sample from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SamplerRecord {
    pub id: SamplerId,
    pub session: SessionId,
    pub base_model: String,
    pub model_path: Option<String>,
    /// Weights of the adapter; `None` samples from the base model.
    pub weights: Option<WeightsLocation>,
    /// Run whose weights were saved for this sampling session only; `None` if the weights belong
    /// to a base model or to a checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<ModelId>,
    /// Number of clients that have joined, the creator included.
    pub clients: u64,
    /// Reason for the end of the sampling session; `None` while it can be sampled from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<SamplerEnd>,
    /// Whether the sampling session has ended and no longer needs its weights.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weights_released: bool,
}

impl SamplerRecord {
    /// Returns the weights that must be kept for the sampling session.
    pub fn needed_weights(&self) -> Option<&WeightsLocation> {
        self.weights.as_ref().filter(|_| !self.weights_released)
    }
}

/// Reason for the end of a sampling session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplerEnd {
    /// A client closed it.
    Closed,
    /// It has weights without a name, and was not used for a long time.
    Unused,
}

/// A user-visible checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CheckpointRecord {
    pub path: TinkerPath,
    pub weights: WeightsLocation,
    /// The request that created the checkpoint; `None` for a copy or an autosave.
    pub request: Option<RequestId>,
    /// Sequence number of the saved state; `None` for a copy.
    pub seq: Option<u64>,
    pub created_at: UnixMicros,
    pub expires_at: Option<UnixMicros>,
    pub size_bytes: u64,
    pub public: bool,
    /// Size of the metadata in bytes; 0 if the checkpoint has none. See [`MetadataRecord`].
    #[serde(default)]
    pub metadata_bytes: u64,
    pub base_model: String,
    pub lora: LoraSettings,
    pub optimizer: OptimizerConfig,
}

/// Kind of a request that returns a future.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestKind {
    CreateModel,
    ForwardBackward,
    OptimStep,
    DiscardGradient,
    SaveWeights,
    SaveWeightsForSampler,
    SaveWeightsExternal,
    LoadWeights,
    CreateCustomLoss,
    Sample,
}

impl RequestKind {
    /// Returns the name of the kind, as in the database.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CreateModel => "create_model",
            Self::ForwardBackward => "forward_backward",
            Self::OptimStep => "optim_step",
            Self::DiscardGradient => "discard_gradient",
            Self::SaveWeights => "save_weights",
            Self::SaveWeightsForSampler => "save_weights_for_sampler",
            Self::SaveWeightsExternal => "save_weights_external",
            Self::LoadWeights => "load_weights",
            Self::CreateCustomLoss => "create_custom_loss",
            Self::Sample => "sample",
        }
    }
}

/// Scope within which sequence numbers are unique.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SequenceScope {
    /// Requests of a model, executed by sequence number; its creation is number 0.
    Model(ModelId),
    /// Samples of a sampling session, executed in any order.
    Sampler(SamplerId),
    /// Custom losses of a session.
    #[serde(rename = "losses")]
    CustomLosses(SessionId),
}

/// An admitted request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RequestRecord {
    /// Number of the payload with the request body. Numbers increase in order of admission.
    #[serde(skip)]
    pub number: u64,
    pub id: RequestId,
    pub kind: RequestKind,
    pub session: SessionId,
    #[serde(rename = "line")]
    pub scope: SequenceScope,
    pub seq: u64,
    /// Digest of the body. A retry has the same digest; a different request under the same sequence
    /// number has another digest.
    pub digest: String,
    /// Random seed chosen at admission, so that executing the request again gives the same result.
    pub seed: u64,
    /// Number of samples requested; 0 for other kinds of requests.
    pub samples: u32,
    /// Number of tokens of a training pass; 0 for other kinds of requests.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub tokens: u64,
    /// Weights that the request loads. The weights are fixed at admission: the checkpoint may be
    /// deleted or overwritten before the request is executed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<WeightsLocation>,
    /// Time of admission.
    pub at: UnixMicros,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Result of a request.
#[derive(Clone, Debug)]
pub struct ResultRecord {
    pub request: Arc<RequestRecord>,
    /// Number of the payload with the encoded result.
    pub number: u64,
    /// Size of that payload in bytes.
    pub size: usize,
    pub result: ResultKind,
    /// Whether the request modified the model. Restoring the model from an older snapshot then
    /// requires executing the request again.
    pub model_changed: bool,
    /// Time at which the execution finished.
    pub at: UnixMicros,
    /// Amounts to add to the hourly usage counters.
    pub usage: Vec<(UsageKey, u64)>,
}

impl ResultRecord {
    /// Returns the kind of the request to execute when the model is restored from an older
    /// snapshot. An optimizer step that failed and modified the model has discarded the gradients.
    pub(crate) fn change_kind(&self) -> RequestKind {
        match (self.request.kind, &self.result) {
            (RequestKind::OptimStep, ResultKind::Failed { .. }) => RequestKind::DiscardGradient,
            (kind, _) => kind,
        }
    }
}

/// A request that modified a model after its last snapshot.
#[derive(Clone, Copy, Debug)]
pub struct ChangeRecord {
    pub kind: RequestKind,
    /// Number of the payload with the request body.
    pub body: u64,
}

/// Encoding of a result, or the failure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResultKind {
    Json,
    Proto,
    Failed { error: String, category: FailureCategory },
}

/// Whether the request or the server caused a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCategory {
    User,
    /// The request caused the failure: the name of its checkpoint is taken.
    Conflict,
    Server,
}

impl From<FailureCategory> for ErrorCategory {
    fn from(category: FailureCategory) -> Self {
        match category {
            FailureCategory::User | FailureCategory::Conflict => Self::User,
            FailureCategory::Server => Self::Server,
        }
    }
}

impl FailureCategory {
    /// Returns the error code that the client receives; `None` if the category has no code.
    pub fn code(self) -> Option<ErrorCode> {
        match self {
            Self::Conflict => Some(ErrorCode::Conflict),
            Self::User | Self::Server => None,
        }
    }
}

/// Session id under which the server counts the usage of inference requests that name no sampling
/// session. It cannot be the id of a client's session, which is a UUID.
pub const INFERENCE_SESSION: &str = "inference";

/// Session id of merged usage counters; see [`Record::UsageMerged`].
pub const MERGED_SESSION: &str = "merged";

/// Key of an hourly usage counter.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UsageKey {
    /// Hours since the Unix epoch.
    pub hour: i64,
    /// User to whom the usage is charged.
    pub owner: UserId,
    pub session: SessionId,
    pub base_model: String,
    pub meter: UsageMeter,
}

impl UsageKey {
    /// Returns the key of the counter that this counter is merged to: the first hour of the day,
    /// without the session.
    #[must_use]
    pub fn merged(&self) -> Self {
        let hour = self.hour - self.hour.rem_euclid(24);
        Self { hour, session: MERGED_SESSION.into(), ..self.clone() }
    }

    #[must_use]
    pub fn new(hour: i64, account: &Account, base_model: &str, meter: UsageMeter) -> Self {
        let Account { owner, session } = account.clone();
        Self { hour, owner, session, base_model: base_model.to_owned(), meter }
    }
}

/// Quantity that a usage counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UsageMeter {
    /// Tokens trained on.
    Training,
    /// Prompt tokens computed.
    Prefill,
    /// Prompt tokens found in the prefix cache.
    CachedPrefill,
    /// Tokens sampled.
    Sampled,
    /// Checkpoints saved.
    Checkpoints,
}

/// Returns the id of a session's custom loss with sequence number `seq`.
pub fn loss_id(session: &SessionId, seq: u64) -> LossId {
    format!("{}{seq}", loss_prefix(session)).into()
}

/// Returns the prefix of the ids of all custom losses of a session.
pub fn loss_prefix(session: &SessionId) -> String {
    format!("{session}:loss:")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A changed form would make data folders unreadable.
    #[test]
    fn the_stored_form_of_records_does_not_change() {
        let request = |scope: SequenceScope| RequestRecord {
            number: 7,
            id: "r".into(),
            kind: RequestKind::SaveWeightsForSampler,
            session: "s".into(),
            scope,
            seq: 3,
            digest: "d".to_owned(),
            seed: u64::MAX,
            samples: 2,
            tokens: 0,
            source: None,
            at: 5,
        };
        let stored = |line: Value| {
            json!({
                "id": "r", "kind": "save_weights_for_sampler", "session": "s", "line": line,
                "seq": 3, "digest": "d", "seed": u64::MAX, "samples": 2, "at": 5,
            })
        };
        for (scope, line) in [
            (SequenceScope::Model("m".into()), json!({"model": "m"})),
            (SequenceScope::Sampler("p".into()), json!({"sampler": "p"})),
            (SequenceScope::CustomLosses("s".into()), json!({"losses": "s"})),
        ] {
            let value = serde_json::to_value(request(scope.clone())).unwrap();
            assert_eq!(value, stored(line));
            let read: RequestRecord = serde_json::from_value(value).unwrap();
            assert_eq!(read.scope, scope);
        }
        let failed = |category| ResultKind::Failed { error: "e".to_owned(), category };
        let stored_failure =
            |category: &str| json!({"failed": {"error": "e", "category": category}});
        for (value, stored) in [
            (serde_json::to_value(ResultKind::Json), json!("json")),
            (serde_json::to_value(ResultKind::Proto), json!("proto")),
            (serde_json::to_value(failed(FailureCategory::User)), stored_failure("user")),
            (serde_json::to_value(failed(FailureCategory::Conflict)), stored_failure("conflict")),
            (serde_json::to_value(failed(FailureCategory::Server)), stored_failure("server")),
            (serde_json::to_value(SessionEnd::Expired), json!("expired")),
            (serde_json::to_value(UsageMeter::CachedPrefill), json!("cached_prefill")),
        ] {
            assert_eq!(value.unwrap(), stored);
        }
    }
}
