//! Types, routes and codecs of the Tinker API.
//!
//! The client and the server of this workspace share these definitions. The crate performs no I/O:
//! it encodes and decodes bytes, and validates requests.
//!
//! # Overview
//!
//! | Task | Items |
//! |---|---|
//! | Build a prompt or a training example | [`ModelInput`], [`TensorData`], [`Datum`] |
//! | Train | [`CreateModel`], [`ForwardBackward`], [`OptimStep`], [`SaveWeights`], [`LoadWeights`] |
//! | Sample | [`CreateSamplingSession`], [`SampleRequest`], [`SampleResponse`] |
//! | Poll for a result | [`SubmitResponse`], [`RetrieveFuture`], [`PollResponse`] |
//! | List and manage runs, checkpoints and sessions | [`rest`] |
//! | Send or serve requests generically | [`ApiRequest`], [`SubmitRequest`], [`Route`] |
//!
//! # Requests
//!
//! Requests are created by a constructor with the required fields and extended by setters. Token
//! data is shared, not copied, until it is encoded:
//!
//! ```
//! use tinkex_wire::{AdamParams, Datum, ForwardBackward, LossFn, OptimStep, Seq, Tokens};
//!
//! // One prompt and two sampled completions with their log-probabilities and advantages.
//! let prompt = Tokens::from([101, 102, 103]);
//! let batch = vec![
//!     Datum::rollout(&prompt, [7, 8, 9], vec![-0.1, -0.7, -0.2], 1.0)?,
//!     Datum::rollout(&prompt, [7, 4], vec![-0.1, -2.3], -1.0)?,
//! ];
//!
//! let train = ForwardBackward::new("session:train:0", batch, LossFn::ImportanceSampling)
//!     .seq_id(Seq::FIRST);
//! let body = train.to_proto()?; // one buffer of the exact size
//! assert_eq!(ForwardBackward::from_proto(&body).unwrap(), train);
//!
//! let adam = AdamParams::with_learning_rate(1e-4).grad_clip_norm(1.0);
//! let step = OptimStep::new("session:train:0", adam).seq_id(Seq::new(2));
//! # let _ = step;
//! # Ok::<_, tinkex_wire::InvalidInput>(())
//! ```
//!
//! # Encoding and decoding
//!
//! ```
//! use tinkex_wire::{ApiRequest, PollResponse, RequestBody, SampleRequest, SubmitRequest};
//! use tinkex_wire::SamplingParams;
//!
//! // The client encodes a request, and the server decodes it.
//! let request = SampleRequest::new([1, 2, 3], SamplingParams::new().max_tokens(8));
//! assert_eq!(request.target()?, "/api/v1/asample");
//! let RequestBody::Json(body) = request.body()? else { unreachable!() };
//! let decoded: SampleRequest = tinkex_wire::codec::json::decode(&body)?;
//! assert_eq!(decoded, request);
//!
//! // The client polls the future of the request and decodes its result.
//! let response = b"\x0a\x08\x08\x01\x12\x04\x07\x00\x00\x00".to_vec().into();
//! let response = PollResponse::decode("application/x-protobuf", &response)?;
//! let PollResponse::Ready(payload) = response else { unreachable!() };
//! let result = SampleRequest::decode_output(&payload)?;
//! assert_eq!(result.sequences[0].tokens[..], [7]);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! # Rules
//!
//! * Decoding ignores unknown JSON fields, except in optimizer parameters, where ignoring a field
//!   would train another model.
//! * Encoding includes fields with default values and omits nulls, except where null has a meaning.
//! * Malformed bytes yield a [`DecodeError`] that names the field. Decoding never panics, and its
//!   memory use is at most a fixed multiple of the input; decompression takes a limit.
//! * A request is validated once: see [`ApiRequest`].
//! * Types that the protocol may extend are `#[non_exhaustive]`.

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
mod sample_stream;
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
pub use failure::{ErrorBody, ErrorCategory, ErrorCode};
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
    AdamParams, DimuonParams, DiscardGradient, GradientDiscarded, OptimParams, OptimStep,
    OptimStepOutput, OptimizerConfig,
};
pub use output::{LossOutput, LossOutputs, LossRecord};
pub use path::{CheckpointKind, TinkerPath};
pub use request::{ApiRequest, ApiResponse, JSON, PROTO, RequestBody, SubmitRequest};
pub use route::{BodyCodec, Method, ResponseCodec, Route, RouteMatch, percent_decode};
pub use sample_stream::{
    SampleStreamChoice, SampleStreamEvent, SampleStreamLogprobs, SampleStreamRequest,
};
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
pub use tokens::{Tokens, TokensIntoIter};
pub use training::{
    CreateModel, ForwardBackward, ForwardBackwardOutput, GetInfo, LoraConfig, Metrics,
    ModelCreated, ModelData, ModelInfo, ModelUnloaded, PassMode, UnloadModel,
};
pub use weights::{
    CopyWeights, ExternalWeightsSaved, LoadWeights, SamplerWeightsSaved, SaveWeights,
    SaveWeightsExternal, SaveWeightsForSampler, WeightsCopied, WeightsInfo, WeightsInfoRequest,
    WeightsLoaded, WeightsSaved,
};

/// JSON object of any content, for example metadata.
pub type JsonObject = serde_json::Map<String, serde_json::Value>;
