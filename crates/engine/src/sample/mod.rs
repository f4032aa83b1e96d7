//! Sampling: generates the completions of many requests in shared batches.

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
