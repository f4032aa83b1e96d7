//! Work: what requests become once they are admitted.

use std::sync::Arc;

use tinkex_engine::loss::Loss;
use tinkex_engine::loss::graph::Graph;
use tinkex_engine::optim::StepParams;
use tinkex_engine::sample::SampleRequest;
use tinkex_wire::{Datum, Metadata, Mode, ModelId, RequestId, SamplerId, TensorData, TinkerPath};

/// A request in line.
pub(crate) struct Job {
    pub(crate) id: RequestId,
    /// Bytes that it holds.
    pub(crate) bytes: usize,
    pub(crate) work: Work,
}

/// What is to be done.
pub(crate) enum Work {
    /// Something with a model, at its place in line.
    Train { model: ModelId, seq: u64, op: Op },
    /// A sample.
    Sample(Box<Sample>),
}

/// Something to do with a model.
pub(crate) enum Op {
    /// Make it.
    Create,
    /// Run data through it.
    Pass(Box<Pass>),
    /// Take a step.
    Step(StepParams),
    /// Write it down under an address, until then.
    Save(Box<Save>),
    /// Write it down for one sampling session.
    SaveFor(SamplerId),
    /// Take over what was written down.
    Load { folder: String, path: TinkerPath, optimizer: bool, creates: bool },
}

/// Data to be run through a model.
pub(crate) struct Pass {
    pub(crate) data: Vec<Datum>,
    pub(crate) mode: Mode,
    pub(crate) objective: Objective,
}

/// What data is run for.
pub(crate) enum Objective {
    Loss(Loss),
    Graph(Arc<Graph>),
}

/// A checkpoint to be made.
pub(crate) struct Save {
    pub(crate) path: TinkerPath,
    pub(crate) overwrite: bool,
    pub(crate) ttl_seconds: Option<u64>,
    pub(crate) user_metadata: Option<Metadata>,
}

/// A sample to be drawn.
pub(crate) struct Sample {
    pub(crate) sampler: SamplerId,
    pub(crate) request: SampleRequest,
    /// The targets as they were given, for the form of the answer.
    pub(crate) targets: Option<TensorData>,
}
