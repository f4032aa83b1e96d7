//! Inference requests on this server: resolves the names of models, and samples from them.
//!
//! The crate `tinkex-inference` reads requests and writes responses of the OpenAI and Anthropic
//! APIs. [`NamedModel::resolve`] finds the weights that the `model` of a request names, and
//! [`ModelGenerator`] enqueues the generation.
//!
//! Unlike requests of the Tinker API, inference requests are not durable: they have no record on
//! disk and no future, and they are not executed again after a restart. The server sends the tokens
//! to the client while they are sampled, and a client that disconnects cancels its request within
//! one step of the sampler. Inference requests share the worker's batches, the queue limits and the
//! cached weights with Tinker samples, and the results have the same bits.

mod error;
mod generation;
mod model_name;
mod observer;
mod sample_request;
mod text_memory;
mod upstream_response;

use std::sync::Arc;

use crate::admit::Admission;

pub(crate) use self::error::inference_error;
pub(crate) use self::generation::{Generations, ModelGenerator};
pub(crate) use self::model_name::NamedModel;
pub(crate) use self::observer::SampledTokens;
pub(crate) use self::text_memory::TextMemory;

/// State of the server that inference requests use.
pub(crate) struct Inference {
    pub(crate) admission: Arc<Admission>,
    /// Inference requests that are not finished.
    pub(crate) generations: Arc<Generations>,
    /// Pairs of an alias and the model name that the alias stands for.
    pub(crate) aliases: Vec<(String, String)>,
    /// Budget for the texts that are being tokenized.
    pub(crate) text_memory: TextMemory,
}
