//! [`SampleRequestBuilder`]: what to ask for besides a sample.

use std::future::IntoFuture;

use tinkex_wire::{SampleRequest, SampleResponse, TensorData};

use crate::error::Result;
use crate::future::ApiFuture;

use super::SamplingClient;

/// A sample to ask for; made by [`SamplingClient::sample`].
#[derive(Clone, Debug)]
#[must_use = "nothing is sent before `send`"]
pub struct SampleRequestBuilder {
    client: SamplingClient,
    request: SampleRequest,
}

impl SampleRequestBuilder {
    pub(super) fn new(client: SamplingClient, request: SampleRequest) -> Self {
        Self { client, request }
    }

    /// So many samples in place of one.
    pub fn num_samples(mut self, samples: u32) -> Self {
        self.request.num_samples = samples;
        self
    }

    /// The prompt's own log-probabilities too.
    pub fn prompt_logprobs(mut self) -> Self {
        self.request.prompt_logprobs = Some(true);
        self
    }

    /// Those of the last `n` prompt tokens alone.
    pub fn prompt_logprobs_last(mut self, n: u32) -> Self {
        self.request.prompt_logprobs = Some(true);
        self.request.prompt_logprobs_last_n = Some(n);
        self
    }

    /// The `k` likeliest tokens at each prompt position.
    pub fn topk_prompt_logprobs(mut self, k: u32) -> Self {
        self.request.topk_prompt_logprobs = k;
        self
    }

    /// The `k` likeliest tokens at each sampled position.
    pub fn topk_sample_logprobs(mut self, k: u32) -> Self {
        self.request.topk_sample_logprobs = k;
        self
    }

    /// The log-probabilities of these tokens: row `i` speaks about prompt position `i + 1`, and −1
    /// asks for nothing.
    pub fn target_prompt_logprobs(mut self, targets: TensorData) -> Self {
        self.request.target_prompt_logprobs = Some(targets);
        self
    }

    /// `k` other tokens drawn at each prompt position.
    pub fn prompt_alt_tokens(mut self, k: u32) -> Self {
        self.request.prompt_alt_tokens_k = k;
        self
    }

    /// The server should keep what it needs to explain the sample later.
    pub fn record_stability_info(mut self) -> Self {
        self.request.record_stability_info = Some(true);
        self
    }

    /// Sends it on its way. Dropping the future gives the sample up, and tells the server so where
    /// it wants to know.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if the options contradict each
    /// other; nothing is sent then.
    pub fn send(self) -> ApiFuture<SampleResponse> {
        let anew = self.client.asks_anew();
        self.client.start(self.request, anew, Ok)
    }
}

/// Awaiting the call itself sends it.
impl IntoFuture for SampleRequestBuilder {
    type Output = Result<SampleResponse>;
    type IntoFuture = ApiFuture<SampleResponse>;

    fn into_future(self) -> Self::IntoFuture {
        self.send()
    }
}
