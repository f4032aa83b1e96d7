//! The OpenAI-compatible endpoints, without HTTP: `chat/completions`, `completions` and `models`.

mod chat;
mod chat_documents;
mod chat_logprobs;
mod chat_messages;
mod chat_request;
mod choice;
mod chunk;
mod completion_request;
mod completions;
mod error;
mod logprobs;
mod models;
mod prompt_completion;
mod sampling;
mod usage;

pub(crate) use self::chat::chat_completions;
pub(crate) use self::completions::completions;
pub(crate) use self::error::error_document;
pub(crate) use self::models::{list_models, model};
