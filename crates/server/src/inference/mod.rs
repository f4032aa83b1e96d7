//! Inference requests of the OpenAI- and Anthropic-compatible endpoints.
//!
//! Unlike requests of the Tinker API they are not durable: they have no record on disk, no future
//! and no retry. The tokens go to the connection of the client while they are sampled, and a client
//! that disconnects cancels its request. They share the worker's batches, the queue limits and the
//! cached weights with Tinker samples, and the results have the same bits.
//!
//! An endpoint handles a request in three steps:
//!
//! 1. [`NamedModel::resolve`] finds the weights that the `model` of the request names.
//! 2. [`Generation::start`] validates a [`GenerationRequest`] and enqueues it. Dropping the
//!    [`Generation`] cancels it within one step of the sampler.
//! 3. [`Generation::poll_progress`] returns the tokens in the order in which they are sampled.

pub(crate) mod anthropic;
mod chat;
mod error;
mod events;
mod generation;
mod model_name;
pub(crate) mod openai;
mod parameters;
mod request;
mod token_buffer;

pub(crate) use self::chat::ChatModel;
pub(crate) use self::error::{ErrorClass, InferenceError};
pub(crate) use self::events::{EventSource, EventWriter, InferenceBody, InferenceResponse};
pub(crate) use self::generation::{Generation, Generations};
pub(crate) use self::model_name::NamedModel;
pub(crate) use self::parameters::Parameters;
pub(crate) use self::request::GenerationRequest;
pub(crate) use self::token_buffer::{GeneratedToken, GenerationProgress, TokenCounts, TokenSink};

/// Returns the size of the JSON document that is decoded in the time that it takes to render and
/// tokenize a prompt of `bytes` bytes. [`run_blocking`](crate::task::run_blocking) decides by it.
pub(crate) fn tokenizing_cost(bytes: usize) -> usize {
    bytes.saturating_mul(TOKENIZING_COST)
}

/// Number of bytes of JSON that are decoded in the time of tokenizing one.
const TOKENIZING_COST: usize = 16;
