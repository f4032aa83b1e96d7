//! The OpenAI API: `chat/completions`, `completions` and `models`.
//!
//! The `…_request` modules read requests; `sampling` reads the parameters that both requests share.
//! `chat` and `completions` start the generation and collect or stream the response; `choice` and
//! `prompt_completion` convert the tokens of a completion. The other modules define the JSON
//! documents of responses, events and errors.

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

pub use self::chat_request::ChatCompletionRequest;
pub use self::completion_request::CompletionRequest;
pub use self::error::{ErrorDocument, error_document};
pub use self::models::{ModelDescription, ModelList, ModelObject};
