//! Sessions on a server: connection, heartbeats, limits, submission and polling of requests.
//!
//! Do not depend on this crate directly: its API may change in any release. Use the SDK, the crate
//! `tinkex`, which re-exports the public types: [`ApiFuture`](future::ApiFuture),
//! [`RequestFuture`](future::RequestFuture), [`QueuedWork`](future::queue_log::QueuedWork) and
//! [`QueueStateChange`](future::queue_log::QueueStateChange). The SDK and the gateway share this
//! crate, so that both keep sessions alive, limit their requests and poll for results in the same
//! way.
//!
//! | Module | Content |
//! |---|---|
//! | [`settings`] | The settings of a client, resolved from arguments, environment and defaults |
//! | [`connection`] | The server's configuration and the transport that all clients of a service share |
//! | [`session`] | A session with its background tasks and limits |
//! | [`SessionSettings`], [`SessionSampler`] | Traits for the gateway's use of the SDK's clients |
//! | [`dispatch`] | Limits of the requests and bytes in flight |
//! | [`future`] | Futures of calls, and the polls that retrieve the results of submitted requests |
//! | [`pass_encoding`] | The encoding of training passes that a server accepts |
//! | [`call_options`] | Applies the options of a call to its requests |

#![forbid(unsafe_code)]

pub mod call_options;
pub mod connection;
pub mod dispatch;
pub mod future;
pub mod pass_encoding;
pub mod session;
mod session_sampler;
mod session_settings;
pub mod settings;
mod sync;

#[cfg(test)]
#[path = "../../transport/src/fixture.rs"]
mod fixture;

// Imported at the crate root, so that `crate::config` or `crate::error` works in every module
// although these modules are in the crate `tinkex_transport`.
use tinkex_transport::{
    self as transport, background, clock, config, error, targets, task, telemetry,
};

pub use session_sampler::{SamplingWeights, SessionSampler};
pub use session_settings::SessionSettings;
