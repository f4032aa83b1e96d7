//! Fine-tune and sample language models through the Tinker API.
//!
//! This crate is being built. What works today: connecting with every kind of credential, and
//! everything about looking things up and tidying ([`RestClient`], [`AdminClient`]). Training and
//! sampling are not here yet.
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
//! # What you can rely on
//!
//! * Making a client touches nothing; the first call connects. The environment is read once.
//! * A passing failure is sent again as the service expects; [`RetryPolicy::disabled`] gives
//!   exactly one HTTP request. [`Error`] says how often and how long it was tried.
//! * No credential appears in errors, logs, `Debug`, or a request that was redirected elsewhere.

#![forbid(unsafe_code)]

mod clock;
mod config;
mod engine;
mod error;
mod lookup;
mod service;
mod settings;
mod task;
mod transport;

#[cfg(test)]
mod fixture;

pub use config::{ApiKey, BaseUrl, CredentialStore, Env, StoredKey, StoredKeyKind};
pub use error::{Error, ErrorKind, Result};
pub use lookup::{AdminClient, CopyCheckpoint, RestClient};
pub use service::{ServiceClient, ServiceClientBuilder};
pub use tinkex_wire::{
    self as wire, ModelId, SamplerId, Secret, ServerCapabilities, SessionId, SupportedModel,
    Timestamp, TinkerPath, rest,
};
pub use transport::Identity;
pub use transport::http::{HttpFailure, HttpService, Lane};
pub use transport::retry::RetryPolicy;
