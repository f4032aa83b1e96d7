//! Sampling: generates the completions of many requests in shared batches.
//!
//! `request` defines requests and outputs, and `observer` receives tokens while they are sampled.
//! `sampler` schedules the requests and `step` computes a batch of them. A request in progress
//! consists of its `state` and of one `sequence` per completion, whose keys and values are in the
//! pages of the `kv_cache`.

mod kv_cache;
mod observer;
mod request;
mod sampler;
mod sequence;
mod state;
mod step;
#[cfg(test)]
mod tests;

pub use observer::{SampledToken, TokenObserver};
pub use request::{
    ModelWeights, PromptScores, PromptScoring, SampleOutput, SampleRequest, SampleRequestId,
    SampledCompletion, StopReason, TopK,
};
pub use sampler::Sampler;
