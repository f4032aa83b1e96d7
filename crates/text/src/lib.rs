//! Converts between text and tokens of language models: tokenizers, chat templates, answers.
//!
//! | Task | Types |
//! |---|---|
//! | Convert text to tokens and back | [`Tokenizer`] |
//! | Decode tokens as they are sampled | [`TextDecoder`] |
//! | Split an answer into reasoning, content and tool calls | [`AnswerParser`], [`AnswerEvent`] |
//! | Convert a conversation to tokens | `ChatFormat`, `Message` (feature `chat`) |
//!
//! Everything is computed in memory and blocks; only [`Tokenizer::from_folder`] reads files. Python
//! code that comes with a model is never run.

#![forbid(unsafe_code)]

mod answer;
#[cfg(feature = "chat")]
mod chat;
mod decoder;
mod error;
mod stop_strings;
mod tokenizer;

pub use answer::{AnswerEvent, AnswerParser, ReasoningStart};
#[cfg(feature = "chat")]
pub use chat::{AssistantSpans, ChatFormat, Message};
pub use decoder::TextDecoder;
pub use error::{Error, ErrorKind, Result};
pub use tokenizer::{Tokenizer, files};
