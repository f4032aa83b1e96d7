//! Futures: asynchronous requests and the polling for their results.
//!
//! The server responds to a [`SubmitRequest`](crate::SubmitRequest) with a [`SubmitResponse`]. The
//! client polls its `request_id` with [`RetrieveFuture`] and decodes the [`PollResponse`].
//! [`PollResponse::decode`] accepts all forms of a poll response, including the forms that older
//! versions of the hosted service sent.

use std::borrow::Cow;
use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use crate::codec::json;
use crate::failure::{ErrorCategory, ErrorCode};
use crate::ids::{ModelId, RequestId, SamplerId, SequenceId};
use crate::request::{
    ApiRequest, ApiResponse, JSON, PROTO, RequestBody, json_request, json_response,
};
use crate::route::Route;
use crate::setters::setters;
use crate::{DecodeError, DecodeErrorKind, InvalidInput};

/// Response to a [`SubmitRequest`](crate::SubmitRequest): the id of the future that resolves to the
/// result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SubmitResponse {
    /// Id to poll with.
    pub request_id: RequestId,
    /// Id of the model that executes the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_id: Option<ModelId>,
    /// Ids of the sequences that a sampling request will return. Older servers do not send them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_sequence_ids: Option<Vec<SequenceId>>,
}

impl SubmitResponse {
    /// Creates a response without a model and sequence ids.
    pub fn new(request_id: impl Into<RequestId>) -> Self {
        Self { request_id: request_id.into(), model_id: None, sample_sequence_ids: None }
    }
}

setters!(SubmitResponse {
    model_id: Option<ModelId>;
    sample_sequence_ids: Option<Vec<SequenceId>>;
});

/// Polls a future. The server delays the response for a while if there is no result yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RetrieveFuture {
    /// Id of the future.
    pub request_id: RequestId,
    /// Whether the server may respond to the poll for a large result with its size only.
    #[serde(default)]
    pub allow_metadata_only: bool,
}

impl RetrieveFuture {
    /// Polls the future `request_id`; large results are returned in full.
    pub fn new(request_id: impl Into<RequestId>) -> Self {
        Self { request_id: request_id.into(), allow_metadata_only: false }
    }
}

setters!(RetrieveFuture { allow_metadata_only: bool; });

/// Cancels a future whose result is no longer needed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CancelFuture {
    /// Id of the future.
    pub request_id: RequestId,
}

impl CancelFuture {
    /// Cancels the future `request_id`.
    pub fn new(request_id: impl Into<RequestId>) -> Self {
        Self { request_id: request_id.into() }
    }
}

/// Response to [`RetrieveFuture`]: the current state of a future.
#[derive(Clone, Debug, PartialEq)]
pub enum PollResponse {
    /// The result.
    Ready(ResultPayload),
    /// The result is not available yet.
    TryAgain(QueueStatus),
    /// The size of a large result. Poll again without
    /// [`allow_metadata_only`](RetrieveFuture::allow_metadata_only) to retrieve the result.
    MetadataOnly {
        /// Size of the result in bytes.
        response_payload_size: u64,
    },
    /// The request failed permanently.
    Failed(RequestFailed),
}

/// Encoded result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResultPayload {
    /// JSON result.
    Json(Bytes),
    /// Protobuf result.
    Proto(Bytes),
}

impl ResultPayload {
    /// Returns the bytes of a JSON result.
    ///
    /// # Errors
    /// Returns an error if the result is protobuf.
    pub fn json(&self) -> Result<&Bytes, DecodeError> {
        match self {
            Self::Json(bytes) => Ok(bytes),
            Self::Proto(_) => {
                let detail = "expected a JSON result, but the result is protobuf";
                Err(DecodeError::new(DecodeErrorKind::Json, detail))
            }
        }
    }

    /// Returns the value of the `Content-Type` header.
    #[must_use]
    pub const fn content_type(&self) -> &'static str {
        match self {
            Self::Json(_) => JSON,
            Self::Proto(_) => PROTO,
        }
    }
}

/// Queue state of a request without a result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStatus {
    /// State of the queue; `None` if the server did not report it.
    pub queue_state: Option<QueueState>,
    /// Reason for a paused queue.
    pub queue_state_reason: Option<String>,
}

impl QueueStatus {
    /// Creates a status from a state and an optional reason.
    #[must_use]
    pub fn new(queue_state: QueueState, queue_state_reason: Option<String>) -> Self {
        Self { queue_state: Some(queue_state), queue_state_reason }
    }
}

/// State of the queue that holds a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QueueState {
    /// The server processes the queue.
    Active,
    /// The queue is paused because the server has no capacity.
    PausedCapacity,
    /// The queue is paused because the caller exceeded a rate limit.
    PausedRateLimit,
    /// A state that this version does not know.
    Unknown,
}

impl QueueState {
    /// Returns the name in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::PausedCapacity => "paused_capacity",
            Self::PausedRateLimit => "paused_rate_limit",
            Self::Unknown => "unknown",
        }
    }

    /// Returns the state with the given name: [`QueueState::Unknown`] for an unknown name, `None`
    /// for an empty one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let known = [Self::Active, Self::PausedCapacity, Self::PausedRateLimit];
        let found = known.into_iter().find(|state| state.as_str() == name);
        if name.is_empty() { None } else { Some(found.unwrap_or(Self::Unknown)) }
    }
}

impl fmt::Display for QueueState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Failure of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RequestFailed {
    /// Description of the failure.
    pub error: String,
    /// Side that caused the failure.
    pub category: ErrorCategory,
    /// Cause of the failure, if the server reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<ErrorCode>,
}

impl RequestFailed {
    /// Creates a failure without a code.
    pub fn new(error: impl Into<String>, category: ErrorCategory) -> Self {
        Self { error: error.into(), category, code: None }
    }

    /// Sets the code (default: none).
    #[must_use]
    pub fn code(mut self, code: Option<ErrorCode>) -> Self {
        self.code = code;
        self
    }
}

/// Fields that distinguish the forms of a poll response. All other fields are skipped.
#[derive(Deserialize, Default)]
struct PollFields<'a> {
    #[serde(borrow, default, rename = "type", deserialize_with = "text")]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow, default, deserialize_with = "text")]
    status: Option<Cow<'a, str>>,
    #[serde(borrow, default, deserialize_with = "text")]
    queue_state: Option<Cow<'a, str>>,
    #[serde(borrow, default, deserialize_with = "text")]
    queue_state_reason: Option<Cow<'a, str>>,
    #[serde(default)]
    response_payload_size: Option<u64>,
    #[serde(borrow, default, deserialize_with = "present")]
    error: Option<&'a RawValue>,
    #[serde(default)]
    category: ErrorCategory,
    #[serde(borrow, default, deserialize_with = "text")]
    code: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    result: Option<&'a RawValue>,
}

/// Decodes a null as present: a response with `"error": null` is a failure.
fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(from).map(Some)
}

/// Decodes a string, or `None` for any other value: results may use these names for other types.
fn text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Cow<'de, str>>, D::Error> {
    let raw = <&RawValue>::deserialize(from)?;
    Ok(serde_json::from_str::<BorrowedString<'de>>(raw.get()).ok().map(|string| string.0))
}

#[derive(Deserialize)]
struct BorrowedString<'a>(#[serde(borrow)] Cow<'a, str>);

impl PollResponse {
    /// Decodes a successful response to [`RetrieveFuture`].
    ///
    /// # Errors
    /// Returns an error if the body is neither protobuf nor JSON.
    pub fn decode(content_type: &str, body: &Bytes) -> Result<Self, DecodeError> {
        if content_type.to_ascii_lowercase().contains(PROTO) {
            return Ok(Self::Ready(ResultPayload::Proto(body.clone())));
        }
        let ready = || Self::Ready(ResultPayload::Json(body.clone()));
        // JSON other than an object is a result; the decoder of the result rejects it.
        if body.trim_ascii_start().first() != Some(&b'{') {
            let _: serde::de::IgnoredAny = json::decode_borrowed(body)?;
            return Ok(ready());
        }
        let fields: PollFields<'_> = json::decode_borrowed(body)?;
        let status = fields.status.as_deref();
        Ok(match (fields.kind.as_deref(), status) {
            (Some("try_again"), _) => Self::TryAgain(fields.queue_status()),
            (_, Some("complete_metadata")) => Self::MetadataOnly {
                response_payload_size: fields.response_payload_size.unwrap_or(0),
            },
            _ if fields.error.is_some() => Self::Failed(fields.failed()),
            // Forms of older servers.
            (_, Some("pending")) => Self::TryAgain(fields.queue_status()),
            (_, Some("failed")) => Self::Failed(fields.failed()),
            (_, Some("completed")) => match fields.result {
                Some(result) => {
                    Self::Ready(ResultPayload::Json(body.slice_ref(result.get().as_bytes())))
                }
                None => {
                    let detail = "missing from a completed response";
                    return Err(DecodeError::new(DecodeErrorKind::Missing, detail).within("result"));
                }
            },
            _ => ready(),
        })
    }

    /// Decodes the body of a 408 response, which a poll without a result ends with. Returns the
    /// default status if the body is missing or malformed.
    #[must_use]
    pub fn decode_timeout(body: &Bytes) -> QueueStatus {
        json::decode_borrowed::<PollFields<'_>>(body)
            .map_or_else(|_| QueueStatus::default(), |fields| fields.queue_status())
    }

    /// Encodes the response. Returns its content type and body.
    ///
    /// # Panics
    /// Never panics: strings and integers always encode as JSON.
    #[must_use]
    pub fn encode(&self, request_id: &RequestId) -> (&'static str, Bytes) {
        #[derive(Serialize)]
        #[serde(tag = "type", rename = "try_again")]
        struct TryAgain<'a> {
            request_id: &'a RequestId,
            queue_state: &'static str,
            #[serde(skip_serializing_if = "Option::is_none")]
            queue_state_reason: Option<&'a str>,
        }

        #[derive(Serialize)]
        struct Metadata {
            status: &'static str,
            response_payload_size: u64,
        }

        let body = match self {
            Self::Ready(ResultPayload::Proto(bytes)) => return (PROTO, bytes.clone()),
            Self::Ready(ResultPayload::Json(bytes)) => Ok(bytes.clone()),
            Self::TryAgain(pending) => json::encode(&TryAgain {
                request_id,
                queue_state: pending.queue_state.unwrap_or(QueueState::Active).as_str(),
                queue_state_reason: pending.queue_state_reason.as_deref(),
            }),
            Self::MetadataOnly { response_payload_size } => json::encode(&Metadata {
                status: "complete_metadata",
                response_payload_size: *response_payload_size,
            }),
            Self::Failed(failed) => json::encode(failed),
        };
        (JSON, body.expect("strings and integers always encode as JSON"))
    }
}

impl PollFields<'_> {
    fn queue_status(&self) -> QueueStatus {
        QueueStatus {
            queue_state: self.queue_state.as_deref().and_then(QueueState::from_name),
            queue_state_reason: self
                .queue_state_reason
                .as_deref()
                .filter(|reason| !reason.is_empty())
                .map(str::to_owned),
        }
    }

    fn failed(&self) -> RequestFailed {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum ErrorForm<'a> {
            Text(Cow<'a, str>),
            Object { message: Option<String>, category: Option<ErrorCategory> },
        }

        let raw = self.error.map_or("the server did not report a reason", RawValue::get);
        let (error, category) = match serde_json::from_str(raw) {
            Ok(ErrorForm::Text(text)) => (text.into_owned(), self.category),
            Ok(ErrorForm::Object { message, category }) => {
                (message.unwrap_or_else(|| raw.to_owned()), category.unwrap_or(self.category))
            }
            Err(_) => (raw.to_owned(), self.category),
        };
        let code = self.code.as_deref().and_then(ErrorCode::from_name);
        RequestFailed { error, category, code }
    }
}

/// Polls all futures of a sampling client with one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RetrieveFutures {
    /// Sampling client whose futures are polled.
    pub target: FuturesTarget,
    /// Cursor of the previous response; 0 for the first request.
    #[serde(default)]
    pub prev_cursor: u64,
    /// Maximum time in seconds for which the server may delay the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<f64>,
    /// Futures whose results the client has received. The server may delete these results.
    #[serde(default)]
    pub retrieved_request_ids: Vec<RequestId>,
}

impl RetrieveFutures {
    /// Polls all futures of `target` from the beginning.
    #[must_use]
    pub fn new(target: FuturesTarget) -> Self {
        Self { target, prev_cursor: 0, timeout: None, retrieved_request_ids: Vec::new() }
    }
}

setters!(RetrieveFutures {
    prev_cursor: u64;
    retrieved_request_ids: Vec<RequestId>;
});

/// Sampling client whose futures are polled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "sampling_session")]
#[non_exhaustive]
pub struct FuturesTarget {
    /// Id of the sampling session.
    pub sampling_session_id: SamplerId,
    /// Number of the client within the sampling session.
    #[serde(default)]
    pub cloned_sampler_id: u64,
}

impl FuturesTarget {
    /// Targets client number `cloned_sampler_id` of a sampling session.
    #[must_use]
    pub fn new(sampling_session_id: SamplerId, cloned_sampler_id: u64) -> Self {
        Self { sampling_session_id, cloned_sampler_id }
    }
}

/// Response to [`RetrieveFutures`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FuturesRetrieved {
    /// Futures that completed after the previous cursor.
    pub completions: Vec<CompletedFuture>,
    /// Cursor for the next request.
    pub cursor: u64,
}

impl FuturesRetrieved {
    /// Creates a response.
    #[must_use]
    pub fn new(completions: Vec<CompletedFuture>, cursor: u64) -> Self {
        Self { completions, cursor }
    }
}

/// A future that completed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum CompletedFuture {
    /// The request succeeded.
    Finished {
        /// Id of the future.
        request_id: RequestId,
        /// Size of the result in bytes, if known.
        #[serde(skip_serializing_if = "Option::is_none")]
        response_payload_uncompressed_size: Option<u64>,
    },
    /// The request failed. Poll the future to retrieve the failure.
    Failed {
        /// Id of the future.
        request_id: RequestId,
    },
}

impl<'de> Deserialize<'de> for CompletedFuture {
    /// Decodes a completion without a `state` as finished.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct CompletionFields {
            #[serde(default)]
            state: CompletionState,
            request_id: RequestId,
            #[serde(default)]
            response_payload_uncompressed_size: Option<u64>,
        }

        #[derive(Deserialize, Default)]
        #[serde(rename_all = "lowercase")]
        enum CompletionState {
            #[default]
            Finished,
            Failed,
        }

        let CompletionFields { state, request_id, response_payload_uncompressed_size } =
            CompletionFields::deserialize(deserializer)?;
        Ok(match state {
            CompletionState::Finished => {
                Self::Finished { request_id, response_payload_uncompressed_size }
            }
            CompletionState::Failed => Self::Failed { request_id },
        })
    }
}

impl CompletedFuture {
    /// Returns the id of the future.
    #[must_use]
    pub fn request_id(&self) -> &RequestId {
        match self {
            Self::Finished { request_id, .. } | Self::Failed { request_id } => request_id,
        }
    }
}

json_response!(SubmitResponse, FuturesRetrieved);

json_request! {
    CancelFuture: CancelFuture => ();
    RetrieveFutures: RetrieveFutures => FuturesRetrieved;
}

impl ApiRequest for RetrieveFuture {
    type Response = RawPollResponse;
    const ROUTE: Route = Route::RetrieveFuture;

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Json(json::encode(self)?))
    }
}

/// Undecoded body of a response to [`RetrieveFuture`]. Decode it with its content type by
/// [`PollResponse::decode`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawPollResponse(pub Bytes);

impl ApiResponse for RawPollResponse {
    fn from_body(body: &Bytes) -> Result<Self, DecodeError> {
        Ok(Self(body.clone()))
    }
}
