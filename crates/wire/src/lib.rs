//! What crosses the wire of the Tinker API: types, routes and codecs.
//!
//! Client and server of this workspace agree by compiling the same lines. There is no I/O here and
//! nothing asynchronous: bytes go in, types come out, and the way back.
//!
//! # Map
//!
//! | You want to… | Look at |
//! |---|---|
//! | write a prompt or a training example | [`ModelInput`], [`TensorData`], [`Datum`] |
//! | train | [`CreateModel`], [`ForwardBackward`], [`OptimStep`], [`SaveWeights`], [`LoadWeights`] |
//! | sample | [`CreateSamplingSession`], [`SampleRequest`], [`SampleResponse`] |
//! | wait for an answer | [`SubmitResponse`], [`RetrieveFuture`], [`PollResponse`] |
//! | look things up | [`rest`] |
//! | send or serve any of it | [`ApiRequest`], [`SubmitRequest`], [`Route`] |
//!
//! # A request and its answer
//!
//! ```
//! use tinkex_wire::{RequestBody, ApiRequest, PollResponse, SampleRequest, SamplingParams, SubmitRequest};
//!
//! // What a client sends …
//! let request = SampleRequest::new([1, 2, 3], SamplingParams::new().max_tokens(8));
//! assert_eq!(request.target()?, "/api/v1/asample");
//! let RequestBody::Json(body) = request.body()? else { unreachable!() };
//!
//! // … is what a server reads.
//! let read: SampleRequest = tinkex_wire::codec::json::decode(&body)?;
//! assert_eq!(read, request);
//!
//! // The answer comes later, behind a ticket.
//! let reply = b"\x0a\x08\x08\x01\x12\x04\x07\x00\x00\x00".to_vec().into();
//! let PollResponse::Ready(payload) = PollResponse::decode("application/x-protobuf", &reply)? else { unreachable!() };
//! let answer = SampleRequest::decode_output(&payload)?;
//! assert_eq!(answer.sequences[0].tokens[..], [7]);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! # Rules
//!
//! * Unknown fields in JSON are ignored, except in optimizer settings, where ignoring one would
//!   train something else than was asked for.
//! * Fields at their default are sent, nulls are not, except where a null says something.
//!   [`codec::json::without_defaults`] is for old servers that refuse what they do not know.
//! * Bad bytes are a [`DecodeError`] that names the field: never a panic, and never more memory
//!   than a fixed multiple of the input. A compressed body is held to the limit its reader sets.
//! * Token and tensor data is held once and shared; encoding is the only copy.

#![forbid(unsafe_code)]

mod auth;
pub mod codec;
mod config;
mod custom_loss;
mod datum;
mod error;
mod failure;
mod future;
mod handle;
pub mod header;
mod ids;
mod input;
mod json_training;
mod logprobs;
mod loss;
mod metadata;
mod optim;
mod output;
mod path;
mod request;
pub mod rest;
mod route;
mod sampled;
mod sampling;
mod secret;
mod seed;
mod session;
mod setters;
mod size;
mod slice;
mod telemetry;
mod tensor;
mod time;
mod tokens;
mod training;
mod weights;

pub use auth::{
    ApiKeyDetails, ApiKeyInfo, ApiKeyRequest, AuthToken, AuthTokenRequest, DeleteApiKey,
    OrgDetails, UserDetails,
};
pub use config::{
    ClientConfig, ClientConfigRequest, DynamicConfig, DynamicConfigRequest, Health, HealthRequest,
    HealthStatus, SDK_VERSION, ServerCapabilities, ServerCapabilitiesRequest, SupportedModel,
};
pub use custom_loss::{
    CreateCustomLoss, CustomLossCreated, GraphArg, GraphInput, GraphNode, LossGraph, NodeOp,
};
pub use datum::{
    Datum, DatumBuilder, PerTokenValues, Provenance, ProvenanceSpan, SpanSource, loss_input,
};
pub use error::{DecodeError, DecodeErrorKind, InvalidInput};
pub use failure::{ErrorBody, ErrorCategory};
pub use future::{
    CancelFuture, CompletedFuture, FuturesRetrieved, FuturesTarget, PollResponse, QueueState,
    QueueStatus, RawPollResponse, RequestFailed, ResultPayload, RetrieveFuture, RetrieveFutures,
    SubmitResponse,
};
pub use handle::{HandleHolder, SamplerHandle};
pub use ids::{LossId, ModelId, RequestId, SamplerId, Seq, SequenceId, SessionId};
pub use input::{ImageFormat, InputChunk, ModelInput};
pub use json_training::JsonForwardBackward;
pub use logprobs::{Logprobs, TopkLogprobs};
pub use loss::{LossConfig, LossFn, LossSetting};
pub use metadata::Metadata;
pub use optim::{
    AdamParams, DimuonParams, OptimParams, OptimStep, OptimStepOutput, OptimizerConfig,
};
pub use output::{LossOutput, LossOutputs, LossRecord};
pub use path::{CheckpointKind, TinkerPath};
pub use request::{ApiRequest, ApiResponse, JSON, PROTO, RequestBody, SubmitRequest};
pub use route::{BodyCodec, Method, ResponseCodec, Route, RouteMatch};
pub use sampled::{PromptAltTokens, SampleResponse, SampledSequence, StopReason};
pub use sampling::{
    CreateSamplingSession, JoinSamplingSession, SampleRequest, SamplingParams,
    SamplingSessionCreated, SamplingSessionJoined, StopCondition,
};
pub use secret::Secret;
pub use session::{
    CreateSession, FinishDetails, FinishReason, FinishSession, HeartbeatAcknowledged,
    SessionCreated, SessionHeartbeat,
};
pub use slice::SharedSlice;
pub use telemetry::{
    EventKind, Severity, TelemetryBatch, TelemetryEvent, TelemetryResponse, TelemetryStatus,
    format_duration,
};
pub use tensor::{DType, Shape, TensorData, TensorElement, TensorValues};
pub use time::Timestamp;
pub use tokens::Tokens;
pub use training::{
    CreateModel, ForwardBackward, ForwardBackwardOutput, GetInfo, LoraConfig, Metrics,
    ModelCreated, ModelData, ModelInfo, PassMode,
};
pub use weights::{
    CopyWeights, ExternalWeightsSaved, LoadWeights, SamplerWeightsSaved, SaveWeights,
    SaveWeightsExternal, SaveWeightsForSampler, WeightsCopied, WeightsInfo, WeightsInfoRequest,
    WeightsLoaded, WeightsSaved,
};

/// A JSON object of any content: metadata, settings of unknown optimizers, event data.
pub type JsonObject = serde_json::Map<String, serde_json::Value>;

/// The README's example, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
