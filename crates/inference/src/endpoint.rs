//! [`EndpointRequest`] and [`ServedModel`]: the interface between this crate and the server that
//! uses it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;
use serde::Serialize;
use tinkex_text::Tokenizer;

use crate::chat::ChatModel;
use crate::error::InferenceError;
use crate::events::EventSource;
use crate::generation_request::GenerationRequest;
use crate::token_stream::TokenStream;

/// The model that a request names. The server that uses this crate implements the trait.
pub trait ServedModel: Send + Sync {
    /// Returns the name in the request; responses repeat it.
    fn name(&self) -> &str;

    /// Returns the end-of-sequence tokens of the model.
    fn eos(&self) -> &[u32];

    /// Returns the tokenizer; `None` if the model has no readable tokenizer.
    fn tokenizer(&self) -> Option<Tokenizer>;

    /// Returns the chat template, or the reason why the model has no usable chat template.
    ///
    /// # Errors
    /// The error is a message for the client.
    fn chat(&self) -> Result<ChatModel, String>;

    /// Returns the context length in tokens, if it is known.
    fn context(&self) -> Option<usize>;

    /// Returns the size of the longest text that [`encode`](Self::encode) accepts, in bytes. Longer
    /// texts are refused before.
    fn max_text_bytes(&self) -> usize;

    /// Encodes a text, with the special tokens that the tokenizer adds to every text if `special`
    /// is true. May wait for the memory that encoding needs, if the text has more than
    /// [`SHORT_RENDERED_BYTES`](crate::SHORT_RENDERED_BYTES).
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        special: bool,
    ) -> tinkex_text::Result<Vec<u32>>;

    /// Validates a generation for the model and enqueues it. Does not wait for its tokens.
    ///
    /// # Errors
    /// Fails if the request is invalid for the model, or if the server cannot accept it now.
    fn generate(&self, request: GenerationRequest) -> Result<TokenStream, InferenceError>;
}

/// A validated request to an endpoint.
pub trait EndpointRequest: Sized + Send + 'static {
    /// Whether [`start`](Self::start) calls [`ServedModel::chat`]. If false, `start` calls
    /// [`ServedModel::tokenizer`] instead. A server whose models read these files on first use
    /// reads them in advance, so that `start` does not block.
    const USES_CHAT: bool;

    /// Reads the body of a request.
    ///
    /// # Errors
    /// Names the parameter that is missing, invalid or not supported.
    fn read(body: &[u8]) -> Result<Self, InferenceError>;

    /// Returns the name of the model.
    fn model(&self) -> &str;

    /// Renders the prompt and starts the generation. Rendering and tokenizing take CPU time in
    /// proportion to the size of the prompt. `created` is the current time in seconds since the
    /// Unix epoch.
    ///
    /// # Errors
    /// Fails like [`ServedModel::generate`], and names parameters that are invalid for the model.
    fn start(
        self,
        model: &dyn ServedModel,
        created: i64,
    ) -> Result<PendingResponse, InferenceError>;
}

/// Resolves to the response: at once if it is streamed, and after the last token otherwise.
/// Dropping it cancels the generation.
pub type PendingResponse =
    Pin<Box<dyn Future<Output = Result<InferenceResponse, InferenceError>> + Send>>;

/// Response of an inference endpoint.
#[derive(Debug)]
pub struct InferenceResponse {
    /// Id of the response, which contains the id of the generation; `None` if nothing was
    /// generated.
    pub id: Option<String>,
    /// Body of the response.
    pub body: InferenceBody,
}

/// Body of an [`InferenceResponse`].
pub enum InferenceBody {
    /// A complete JSON document.
    Json(Bytes),
    /// Events that are sent as they become available.
    Events(Box<dyn EventSource>),
}

impl InferenceResponse {
    /// Encodes a document.
    ///
    /// # Errors
    /// [`ErrorClass::Internal`](crate::ErrorClass::Internal) if it cannot be encoded.
    pub(crate) fn json(
        id: Option<&str>,
        document: &impl Serialize,
    ) -> Result<Self, InferenceError> {
        let json = serde_json::to_vec(document).map_err(|error| {
            InferenceError::internal(format!("cannot encode the response: {error}"))
        })?;
        Ok(Self { id: id.map(str::to_owned), body: InferenceBody::Json(json.into()) })
    }

    /// Creates a streamed response.
    pub(crate) fn events(id: &str, source: impl EventSource + 'static) -> Self {
        Self { id: Some(id.to_owned()), body: InferenceBody::Events(Box::new(source)) }
    }
}

impl fmt::Debug for InferenceBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(json) => f.debug_tuple("Json").field(json).finish(),
            Self::Events(_) => f.write_str("Events(..)"),
        }
    }
}
