//! Fine-tune and sample language models through the Tinker API.
//!
//! ```no_run
//! use tinkex::{AdamParams, Datum, FinishReason, LossFn, SamplingParams, ServiceClient};
//!
//! # async fn run() -> tinkex::Result<()> {
//! // Connect: TINKER_API_KEY and TINKER_BASE_URL, or a builder.
//! let service = ServiceClient::from_env()?;
//!
//! // Train: calls are queued in order, and awaited when you like.
//! let model = service.create_lora_training_client("Qwen/Qwen3-8B").rank(16).create().await?;
//! let data = vec![Datum::completion([1, 2, 3], [4, 5])?];
//! let (pass, step) = model.step(data, LossFn::CrossEntropy, AdamParams::with_learning_rate(1e-4));
//! println!("{:?}", pass.await?.metrics);
//! step.await?;
//!
//! // Sample from what was trained.
//! let sampler = model.save_weights_and_get_sampling_client().await?;
//! let answer = sampler.sample([1, 2, 3], SamplingParams::new().max_tokens(64)).await?;
//! println!("{:?}", &answer.sequences[0].tokens[..]);
//!
//! // Look things up, and end it.
//! let path = model.save_state("first").await?;
//! println!("{path}: {:?}", service.rest().get_weights_info(&path).await?);
//! service.close(FinishReason::Success, None).await?;
//! # Ok(()) }
//! ```
//!
//! | To | Start at |
//! |---|---|
//! | connect | [`ServiceClient`], [`ServiceClientBuilder`] |
//! | train | [`TrainingClient`], [`Datum`], [`LossFn`], [`AdamParams`] |
//! | use a loss of your own | [`loss`] |
//! | sample | [`SamplingClient`], [`SamplingParams`], [`SamplerHandle`] |
//! | look things up and tidy | [`RestClient`], [`AdminClient`], [`rest`] |
//! | understand a failure | [`Error`], [`ErrorKind`], [`RetryPolicy`] |
//! | test without a network | [`HttpService`] |
//!
//! # Features
//!
//! * `console`: `log_to_console`, a log for people on standard error.
//! * `tokenizer`: `Tokenizer`, text to tokens and back, from a folder, the local hub cache or a hub.
//! * `chat`: `Chat`, conversations to prompts and training examples through the model's own template.
//!
//! # What you can rely on
//!
//! * Making a client touches nothing; the first call connects. The environment is read once. Calls
//!   are made inside a tokio runtime, which does the work behind an [`ApiFuture`].
//! * A passing failure is sent again as the service expects; [`RetryPolicy::disabled`] gives
//!   exactly one HTTP request. [`Error`] says how often and how long it was tried.
//! * No credential appears in errors, logs, `Debug`, or a request that was redirected elsewhere.

#![forbid(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../../../docs/client.md")]
struct Guide;

#[cfg(feature = "chat")]
mod chat;
mod clock;
mod config;
mod connection;
#[cfg(feature = "console")]
mod console;
mod dispatch;
mod download;
mod error;
mod future;
mod hint;
pub mod loss;
#[cfg(feature = "tokenizer")]
mod push;
mod rest_client;
mod sampling;
mod service;
mod session;
mod settings;
mod sync;
pub mod targets;
mod task;
mod telemetry;
#[cfg(feature = "tokenizer")]
mod tokenizer;
mod training;
mod transport;
mod validated;

#[cfg(test)]
mod fixture;

pub use config::{ApiKey, BaseUrl, CredentialStore, Env, StoredKey, StoredKeyKind};
#[cfg(feature = "console")]
pub use console::log_to_console;
pub use download::{CheckpointDownload, DownloadProgress, DownloadedCheckpoint, FileDownload};
pub use error::{Error, ErrorKind, Result};
pub use future::{ApiFuture, SampleFuture};
pub use hint::Hint;
pub use rest_client::{AdminClient, CopyCheckpoint, RestClient};
pub use sampling::{SampleRequestBuilder, SamplingClient};
pub use service::{ServiceClient, ServiceClientBuilder};
pub use tinkex_wire::{
    self as wire, AdamParams, Datum, DimuonParams, ErrorCategory, FinishReason, JsonObject,
    Logprobs, LoraConfig, LossConfig, LossFn, LossOutput, LossOutputs, Metadata, ModelId,
    ModelInfo, ModelInput, OptimParams, OptimStepOutput, OptimizerConfig, RequestId,
    SampleResponse, SampledSequence, SamplerHandle, SamplerId, SamplingParams, Secret,
    ServerCapabilities, SessionId, StopCondition, StopReason, SupportedModel, TensorData,
    Timestamp, TinkerPath, Tokens, rest,
};
#[cfg(feature = "console")]
pub use tracing;
pub use training::{
    BatchOutput, CreateFromState, CreateLora, ExternalWeights, LossSpec, MetricValue, RestoreMode,
    SaveOptions, TrainingClient,
};
pub use transport::Identity;
pub use transport::http::{HttpFailure, HttpFailureKind, HttpService, Lane, ResponseBody};
pub use transport::retry::RetryPolicy;

#[cfg(feature = "chat")]
pub use chat::{Chat, JsonlError, JsonlReader, Message, TooLong, TrainOn, TrainingExample};
#[cfg(feature = "tokenizer")]
pub use push::{Commit, CommitInfo, HubRepo};
#[cfg(feature = "tokenizer")]
pub use tokenizer::{Hub, Tokenizer, TokenizerId};
