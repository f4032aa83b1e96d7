//! Sampling: many requests on one model, together.

mod kv_cache;
mod request;
mod sampler;
mod sequence;
mod state;
mod step;
#[cfg(test)]
mod tests;

pub use request::{
    ModelWeights, PromptScores, PromptScoring, SampleOutput, SampleRequest, SampleRequestId,
    SampledCompletion, StopReason, TopK,
};
pub use sampler::Sampler;
