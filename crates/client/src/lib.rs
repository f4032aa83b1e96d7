//! Fine-tune and sample language models through the Tinker API.
//!
//! This crate is being built. What works today: connecting with every kind of credential, training
//! ([`TrainingClient`]: passes, steps, saving and loading), sampling ([`SamplingClient`]), and
//! everything about looking things up and tidying ([`RestClient`], [`AdminClient`]). Telemetry
//! and custom losses are not here yet.
//!
//! ```no_run
//! use tinkex::{ServiceClient, rest::ListTrainingRuns};
//!
//! # async fn run() -> tinkex::Result<()> {
//! let service = ServiceClient::builder()
//!     .base_url("http://localhost:8000".parse()?)
//!     .api_key("tml-local")
//!     .build()?;
//! let runs = service.rest().list_training_runs(&ListTrainingRuns::default()).await?;
//! println!("{} runs", runs.cursor.total_count);
//! # Ok(()) }
//! ```
//!
//! # Features
//!
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

#[cfg(feature = "chat")]
mod chat;
mod clock;
mod config;
mod dispatch;
mod engine;
mod error;
mod future;
mod lookup;
pub mod loss;
mod sampling;
mod service;
mod session;
mod settings;
mod sync;
mod task;
mod telemetry;
#[cfg(feature = "tokenizer")]
mod tokenizer;
mod training;
mod transport;

#[cfg(test)]
mod fixture;

pub use config::{ApiKey, BaseUrl, CredentialStore, Env, StoredKey, StoredKeyKind};
pub use error::{Error, ErrorKind, Result};
pub use future::ApiFuture;
pub use lookup::{AdminClient, CopyCheckpoint, RestClient};
pub use sampling::{SampleCall, SamplingClient};
pub use service::{ServiceClient, ServiceClientBuilder};
pub use tinkex_wire::{
    self as wire, AdamParams, Category, Datum, DimuonParams, FinishReason, JsonObject, Logprobs,
    LoraConfig, LossConfig, LossFn, LossOutput, LossOutputs, ModelId, ModelInfo, ModelInput,
    OptimParams, OptimStepOutput, OptimizerConfig, RequestId, SampleResponse, SampledSequence,
    SamplerHandle, SamplerId, SamplingParams, Secret, ServerCapabilities, SessionId, Stop,
    StopReason, SupportedModel, TensorData, Timestamp, TinkerPath, Tokens, rest,
};
pub use training::{
    CreateFromState, CreateLora, ExternalWeights, Loss, Metric, PassOutput, Restore, Save,
    TrainingClient,
};
pub use transport::Identity;
pub use transport::http::{HttpFailure, HttpService, Lane};
pub use transport::retry::RetryPolicy;

#[cfg(feature = "chat")]
pub use chat::{BadLine, Chat, Example, Jsonl, Message, TooLong, TrainOn};
#[cfg(feature = "tokenizer")]
pub use tokenizer::{Hub, Tokenizer, TokenizerId};
