//! The Anthropic API: `messages` and `messages/count_tokens`.
//!
//! `request` and `message_blocks` read a request, `messages` starts the generation and collects or
//! streams the response, `event_stream` writes the sequence of events. The other modules define the
//! JSON documents of responses, events and errors.

mod documents;
mod error;
mod event_stream;
mod message_blocks;
mod messages;
mod request;

pub use self::error::{AnthropicError, error_document};
pub use self::request::{CountTokensRequest, MessagesRequest};
