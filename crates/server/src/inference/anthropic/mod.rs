//! The Anthropic-compatible endpoints, without HTTP: `messages` and `messages/count_tokens`.

mod documents;
mod error;
mod event_stream;
mod message_blocks;
mod messages;
mod request;

pub(crate) use self::error::error_document;
pub(crate) use self::messages::{count_tokens, messages};
