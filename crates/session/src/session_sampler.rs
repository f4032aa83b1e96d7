//! [`SessionSampler`]: clients that sample in a given session.

use std::sync::Arc;

use tinkex_wire::{SampleRequest, SampleResponse};

use crate::error::Result;
use crate::future::RequestFuture;
use crate::session::Session;
use crate::transport::CallOptions;

/// Weights to create a sampling session for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SamplingWeights {
    /// Name of a base model.
    Base(String),
    /// Path of a sampler checkpoint, as the server returned it.
    Checkpoint(String),
}

/// Client that samples from fixed weights in a session.
///
/// The SDK implements the trait for `SamplingClient`, which programs create with a `ServiceClient`.
/// The gateway creates sampling clients in a session that it opened, and passes on the requests of
/// its own clients unchanged.
pub trait SessionSampler: Sized {
    /// Creates a sampling session in `session`, and a client for it whose calls have `options`.
    ///
    /// # Errors
    /// If the server does not accept the weights.
    fn create(
        session: Arc<Session>,
        weights: SamplingWeights,
        options: &CallOptions,
    ) -> impl Future<Output = Result<Self>> + Send;

    /// Sends a request that another client sent. The session and the sequence number of `request`
    /// are replaced by the session and a sequence number of this client.
    fn relay(&self, request: SampleRequest) -> RequestFuture<SampleResponse>;
}
