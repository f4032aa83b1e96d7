//! Client SDK for the Tinker API: fine-tunes and samples language models.
//!
//! # Overview
//!
//! ```no_run
//! use tinkex::{AdamParams, Datum, LossFn, SamplingParams, ServiceClient};
//!
//! # async fn run() -> tinkex::Result<()> {
//! // 1. Configure. Nothing is sent yet; `ServiceClient::builder` has more settings.
//! let service = ServiceClient::from_env()?; // TINKER_API_KEY, TINKER_BASE_URL
//!
//! // 2. Train. A call starts at once; the server executes the calls of a model in order.
//! let model = service.create_lora_training_client("Qwen/Qwen3-8B").await?;
//! let data = vec![Datum::completion([1, 2, 3], [4, 5])?];
//! let adam = AdamParams::with_learning_rate(1e-4);
//! let step = model.step(data, LossFn::CrossEntropy, adam).await?;
//! println!("{:?}", step.loss());
//!
//! // 3. Sample from the trained weights.
//! let sampler = model.save_weights_and_get_sampling_client().await?;
//! let output = sampler.sample([1, 2, 3], SamplingParams::new().max_tokens(64)).await?;
//! println!("{:?}", &output.sequences[0].tokens[..]);
//!
//! // 4. Save a checkpoint, look it up, and finish the session.
//! let path = model.save_state("first").await?;
//! println!("{path}: {:?}", service.rest().get_weights_info(&path).await?);
//! service.finish().await;
//! # Ok(()) }
//! ```
//!
//! | Task | Types |
//! |---|---|
//! | Connect | [`ServiceClient`], [`ServiceClientBuilder`], [`CallOptions`] |
//! | Train | [`TrainingClient`], [`LoraOptions`], [`Datum`], [`LossFn`], [`AdamParams`], [`StepOptions`] |
//! | Train with a custom loss | [`loss`] |
//! | Train by reinforcement learning or with preferences | the crate `tinkex-recipes` |
//! | Sample | [`SamplingClient`], [`SamplingParams`], [`SampleOptions`], [`SamplerHandle`] |
//! | Sample token by token | [`SamplingClient::sample_stream`], [`SampleStream`], [`StreamedToken`] |
//! | Manage runs, checkpoints, sessions | [`RestClient`], [`AdminClient`], [`rest`] |
//! | Get weights out | [`RestClient::download`]; `RestClient::export` (feature `export`) |
//! | Handle errors | [`Error`], [`ErrorKind`], [`Hint`] |
//! | Log and measure | [`targets`] |
//! | Configure the network | [`Network`], [`NetworkBuilder`], [`HttpService`] |
//! | Test without a network | `testing::FakeServer` (feature `testing`), [`Sampling`], [`Training`] |
//!
//! # Calls
//!
//! **A call starts when its method is called**, not when the returned future is awaited. The client
//! spawns a task for each call; the task sends the request, retries it and polls for the result.
//! Calls therefore overlap without `join!` or `spawn`:
//!
//! ```no_run
//! # async fn run(model: tinkex::TrainingClient, data: Vec<tinkex::Datum>) -> tinkex::Result<()> {
//! # use tinkex::{AdamParams, LossFn};
//! let pass = model.forward_backward(data, LossFn::CrossEntropy); // sent
//! let step = model.optim_step(AdamParams::with_learning_rate(1e-4)); // sent after the pass
//! println!("{:?}", pass.await?.loss());
//! step.await?;
//! # Ok(()) }
//! ```
//!
//! Because a call starts at once, its options are arguments of the method and not setters of the
//! returned future. Each option type has a `From` conversion for the simple case: a string converts
//! into [`LoraOptions`] or [`SaveOptions`], [`SamplingParams`] convert into [`SampleOptions`], by
//! value or by reference, and [`AdamParams`] into [`StepOptions`]. The method `with_options` of a
//! client sets [`CallOptions`] for all calls of the returned client.
//!
//! | Returned type | Calls | If dropped |
//! |---|---|---|
//! | [`ApiFuture`] | requests that have a position in the call order of a [`TrainingClient`] | the request is still executed, because later requests depend on it |
//! | [`RequestFuture`] | all other calls | the call is cancelled; a sample also on the server |
//! | [`SampleStream`] | [`SamplingClient::sample_stream`] | the sample is cancelled |
//! | [`CheckpointDownload`], [`FileDownload`]; `AdapterImport`, `CheckpointExport` (feature `export`) | transfers of files in many requests; the value is a builder, and `.await` starts the transfer | the transfer stops |
//! | another `Stream` | lists, such as [`RestClient::training_runs`]; a page is requested when the stream is polled for its first item | no further page is requested |
//!
//! # Features
//!
//! All features are off by default.
//!
//! * `console`: `log_to_console`, a log on standard error.
//! * `tokenizer`: `Tokenizer` and `Hub`, tokenizers from a folder, the hub cache or a model hub.
//! * `chat`: `Chat`, conversations to prompts and training examples with the model's chat template.
//! * `export`: `RestClient::export`, merged models and PEFT adapters of checkpoints;
//!   `CheckpointDownload::peft`; `RestClient::import_adapter`.
//! * `blocking`: the module `blocking`, clients for scripts and programs without async code.
//! * `testing`: `testing::FakeServer`, a scripted server for the tests of your program.
//! * `opentelemetry`: sends the trace context of the current span with every request.
//!
//! # Guarantees
//!
//! * **Clients are cheap to clone.** All clients are `Clone`, `Send` and `Sync`. A
//!   [`ServiceClient`], its clones and the clients made from it share one connection.
//! * **No I/O at construction.** Building a client reads the environment once and sends nothing;
//!   the first call connects.
//! * **A tokio runtime executes requests**: that of the caller or, outside of one, the runtime that
//!   [`ServiceClientBuilder::runtime`] sets. Without either, calls return an error of kind
//!   [`ErrorKind::Config`]. The feature `blocking` has clients with a runtime of their own.
//! * **Retries.** Transient failures are retried as the service expects. [`CallOptions::timeout`]
//!   limits the duration of a call including its retries; [`CallOptions::without_retries`] sends
//!   the request of a call only once. [`Error::attempts`] and [`Error::elapsed`] report how often
//!   and how long a request was attempted.
//! * **Secrets.** No credential appears in errors, logs, `Debug` output, telemetry, or a request
//!   that is redirected to another server.

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

/// Compiles the example of the workspace's README.
#[cfg(all(doctest, feature = "chat"))]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Compiles the examples of the client guide.
#[cfg(all(doctest, feature = "testing", feature = "blocking", feature = "export"))]
#[doc = include_str!("../../../docs/client.md")]
struct Guide;

#[cfg(feature = "blocking")]
pub mod blocking;
#[cfg(feature = "chat")]
mod chat;
#[cfg(feature = "console")]
mod console;
mod download;
#[cfg(feature = "export")]
mod export;
pub mod loss;
pub mod rest;
mod rest_client;
mod sampling;
mod service;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "tokenizer")]
mod tokenizer;
mod training;
mod validated;

#[cfg(test)]
#[path = "../../transport/src/fixture.rs"]
mod fixture;

// Imported at the crate root, so that `crate::config` or `crate::session` works in every module
// although these modules are in the crates `tinkex_transport` and `tinkex_session`.
use tinkex_session::{call_options, connection, dispatch, future, session, settings};
use tinkex_transport::{self as transport, clock, config, error, hint, task, telemetry};

pub use ::{bytes, http};
#[doc(inline)]
pub use config::{ApiKey, BaseUrl, CredentialStore, Env, StoredKey, StoredKeyKind};
#[cfg(feature = "console")]
pub use console::log_to_console;
pub use download::{CheckpointDownload, DownloadProgress, DownloadedCheckpoint, FileDownload};
#[doc(inline)]
pub use error::{Error, ErrorKind, Result};
#[cfg(feature = "export")]
pub use export::{
    CheckpointExport, ExportDType, ExportFormat, ExportProgress, ExportStage, ExportedModel,
};
#[doc(inline)]
pub use future::queue_log::{QueueStateChange, QueuedWork};
#[doc(inline)]
pub use future::{ApiFuture, RequestFuture};
#[doc(inline)]
pub use hint::Hint;
#[cfg(feature = "export")]
pub use rest_client::AdapterImport;
pub use rest_client::{AdminClient, CopyCheckpoint, RestClient};
pub use sampling::{
    SampleOptions, SampleStream, SampleStreamOptions, Sampling, SamplingClient, StreamedToken,
};
pub use service::{ServiceClient, ServiceClientBuilder};
#[doc(inline)]
pub use tinkex_transport::targets;
#[doc(inline)]
pub use tinkex_wire::{
    AdamParams, CheckpointKind, DType, Datum, DatumBuilder, DecodeError, DecodeErrorKind,
    DimuonParams, ErrorCategory, ImageFormat, InputChunk, InvalidInput, JsonObject, Logprobs,
    LoraConfig, LossConfig, LossFn, LossOutput, LossOutputs, LossRecord, LossSetting, Metadata,
    ModelData, ModelId, ModelInfo, ModelInput, OptimParams, OptimizerConfig, PerTokenValues,
    PromptAltTokens, Provenance, ProvenanceSpan, QueueState, RequestId, SampleResponse,
    SampledSequence, SamplerHandle, SamplerId, SamplingParams, Secret, SequenceId,
    ServerCapabilities, SessionId, Shape, SharedSlice, SpanSource, StopCondition, StopReason,
    SupportedModel, TensorData, TensorElement, TensorValues, Timestamp, TinkerPath, Tokens,
    TokensIntoIter, TopkLogprobs, loss_input,
};
#[cfg(feature = "console")]
pub use tracing;
pub use training::{
    BatchOutput, ExternalWeights, LoraOptions, LossSpec, MetricValue, OptimOutput, RestoreMode,
    RestoreOptions, SaveOptions, StepOptions, StepOutput, Training, TrainingClient,
};
#[doc(inline)]
pub use transport::http::network::Network;
#[doc(inline)]
pub use transport::http::network_builder::NetworkBuilder;
#[doc(inline)]
pub use transport::http::upload::UploadFile;
#[doc(inline)]
pub use transport::http::{HttpFailure, HttpFailureKind, HttpService, Lane, ResponseBody};
#[doc(inline)]
pub use transport::instrument::stats::{ClientStats, LaneStats};
#[doc(inline)]
pub use transport::{CallOptions, Identity};

#[cfg(feature = "chat")]
pub use chat::{Chat, JsonlError, JsonlReader, Message, TooLong, TrainOn, TrainingExample};

#[cfg(feature = "tokenizer")]
pub use tokenizer::{Hub, Tokenizer, TokenizerId};
