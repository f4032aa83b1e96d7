//! Sampling: generates the completions of many requests in shared batches.
//!
//! `request` defines requests and outputs, and `observer` receives tokens while they are sampled.
//! `sampler` admits the requests, `schedule` chooses the rows of a batch, and `step` computes it. A request in progress
//! consists of its `state` and of one `sequence` per completion, whose keys and values are in the
//! pages of the `kv_cache`.

#[cfg(test)]
mod fairness_tests;
mod kv_cache;
mod observer;
mod request;
mod sampler;
mod schedule;
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
