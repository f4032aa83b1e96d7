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
/// The gateway instead creates sampling clients in a session that it opened, and relays the
/// requests of its own clients.
pub trait SessionSampler: Sized {
    /// Creates a sampling session in `session` and returns its client, which applies `options` to
    /// every call.
    ///
    /// # Errors
    /// If the server cannot be reached or does not accept the weights.
    fn create(
        session: Arc<Session>,
        weights: SamplingWeights,
        options: &CallOptions,
    ) -> impl Future<Output = Result<Self>> + Send;

    /// Sends a request that another client created. Replaces the sampling session and the sequence
    /// number of `request` by the sampling session and the next sequence number of this client, and
    /// changes nothing else.
    fn relay(&self, request: SampleRequest) -> RequestFuture<SampleResponse>;
}
