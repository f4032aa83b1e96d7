//! Sampling: many requests on one model, together.

mod cache;
mod request;
mod sampler;
mod sequence;
mod state;
mod step;
#[cfg(test)]
mod tests;

pub use request::{
    Answer, PromptScores, RequestId, SampleRequest, Sampled, Scoring, StopReason, TopK, Weights,
};
pub use sampler::Sampler;
