//! Tickets and the answers behind them.
//!
//! A heavy call is answered at once with a [`SubmitResponse`]; asking for it with [`RetrieveFuture`] gives
//! an [`PollResponse`]. [`PollResponse::decode`] is the only place that knows the forms an answer can take,
//! those of older servers included.

use std::borrow::Cow;
use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use crate::codec::json;
use crate::failure::ErrorCategory;
use crate::ids::{ModelId, RequestId, SamplerId, SequenceId};
use crate::request::{
    ApiRequest, ApiResponse, JSON, PROTO, RequestBody, json_request, json_response,
};
use crate::route::Route;
use crate::{DecodeError, DecodeErrorKind, InvalidInput};

/// An answer to come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubmitResponse {
    /// What to ask for it with.
    pub request_id: RequestId,
    /// The model it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_id: Option<ModelId>,
    /// What the samples will be called, one each. Older servers do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_sequence_ids: Option<Vec<SequenceId>>,
}

/// Asks for the answer behind a ticket. The server holds the call for a while if there is none yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetrieveFuture {
    /// The ticket.
    pub request_id: RequestId,
    /// Whether a large answer may be announced with its size first.
    #[serde(default)]
    pub allow_metadata_only: bool,
}

/// Says that nobody waits for a ticket any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CancelFuture {
    /// The ticket.
    pub request_id: RequestId,
}

/// What stands behind a ticket right now.
#[derive(Clone, Debug, PartialEq)]
pub enum PollResponse {
    /// The answer.
    Ready(ResultPayload),
    /// Not yet.
    TryAgain(QueueStatus),
    /// The answer is there, and this large. Ask again without
    /// [`allow_metadata_only`](RetrieveFuture::allow_metadata_only).
    MetadataOnly {
        /// Its size in bytes.
        response_payload_size: u64,
    },
    /// The work failed, for good.
    Failed(RequestFailed),
}

/// An answer, not yet decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResultPayload {
    /// JSON.
    Json(Bytes),
    /// Protobuf.
    Proto(Bytes),
}

impl ResultPayload {
    /// The bytes of a JSON answer.
    ///
    /// # Errors
    /// If the answer is protobuf.
    pub fn json(&self) -> Result<&Bytes, DecodeError> {
        match self {
            Self::Json(bytes) => Ok(bytes),
            Self::Proto(_) => {
                let why = "a protobuf answer where only JSON is possible";
                Err(DecodeError::new(DecodeErrorKind::Json, why))
            }
        }
    }

    /// The content type to send.
    #[must_use]
    pub const fn content_type(&self) -> &'static str {
        match self {
            Self::Json(_) => JSON,
            Self::Proto(_) => PROTO,
        }
    }
}

/// Why there is no answer yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueStatus {
    /// Whether work goes on; `None` if the server did not say.
    pub queue_state: Option<QueueState>,
    /// Why it does not.
    pub queue_state_reason: Option<String>,
}

/// Whether work goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueueState {
    /// It does.
    Active,
    /// The server has no room.
    PausedCapacity,
    /// The caller asks for too much.
    PausedRateLimit,
    /// In a way that this version has no name for.
    Unknown,
}

impl QueueState {
    /// The word on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::PausedCapacity => "paused_capacity",
            Self::PausedRateLimit => "paused_rate_limit",
            Self::Unknown => "unknown",
        }
    }

    /// The state with this name; `None` if there is no name.
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

/// Work that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RequestFailed {
    /// What went wrong, for people.
    pub error: String,
    /// Whose fault it was.
    pub category: ErrorCategory,
}

/// The fields that tell one form of answer from another. Everything else is skipped, not stored.
#[derive(Deserialize, Default)]
struct Marks<'a> {
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
    #[serde(borrow, default)]
    result: Option<&'a RawValue>,
}

/// A null is present too: an answer with `"error": null` is a failure.
fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(from).map(Some)
}

/// A text, or nothing if it is something else: results may use the same names for other things.
fn text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Cow<'de, str>>, D::Error> {
    let raw = <&RawValue>::deserialize(from)?;
    Ok(serde_json::from_str::<BorrowedText<'de>>(raw.get()).ok().map(|text| text.0))
}

#[derive(Deserialize)]
struct BorrowedText<'a>(#[serde(borrow)] Cow<'a, str>);

impl PollResponse {
    /// Reads a successful reply to [`RetrieveFuture`].
    ///
    /// # Errors
    /// If the body is neither protobuf nor JSON.
    pub fn decode(content_type: &str, body: &Bytes) -> Result<Self, DecodeError> {
        if content_type.to_ascii_lowercase().contains(PROTO) {
            return Ok(Self::Ready(ResultPayload::Proto(body.clone())));
        }
        let ready = || Self::Ready(ResultPayload::Json(body.clone()));
        // Any JSON that is not an object is an answer, though no call has such a one.
        if body.trim_ascii_start().first() != Some(&b'{') {
            let _: serde::de::IgnoredAny = json::decode_borrowed(body)?;
            return Ok(ready());
        }
        let marks: Marks<'_> = json::decode_borrowed(body)?;
        let status = marks.status.as_deref();
        Ok(match (marks.kind.as_deref(), status) {
            (Some("try_again"), _) => Self::TryAgain(marks.pending()),
            (_, Some("complete_metadata")) => Self::MetadataOnly {
                response_payload_size: marks.response_payload_size.unwrap_or(0),
            },
            _ if marks.error.is_some() => Self::Failed(marks.failed()),
            // The wrappers of older servers.
            (_, Some("pending")) => Self::TryAgain(marks.pending()),
            (_, Some("failed")) => Self::Failed(marks.failed()),
            (_, Some("completed")) => match marks.result {
                Some(result) => {
                    Self::Ready(ResultPayload::Json(body.slice_ref(result.get().as_bytes())))
                }
                None => {
                    let why = "is not there, though the work is completed";
                    return Err(DecodeError::new(DecodeErrorKind::Missing, why).within("result"));
                }
            },
            _ => ready(),
        })
    }

    /// Reads the body of a 408: a poll that ended without an answer may say why. A body that is
    /// missing or unreadable says nothing.
    #[must_use]
    pub fn decode_timeout(body: &Bytes) -> QueueStatus {
        json::decode_borrowed::<Marks<'_>>(body)
            .map_or_else(|_| QueueStatus::default(), |m| m.pending())
    }

    /// The body to send for this outcome, and its content type.
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
        (JSON, body.expect("texts and numbers are always JSON"))
    }
}

impl Marks<'_> {
    fn pending(&self) -> QueueStatus {
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
        enum Form<'a> {
            Text(Cow<'a, str>),
            Wrapped { message: Option<String>, category: Option<ErrorCategory> },
        }

        let raw = self.error.map_or("the server gave no reason", RawValue::get);
        let (error, category) = match serde_json::from_str(raw) {
            Ok(Form::Text(text)) => (text.into_owned(), self.category),
            Ok(Form::Wrapped { message, category }) => {
                (message.unwrap_or_else(|| raw.to_owned()), category.unwrap_or(self.category))
            }
            Err(_) => (raw.to_owned(), self.category),
        };
        RequestFailed { error, category }
    }
}

/// Asks which tickets of a sampling session have answers, for many at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RetrieveFutures {
    /// Whose tickets.
    pub target: FuturesTarget,
    /// How far the last reply got.
    #[serde(default)]
    pub prev_cursor: u64,
    /// How long to hold the call, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<f64>,
    /// Tickets whose answers have arrived: the server may forget them.
    #[serde(default)]
    pub retrieved_request_ids: Vec<RequestId>,
}

/// Whose tickets are asked about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "sampling_session")]
pub struct FuturesTarget {
    /// The sampling session.
    pub sampling_session_id: SamplerId,
    /// The client of it.
    #[serde(default)]
    pub cloned_sampler_id: u64,
}

/// Which tickets have answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FuturesRetrieved {
    /// Those that got one since the last call.
    pub completions: Vec<CompletedFuture>,
    /// How far this reply gets.
    pub cursor: u64,
}

/// A ticket that has an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum CompletedFuture {
    /// A good one.
    Finished {
        /// The ticket.
        request_id: RequestId,
        /// The answer's size in bytes, if known.
        #[serde(skip_serializing_if = "Option::is_none")]
        response_payload_uncompressed_size: Option<u64>,
    },
    /// A failure; ask for the ticket to learn more.
    Failed {
        /// The ticket.
        request_id: RequestId,
    },
}

impl<'de> Deserialize<'de> for CompletedFuture {
    /// A completion that does not say so is a finished one.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Form {
            #[serde(default)]
            state: State,
            request_id: RequestId,
            #[serde(default)]
            response_payload_uncompressed_size: Option<u64>,
        }

        #[derive(Deserialize, Default)]
        #[serde(rename_all = "lowercase")]
        enum State {
            #[default]
            Finished,
            Failed,
        }

        let Form { state, request_id, response_payload_uncompressed_size } =
            Form::deserialize(deserializer)?;
        Ok(match state {
            State::Finished => Self::Finished { request_id, response_payload_uncompressed_size },
            State::Failed => Self::Failed { request_id },
        })
    }
}

impl CompletedFuture {
    /// The ticket.
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

/// The body of a poll's reply. What it means depends on the content type: see [`PollResponse::decode`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawPollResponse(pub Bytes);

impl ApiResponse for RawPollResponse {
    fn from_body(body: &Bytes) -> Result<Self, DecodeError> {
        Ok(Self(body.clone()))
    }
}
