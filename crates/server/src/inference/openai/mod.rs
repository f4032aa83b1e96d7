//! The OpenAI-compatible endpoints, without HTTP: `completions` and `models`.

mod choice;
mod completion_request;
mod completions;
mod error;
mod logprobs;
mod models;
mod sampling;

pub(crate) use self::completions::completions;
pub(crate) use self::error::error_document;
pub(crate) use self::models::{list_models, model};
