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
//! // 2. Train. A call starts its request at once; the server executes them in call order.
//! let model = service.create_lora_training_client("Qwen/Qwen3-8B").rank(16).await?;
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
//! service.finish(&tinkex::Result::Ok(())).await;
//! # Ok(()) }
//! ```
//!
//! | Task | Types |
//! |---|---|
//! | Connect | [`ServiceClient`], [`ServiceClientBuilder`], [`RetryPolicy`], [`CallOptions`] |
//! | Train | [`TrainingClient`], [`Datum`], [`LossFn`], [`AdamParams`], [`ApiFuture`] |
//! | Train with a custom loss | [`loss`] |
//! | Train by reinforcement learning | `recipes::Rl` (feature `recipes`) |
//! | Sample | [`SamplingClient`], [`SamplingParams`], [`SamplerHandle`], [`SampleFuture`], [`SamplingRetry`] |
//! | Sample token by token | [`SamplingClient::sample_stream`], [`SampleStream`], [`StreamedToken`] |
//! | Manage runs, checkpoints, sessions | [`RestClient`], [`AdminClient`], [`rest`] |
//! | Get weights out | [`RestClient::download`], [`RestClient::export`], [`CheckpointExport`] |
//! | Handle errors | [`Error`], [`ErrorKind`], [`Hint`] |
//! | Log and measure | [`targets`] |
//! | Test without a network | `testing::FakeServer` (feature `testing`), [`HttpService`] |
//!
//! # Features
//!
//! All are off by default.
//!
//! * `console`: `log_to_console`, a log on standard error.
//! * `tokenizer`: `Tokenizer` and `Hub`, tokenizers from a folder, the hub cache or a model hub.
//! * `chat`: `Chat`, conversations to prompts and training examples with the model's chat template.
//! * `blocking`: the module `blocking`, clients for scripts and programs without async code.
//! * `recipes`: the module `recipes`, training loops such as reinforcement learning.
//! * `testing`: `testing::FakeServer`, a scripted server for the tests of your program.
//!
//! # Guarantees
//!
//! * **Clients are cheap to clone.** All are `Clone`, `Send` and `Sync`. A [`ServiceClient`], its
//!   clones and the clients made from it share one connection.
//! * **No I/O at construction.** Building a client reads the environment once and sends nothing;
//!   the first call connects.
//! * **A tokio runtime executes requests.** Calls outside one return an error of kind
//!   [`ErrorKind::Config`]; the feature `blocking` has clients with a runtime of their own.
//! * **Dropping a future.** A training request continues ([`ApiFuture`]); a sample is cancelled
//!   ([`SampleFuture`], [`SampleStream`]). Both futures have `detach`.
//! * **Retries.** Transient failures are retried as the service expects. [`RetryPolicy`] bounds a
//!   call with all its retries; [`RetryPolicy::disabled`] sends its request once.
//!   [`Error::attempts`] and [`Error::elapsed`] report how often and how long a request was
//!   attempted.
//! * **Secrets.** No credential appears in errors, logs, `Debug` output, telemetry, or a request
//!   that is redirected to another server.

#![forbid(unsafe_code)]

/// Compiles the example of the workspace's README.
#[cfg(all(doctest, feature = "chat"))]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Compiles the examples of the client guide.
#[cfg(all(doctest, feature = "testing", feature = "blocking"))]
#[doc = include_str!("../../../docs/client.md")]
struct Guide;

mod background;
#[cfg(feature = "blocking")]
pub mod blocking;
mod call_options;
#[cfg(feature = "chat")]
mod chat;
#[cfg(feature = "tokenizer")]
mod checksum;
mod clock;
mod config;
mod connection;
#[cfg(feature = "console")]
mod console;
mod dispatch;
mod download;
mod error;
mod export;
mod future;
mod hint;
pub mod loss;
mod process_group;
#[cfg(feature = "tokenizer")]
mod push;
#[cfg(feature = "recipes")]
pub mod recipes;
mod rest_client;
mod sampling;
mod service;
mod session;
mod settings;
mod sync;
pub mod targets;
mod task;
mod telemetry;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "tokenizer")]
mod tokenizer;
mod training;
mod transport;
#[cfg(feature = "upstream")]
mod upstream;
mod validated;

#[cfg(test)]
mod fixture;

pub use ::{bytes, http};
pub use call_options::CallOptions;
pub use config::{ApiKey, BaseUrl, CredentialStore, Env, StoredKey, StoredKeyKind};
#[cfg(feature = "console")]
pub use console::log_to_console;
pub use download::{CheckpointDownload, DownloadProgress, DownloadedCheckpoint, FileDownload};
pub use error::{Error, ErrorKind, Result};
pub use export::{
    CheckpointExport, CheckpointExportProgress, ExportDType, ExportFormat, ExportStage,
    ExportedModel,
};
pub use future::queue_log::{QueueStateChange, QueuedWork};
pub use future::{ApiFuture, SampleFuture};
pub use hint::Hint;
pub use rest_client::{AdapterImport, AdminClient, CopyCheckpoint, RestClient};
pub use sampling::{
    SampleRequestBuilder, SampleStream, SamplingClient, SamplingRetry, StreamedToken,
};
pub use service::{ServiceClient, ServiceClientBuilder};
pub use tinkex_wire::{
    self as wire, AdamParams, Datum, DimuonParams, ErrorCategory, JsonObject, Logprobs, LoraConfig,
    LossConfig, LossFn, LossOutput, LossOutputs, Metadata, ModelId, ModelInfo, ModelInput,
    OptimParams, OptimizerConfig, QueueState, RequestId, SampleResponse, SampledSequence,
    SamplerHandle, SamplerId, SamplingParams, Secret, ServerCapabilities, SessionId, StopCondition,
    StopReason, SupportedModel, TensorData, Timestamp, TinkerPath, Tokens, rest,
};
#[cfg(feature = "console")]
pub use tracing;
pub use training::{
    BatchOutput, CreateFromState, CreateLora, ExternalWeights, LossSpec, MetricValue, OptimOutput,
    RestoreMode, SaveOptions, StepOutput, TrainingClient, TrainingStepBuilder,
};
pub use transport::Identity;
pub use transport::UploadFile;
pub use transport::http::{HttpFailure, HttpFailureKind, HttpService, Lane, ResponseBody};
pub use transport::retry_policy::RetryPolicy;
pub use transport::stats::{ClientStats, LaneStats};

#[cfg(feature = "chat")]
pub use chat::{Chat, JsonlError, JsonlReader, Message, TooLong, TrainOn, TrainingExample};
#[cfg(feature = "tokenizer")]
pub use push::{Commit, CommitInfo, CreateRepo, HubRepo};
#[cfg(feature = "upstream")]
pub use upstream::{CustomLossPass, SubmitError, UpstreamSession};

#[cfg(feature = "tokenizer")]
pub use tokenizer::{Hub, Tokenizer, TokenizerId};
