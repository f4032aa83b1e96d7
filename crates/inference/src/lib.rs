//! Requests of the OpenAI and Anthropic APIs, without HTTP and without a model.
//!
//! The crate reads and validates request bodies, renders prompts with the chat template of a model,
//! converts sampled tokens to answers, and writes responses and server-sent events. The server
//! provides a [`ServedModel`], which enqueues a [`GenerationRequest`] and returns its
//! [`TokenStream`].
//!
//! A server handles a request in four steps:
//!
//! 1. [`EndpointRequest::read`] validates the body.
//! 2. The server finds the weights that [`EndpointRequest::model`] names.
//! 3. [`EndpointRequest::start`] renders the prompt and starts the generation.
//! 4. The [`PendingResponse`] resolves to one JSON document, or to a source of events that are sent
//!    while tokens are sampled.
//!
//! ```
//! use tinkex_inference::{
//!     ChatModel, EndpointRequest as _, GeneratedToken, GenerationRequest, InferenceBody,
//!     InferenceError, PromptReport, ServedModel, StopReason, TokenStream, openai, token_stream,
//! };
//! use tinkex_text::Tokenizer;
//!
//! /// Answers every prompt with token 7.
//! struct Constant;
//!
//! impl ServedModel for Constant {
//!     fn name(&self) -> &str {
//!         "constant"
//!     }
//!
//!     fn eos(&self) -> &[u32] {
//!         &[]
//!     }
//!
//!     fn tokenizer(&self) -> Option<Tokenizer> {
//!         None
//!     }
//!
//!     fn chat(&self) -> Result<ChatModel, String> {
//!         ChatModel::new(self.name(), None, self.eos(), 10)
//!     }
//!
//!     fn context(&self) -> Option<usize> {
//!         Some(100)
//!     }
//!
//!     fn max_text_bytes(&self) -> usize {
//!         1_000
//!     }
//!
//!     fn encode(&self, tokenizer: &Tokenizer, text: &str, _: bool) -> tinkex_text::Result<Vec<u32>> {
//!         Ok(tokenizer.encode(text)?.to_vec())
//!     }
//!
//!     fn generate(&self, _: GenerationRequest) -> Result<TokenStream, InferenceError> {
//!         let (sink, stream) = token_stream("1".to_owned(), |_| {});
//!         sink.prompt(PromptReport::default());
//!         let stop = Some(StopReason::Length);
//!         let top = Box::default();
//!         sink.token(GeneratedToken { completion: 0, token: 7, logprob: -0.5, top, stop });
//!         sink.finish(Ok(()));
//!         Ok(stream)
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), InferenceError> {
//! let body = br#"{"model": "constant", "prompt": [1, 2], "return_token_ids": true}"#;
//! let request = openai::CompletionRequest::read(body)?;
//! assert_eq!(request.model(), "constant");
//! let response = request.start(&Constant, 0)?.await?;
//! let InferenceBody::Json(json) = response.body else { panic!("the request is not streamed") };
//! let document: serde_json::Value = serde_json::from_slice(&json).unwrap();
//! assert_eq!(document["choices"][0]["token_ids"], serde_json::json!([7]));
//! assert_eq!(document["usage"]["total_tokens"], 3);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod anthropic;
mod chat;
mod endpoint;
mod error;
mod events;
mod generation_request;
pub mod openai;
mod parameters;
mod text_limit;
mod token_stream;

pub use self::chat::ChatModel;
pub use self::endpoint::{
    EndpointRequest, InferenceBody, InferenceResponse, PendingResponse, ServedModel,
};
pub use self::error::{ErrorClass, InferenceError};
pub use self::events::EventSource;
pub(crate) use self::events::EventWriter;
pub use self::generation_request::GenerationRequest;
pub(crate) use self::parameters::Parameters;
pub use self::text_limit::SHORT_RENDERED_BYTES;
pub(crate) use self::text_limit::{TextLimit, encode};
pub use self::token_stream::{
    GeneratedToken, GenerationProgress, PromptReport, StopReason, StreamDrop, TokenCounts,
    TokenSink, TokenStream, token_stream,
};
