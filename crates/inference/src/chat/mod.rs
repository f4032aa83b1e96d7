//! Answers to conversations, shared by the OpenAI and the Anthropic API.
//!
//! 1. An endpoint converts its request to a [`ChatRequest`] and a [`GenerationRequest`].
//! 2. [`Answers::start`] renders the prompt with the chat template of the model and starts the
//!    generation.
//! 3. [`Answers::poll_updates`] returns the parts of the answers (reasoning, content, tool calls)
//!    as they are sampled, and [`Answers::collect`] returns the complete answers at the end.
//!
//! [`GenerationRequest`]: super::GenerationRequest

mod answer;
mod answer_reader;
mod answers;
mod chat_model;
mod content;
mod prompt;
mod request;
mod tools;

pub(crate) use self::answer::{Answer, AnswerEnd, AnswerUpdate};
pub(crate) use self::answers::{AnswerUsage, Answers};
pub use self::chat_model::ChatModel;
pub(crate) use self::content::{TextOrParts, read_list};
pub(crate) use self::request::{ChatMessage, ChatRequest, PastToolCall, PromptEnd};
pub(crate) use self::tools::{Tool, ToolChoice};
