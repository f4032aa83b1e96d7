//! [`SampleRequestBuilder`]: options of one sampling request.

use std::future::IntoFuture;
use std::time::Duration;

use tinkex_wire::{SampleRequest, SampleResponse, TensorData};

use crate::call_options::CallOptions;
use crate::error::Result;
use crate::future::SampleFuture;
use crate::transport::retry_policy::RetryPolicy;

use super::SamplingClient;

/// Builder for a sampling request, returned by [`SamplingClient::sample`].
///
/// Await it to send the request and wait for the response, or call [`send`](Self::send) to send it
/// now and await the response later.
///
/// ```no_run
/// # async fn run(sampler: tinkex::SamplingClient) -> tinkex::Result<()> {
/// use tinkex::SamplingParams;
///
/// let params = SamplingParams::new().max_tokens(64);
/// let one = sampler.sample([1, 2, 3], params.clone()).await?;
///
/// // Two requests in flight at the same time.
/// let first = sampler.sample([1, 2, 3], params.clone()).num_samples(4).send();
/// let second = sampler.sample([4, 5, 6], params).num_samples(4).send();
/// println!("{} {}", first.await?.sequences.len(), second.await?.sequences.len());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is sent until the builder is awaited or `send` is called"]
pub struct SampleRequestBuilder {
    client: SamplingClient,
    request: SampleRequest,
}

impl SampleRequestBuilder {
    pub(super) fn new(client: SamplingClient, request: SampleRequest) -> Self {
        Self { client, request }
    }

    /// Sets the number of completions to generate (default 1).
    pub fn num_samples(mut self, samples: u32) -> Self {
        self.request.num_samples = samples;
        self
    }

    /// Requests the log-probability of every prompt token after the first (default: none).
    pub fn prompt_logprobs(mut self) -> Self {
        self.request.prompt_logprobs = Some(true);
        self
    }

    /// Requests the log-probabilities of the last `n` prompt tokens only. `n` must be at least 1.
    pub fn prompt_logprobs_last(mut self, n: u32) -> Self {
        self.request.prompt_logprobs = Some(true);
        self.request.prompt_logprobs_last_n = Some(n);
        self
    }

    /// Requests the `k` most likely tokens at every prompt position (default 0).
    pub fn topk_prompt_logprobs(mut self, k: u32) -> Self {
        self.request.topk_prompt_logprobs = k;
        self
    }

    /// Requests the `k` most likely tokens at every generated position (default 0).
    pub fn topk_sample_logprobs(mut self, k: u32) -> Self {
        self.request.topk_sample_logprobs = k;
        self
    }

    /// Requests the log-probabilities of specific tokens at the prompt positions.
    ///
    /// `targets` is an `int64` matrix. Row `i` holds token ids for prompt position `i + 1`; −1
    /// entries are skipped.
    pub fn target_prompt_logprobs(mut self, targets: TensorData) -> Self {
        self.request.target_prompt_logprobs = Some(targets);
        self
    }

    /// Requests `k` alternative tokens, drawn from the model's distribution, at every prompt
    /// position (default 0).
    pub fn prompt_alt_tokens(mut self, k: u32) -> Self {
        self.request.prompt_alt_tokens_k = k;
        self
    }

    /// Makes the server record data for numerical stability diagnostics (default: off).
    pub fn record_stability_info(mut self) -> Self {
        self.request.record_stability_info = Some(true);
        self
    }

    /// Sets how often and how long the requests of this sample are repeated after failures.
    /// Defaults to the policy of the client.
    ///
    /// ```no_run
    /// # async fn run(sampler: tinkex::SamplingClient) -> tinkex::Result<()> {
    /// use std::time::Duration;
    /// use tinkex::{RetryPolicy, SamplingParams};
    ///
    /// let sample = sampler
    ///     .sample([1, 2, 3], SamplingParams::new().max_tokens(64))
    ///     .retry(RetryPolicy::default().max_attempts(3))
    ///     .timeout(Duration::from_secs(120))
    ///     .await?;
    /// # Ok(()) }
    /// ```
    pub fn retry(self, policy: RetryPolicy) -> Self {
        self.set(|options| options.retry(policy))
    }

    /// Sets the maximum duration of this sample, with all waits and retries. It is cancelled once
    /// the time is over. Unlimited by default.
    pub fn timeout(self, timeout: Duration) -> Self {
        self.set(|options| options.timeout(timeout))
    }

    /// Sets the maximum time to wait for the result once the server has accepted the sample.
    /// Unlimited by default.
    pub fn poll_timeout(self, timeout: Duration) -> Self {
        self.set(|options| options.poll_timeout(timeout))
    }

    /// Changes the options of this sample only: the builder gets a client value with the changed
    /// options, so that samples without such options need no copy of them.
    fn set(mut self, change: impl FnOnce(CallOptions) -> CallOptions) -> Self {
        self.client = self.client.with_options(change(self.client.options()));
        self
    }

    /// Sends the request now and returns a future of the response.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if an option is invalid; nothing
    /// is sent in that case.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the sample: polling stops, and a cancellation is sent to the
    /// server if it supports cancellation. [`SampleFuture::detach`] lets it continue.
    pub fn send(self) -> SampleFuture<SampleResponse> {
        let resubmit = self.client.resubmits_samples();
        self.client.start("sample", self.request, resubmit, Ok)
    }
}

impl IntoFuture for SampleRequestBuilder {
    type Output = Result<SampleResponse>;
    type IntoFuture = SampleFuture<SampleResponse>;

    fn into_future(self) -> Self::IntoFuture {
        self.send()
    }
}
