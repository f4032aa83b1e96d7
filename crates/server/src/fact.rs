//! Facts: what is written into the database, each replacing the one it is about.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tinkex_wire::{
    ErrorCategory, FinishDetails, JsonObject, LossId, Metadata, ModelId, OptimizerConfig,
    RequestId, SamplerId, SessionId, TinkerPath,
};

/// A moment, in microseconds since 1970.
pub(crate) type Micros = i64;

/// One fact.
#[derive(Clone, Debug)]
pub(crate) enum Fact {
    Session(Session),
    /// Sessions that were over long ago are not listed any more.
    Left {
        ids: Vec<SessionId>,
    },
    Run(Run),
    Sampler(Sampler),
    Checkpoint(Checkpoint),
    /// A checkpoint was deleted.
    Gone {
        path: TinkerPath,
    },
    /// A request was taken in.
    Request(Arc<Request>),
    /// A request was answered.
    Done(Done),
    /// Nobody will ask for these answers again.
    Forget {
        ids: Vec<RequestId>,
    },
}

/// A program's stay.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) created_at: Micros,
    pub(crate) tags: Vec<String>,
    pub(crate) user_metadata: Option<JsonObject>,
    pub(crate) project_id: Option<String>,
    pub(crate) display_name: Option<String>,
    pub(crate) end: Option<End>,
    /// When that was.
    pub(crate) ended_at: Option<Micros>,
}

/// How a session ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    /// Its client said so.
    Finished(FinishDetails),
    /// Nothing was heard of it for too long.
    Expired,
}

/// A model and its history.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) id: ModelId,
    pub(crate) session: SessionId,
    pub(crate) number: u32,
    pub(crate) base_model: String,
    pub(crate) lora: Lora,
    pub(crate) optimizer: OptimizerConfig,
    pub(crate) user_metadata: Option<JsonObject>,
    pub(crate) created_at: Micros,
    /// Why it cannot be trained.
    pub(crate) closed: Option<String>,
    /// Its state after request `seq`, in a folder of its own.
    pub(crate) snapshot: Option<Snapshot>,
    /// The last request that was carried out. It changes with every one, so it has a column.
    #[serde(skip)]
    pub(crate) last_seq: Option<u64>,
    /// The project it was copied into.
    pub(crate) project_id: Option<String>,
}

/// An adapter: everything that decides how it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lora {
    pub(crate) rank: u32,
    pub(crate) seed: u64,
    pub(crate) train_unembed: bool,
    pub(crate) train_mlp: bool,
    pub(crate) train_attn: bool,
}

/// A model's state on disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Snapshot {
    pub(crate) seq: u64,
    pub(crate) folder: String,
}

/// Fixed weights to sample from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Sampler {
    pub(crate) id: SamplerId,
    pub(crate) session: SessionId,
    pub(crate) base_model: String,
    pub(crate) model_path: Option<String>,
    /// Where the adapter lies; none for the base model.
    pub(crate) folder: Option<String>,
    /// How many clients it has had.
    pub(crate) clients: u64,
}

/// Saved weights.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    pub(crate) path: TinkerPath,
    pub(crate) folder: String,
    /// The request that made it.
    pub(crate) request: Option<RequestId>,
    /// That request's number; none for a copy.
    pub(crate) seq: Option<u64>,
    pub(crate) created_at: Micros,
    pub(crate) expires_at: Option<Micros>,
    pub(crate) size_bytes: u64,
    pub(crate) public: bool,
    pub(crate) user_metadata: Option<Metadata>,
    /// What it holds.
    pub(crate) base_model: String,
    pub(crate) lora: Lora,
    pub(crate) optimizer: OptimizerConfig,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
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

/// Where a request stands in line.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Line {
    /// The requests of a model, in order; its creation is number 0.
    Model(ModelId),
    /// The samples of a sampling session, in any order.
    Sampler(SamplerId),
    /// The custom losses of a session.
    Losses(SessionId),
}

/// A request that was taken in.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    /// The number of its body, which is also its place among all that came.
    #[serde(skip)]
    pub(crate) number: u64,
    pub(crate) id: RequestId,
    pub(crate) kind: Kind,
    pub(crate) session: SessionId,
    pub(crate) line: Line,
    pub(crate) seq: u64,
    /// Tells another body from the same one.
    pub(crate) digest: String,
    /// What was drawn for it when it came in, so that it can be carried out again.
    pub(crate) seed: u64,
    /// Samples it will have.
    pub(crate) samples: u32,
    pub(crate) at: Micros,
}

/// What came of a request.
#[derive(Clone, Debug)]
pub(crate) struct Done {
    pub(crate) request: Arc<Request>,
    /// The number of its answer.
    pub(crate) number: u64,
    /// Bytes of the answer.
    pub(crate) size: usize,
    pub(crate) answer: Answer,
    /// Whether it changed a model, so that going back to an earlier state means doing it again.
    pub(crate) changed: bool,
    pub(crate) at: Micros,
    pub(crate) used: Vec<(Use, u64)>,
}

/// A request that changed a model since its snapshot: what it was, and the number of its body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    pub(crate) kind: Kind,
    pub(crate) body: u64,
}

/// The form of an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Json,
    Proto,
    Failed { error: String, category: Fault },
}

/// Whose fault a failure was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    User,
    Server,
}

impl From<Fault> for ErrorCategory {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::User => Self::User,
            Fault::Server => Self::Server,
        }
    }
}

/// A kind of use in one hour.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Use {
    pub(crate) hour: i64,
    pub(crate) session: SessionId,
    pub(crate) base_model: String,
    pub(crate) what: What,
}

/// What was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
    Training,
    Prefill,
    CachedPrefill,
    Sampled,
    Checkpoints,
}

/// The id of the `n`th custom loss of a session.
pub(crate) fn loss_id(session: &SessionId, n: u64) -> LossId {
    format!("{session}:loss:{n}").into()
}
