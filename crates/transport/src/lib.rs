//! HTTP transport of the Tinkex crates: sends requests to Tinker servers, with authentication,
//! retries, redirects and telemetry.
//!
//! Do not depend on this crate directly: its API may change in any release. Use the SDK, the crate
//! `tinkex`, which re-exports the public types: [`Error`], [`Env`](config::Env),
//! [`CallOptions`], [`HttpService`](http::HttpService) and others. The SDK, the hub client and the
//! gateway share this crate, so that all of them retry, authenticate and access the network in the
//! same way.
//!
//! | Module | Content |
//! |---|---|
//! | [`Transport`] | Sends requests to one server with one credential |
//! | [`request`] | One request: its URL, body and headers, one attempt to send it, redirects, its response |
//! | [`CallOptions`] | Time limits and retries of calls |
//! | [`retry`] | Decides whether and when a failed request is sent again; the waits after a 429 and a 402 |
//! | `auth` | Secrets of credentials, and the tokens that they are exchanged for |
//! | [`http`] | The interface to the network, and its implementations |
//! | [`download`] | Downloads that resume after an interruption |
//! | [`instrument`] | Events, metrics and statistics of requests |
//! | [`telemetry`] | Failures, and starts and ends of sessions, that are reported to the server |
//! | [`config`] | Environment variables, base URL, credentials and their store |
//! | [`error`], [`hint`] | The error of every fallible call, and what to do about it |
//! | [`task`], [`background`] | Spawns tasks, and restarts the long-lived ones if their runtime ends |
//! | [`process_group`] | Child processes that are killed with the processes that they started |
//! | [`clock`] | The wall clock, which tests can replace |
//! | [`targets`] | Names of the `tracing` events |
//!
//! # Features
//!
//! * `opentelemetry`: sends the trace context of the current span with every request. Off by
//!   default.

#![forbid(unsafe_code)]

mod auth;
pub mod background;
mod call_options;
pub mod clock;
pub mod config;
pub mod download;
pub mod error;
pub mod hint;
pub mod http;
pub mod instrument;
pub mod process_group;
pub mod request;
pub mod retry;
mod sync;
pub mod targets;
pub mod task;
pub mod telemetry;
mod transport;

#[cfg(test)]
mod fixture;

pub use auth::Identity;
pub use call_options::CallOptions;
pub use error::{Error, ErrorKind, Result};
pub use hint::Hint;
pub use retry::billing::DELAY as BILLING_DELAY;
pub use transport::{RequestOptions, Transport};
