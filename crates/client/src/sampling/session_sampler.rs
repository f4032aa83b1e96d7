//! Sampling clients that the gateway creates in its own session.

use std::sync::Arc;

use tinkex_session::{SamplingWeights, SessionSampler};
use tinkex_wire::{SampleRequest, SampleResponse};

use crate::error::Result;
use crate::future::RequestFuture;
use crate::session::Session;
use crate::transport::CallOptions;

use super::SamplingClient;

#[doc(hidden)]
impl SessionSampler for SamplingClient {
    async fn create(
        session: Arc<Session>,
        weights: SamplingWeights,
        options: &CallOptions,
    ) -> Result<Self> {
        // The inherent function, which takes precedence.
        Self::create(session, weights, options).await
    }

    fn relay(&self, mut request: SampleRequest) -> RequestFuture<SampleResponse> {
        request.base_model = None;
        request.model_path = None;
        request.seq_id = None;
        self.start("sample", request, self.resubmits_samples(), Ok)
    }
}
