//! Records: changes to the server's durable state, which is stored as database rows.
//!
//! A record that describes an object replaces the stored row with the same id. The JSON form of the
//! structs is the on-disk format: a field or variant that is renamed here must keep its stored name
//! with `#[serde(rename)]`.

use std::sync::Arc;

use crate::backend::Backend;
#[cfg(doc)]
use crate::backend::RemoteWeights;
use serde::{Deserialize, Serialize};
use tinkex_wire::{
    ErrorCategory, ErrorCode, FinishDetails, JsonObject, LossId, Metadata, ModelId,
    OptimizerConfig, RequestId, SamplerId, SessionId, TinkerPath,
};

use crate::history::HistoryRecord;

/// Microseconds since the Unix epoch.
pub(crate) type UnixMicros = i64;

/// Time in microseconds for which the deletion of a checkpoint is remembered: one day.
pub(crate) const DELETION_RETENTION: UnixMicros = 24 * 3_600 * 1_000_000;

/// One change to the durable state.
#[derive(Clone, Debug)]
pub(crate) enum Record {
    Session(SessionRecord),
    /// Removes ended sessions.
    SessionsRemoved {
        ids: Vec<SessionId>,
    },
    Run(RunRecord),
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
    /// Counts one more start of requests that were restored after a restart.
    RequestsStarted {
        ids: Vec<RequestId>,
    },
    /// The result of an admitted request.
    Result(ResultRecord),
    /// Amounts to add to the hourly usage counters, of a request that is not stored.
    Usage(Vec<(UsageKey, u64)>),
    /// Removes requests whose results were acknowledged or have expired.
    RequestsRemoved {
        ids: Vec<RequestId>,
    },
    /// History for the dashboard.
    History(Arc<HistoryRecord>),
    /// The current time.
    Clock(ClockRecord),
}

/// Time that the server knew last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClockRecord {
    pub(crate) time: UnixMicros,
    /// Boot of the machine at that time; `None` if it was not known.
    pub(crate) boot: Option<BootTime>,
}

/// A moment after a boot of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BootTime {
    /// Id of the boot.
    pub(crate) id: String,
    /// Microseconds since the boot, including those for which the machine was suspended.
    pub(crate) elapsed: UnixMicros,
}

/// A client session.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SessionRecord {
    pub(crate) id: SessionId,
    pub(crate) created_at: UnixMicros,
    pub(crate) tags: Vec<String>,
    pub(crate) user_metadata: Option<JsonObject>,
    pub(crate) project_id: Option<String>,
    pub(crate) display_name: Option<String>,
    /// Reason for the end of the session; `None` while it is open.
    pub(crate) end: Option<SessionEnd>,
    pub(crate) ended_at: Option<UnixMicros>,
}

/// Reason for the end of a session.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SessionEnd {
    /// The client finished it.
    Finished(FinishDetails),
    /// No request or heartbeat arrived within the session timeout.
    Expired,
}

/// A model and its training run, which share one id.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    pub(crate) id: ModelId,
    pub(crate) session: SessionId,
    /// The client's `model_seq_id`.
    pub(crate) number: u32,
    pub(crate) base_model: String,
    pub(crate) lora: LoraSettings,
    pub(crate) optimizer: OptimizerConfig,
    pub(crate) user_metadata: Option<JsonObject>,
    pub(crate) created_at: UnixMicros,
    /// Reason why the model cannot be trained; `None` if it can.
    pub(crate) closed: Option<String>,
    /// Latest recovery point.
    pub(crate) snapshot: Option<SnapshotRecord>,
    /// Sequence number of the last executed request. Stored in a column of its own because it
    /// changes with every request.
    #[serde(skip)]
    pub(crate) last_seq: Option<u64>,
    /// Project that the run was copied into; `None` for a run that was trained here.
    pub(crate) project_id: Option<String>,
    /// Set if the model is on an upstream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) upstream: Option<UpstreamRun>,
}

impl RunRecord {
    /// Returns whether the creation of the model failed. A copy, which has a project, and an import,
    /// which has no session, are closed too, but their checkpoints can be used.
    pub(crate) fn has_failed(&self) -> bool {
        self.closed.is_some() && self.project_id.is_none() && !self.session.as_str().is_empty()
    }

    /// Returns the backend that executes the requests of the run.
    pub(crate) fn backend(&self) -> Backend {
        match &self.upstream {
            None => Backend::Engine,
            Some(upstream) => Backend::Upstream(upstream.name.as_str().into()),
        }
    }
}

/// A run whose model is on an upstream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UpstreamRun {
    /// Name of the upstream.
    pub(crate) name: String,
    /// The model there; `None` until it is created, and after the upstream has lost it.
    pub(crate) model: Option<RemoteModel>,
}

/// A model on an upstream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemoteModel {
    /// Session of this server on the upstream, which holds this model only.
    pub(crate) session: SessionId,
    pub(crate) id: ModelId,
    /// Sequence number of the next request to the upstream.
    pub(crate) next_seq: u64,
    /// Requests that the upstream has accepted and whose results are not stored, in order.
    pub(crate) accepted: Vec<AcceptedRequest>,
}

/// A request that an upstream has accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AcceptedRequest {
    /// Sequence number of the request at this server.
    pub(crate) seq: u64,
    /// Id of the request at the upstream.
    pub(crate) id: RequestId,
}

/// Settings that determine the initial state of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LoraSettings {
    pub(crate) rank: u32,
    pub(crate) seed: u64,
    pub(crate) train_unembed: bool,
    pub(crate) train_mlp: bool,
    pub(crate) train_attn: bool,
}

/// A model's saved state after request `seq`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SnapshotRecord {
    pub(crate) seq: u64,
    /// Name of its folder under `weights/`, or [`RemoteWeights`] as text.
    pub(crate) folder: String,
}

/// A sampling session: fixed weights to sample from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SamplerRecord {
    pub(crate) id: SamplerId,
    pub(crate) session: SessionId,
    pub(crate) base_model: String,
    pub(crate) model_path: Option<String>,
    /// Folder of the adapter under `weights/`, or [`RemoteWeights`] as text; `None` samples from
    /// the base model.
    pub(crate) folder: Option<String>,
    /// Run whose weights were saved for this sampling session only; `None` if they are those of a
    /// base model or of a checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) run: Option<ModelId>,
    /// Number of clients that have joined, the creator included.
    pub(crate) clients: u64,
}

/// A user-visible checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CheckpointRecord {
    pub(crate) path: TinkerPath,
    /// Name of its folder under `weights/`, or [`RemoteWeights`] as text.
    pub(crate) folder: String,
    /// The request that created it; `None` for a copy or an autosave.
    pub(crate) request: Option<RequestId>,
    /// Sequence number of the saved state; `None` for a copy.
    pub(crate) seq: Option<u64>,
    pub(crate) created_at: UnixMicros,
    pub(crate) expires_at: Option<UnixMicros>,
    pub(crate) size_bytes: u64,
    pub(crate) public: bool,
    pub(crate) user_metadata: Option<Metadata>,
    pub(crate) base_model: String,
    pub(crate) lora: LoraSettings,
    pub(crate) optimizer: OptimizerConfig,
}

/// Kind of a request that returns a future.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RequestKind {
    CreateModel,
    ForwardBackward,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
    SaveWeightsExternal,
    LoadWeights,
    CreateCustomLoss,
    Sample,
}

/// Scope within which sequence numbers are unique.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SequenceScope {
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
pub(crate) struct RequestRecord {
    /// Number of the payload with the request body. Numbers increase in order of admission.
    #[serde(skip)]
    pub(crate) number: u64,
    pub(crate) id: RequestId,
    pub(crate) kind: RequestKind,
    pub(crate) session: SessionId,
    #[serde(rename = "line")]
    pub(crate) scope: SequenceScope,
    pub(crate) seq: u64,
    /// Digest of the body. A retry has the same digest; a different request under the same
    /// sequence number has another one.
    pub(crate) digest: String,
    /// Random seed chosen at admission, so that executing the request again gives the same result.
    pub(crate) seed: u64,
    /// Number of samples requested; 0 for other kinds of requests.
    pub(crate) samples: u32,
    /// Folder under `weights/` that the request loads. It is fixed at admission: the checkpoint may
    /// be deleted or overwritten before the request is executed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) source_folder: Option<String>,
    /// Time of admission.
    pub(crate) at: UnixMicros,
}

/// Result of a request.
#[derive(Clone, Debug)]
pub(crate) struct ResultRecord {
    pub(crate) request: Arc<RequestRecord>,
    /// Number of the payload with the encoded result.
    pub(crate) number: u64,
    /// Size of that payload in bytes.
    pub(crate) size: usize,
    pub(crate) result: ResultKind,
    /// Whether the request modified the model. Restoring the model from an older snapshot then
    /// requires executing it again.
    pub(crate) model_changed: bool,
    /// Time at which the execution finished.
    pub(crate) at: UnixMicros,
    /// Amounts to add to the hourly usage counters.
    pub(crate) usage: Vec<(UsageKey, u64)>,
}

/// A request that modified a model after its last snapshot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChangeRecord {
    pub(crate) kind: RequestKind,
    /// Number of the payload with the request body.
    pub(crate) body: u64,
}

/// Encoding of a result, or the failure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ResultKind {
    Json,
    Proto,
    Failed { error: String, category: FailureCategory },
}

/// Whether the request or the server caused a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FailureCategory {
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
    /// Returns the code that the client receives, if there is one.
    pub(crate) fn code(self) -> Option<ErrorCode> {
        match self {
            Self::Conflict => Some(ErrorCode::Conflict),
            Self::User | Self::Server => None,
        }
    }
}

/// Session of the usage of inference requests that name no sampling session. No session has this
/// id: those of clients are UUIDs.
pub(crate) const INFERENCE_SESSION: &str = "inference";

/// Key of an hourly usage counter.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct UsageKey {
    /// Hours since the Unix epoch.
    pub(crate) hour: i64,
    pub(crate) session: SessionId,
    pub(crate) base_model: String,
    pub(crate) meter: UsageMeter,
}

/// Quantity that a usage counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum UsageMeter {
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
pub(crate) fn loss_id(session: &SessionId, seq: u64) -> LossId {
    format!("{}{seq}", loss_prefix(session)).into()
}

/// Returns the prefix of the ids of all custom losses of a session.
pub(crate) fn loss_prefix(session: &SessionId) -> String {
    format!("{session}:loss:")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A changed form would make the data folders of earlier versions unreadable.
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
            source_folder: None,
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
