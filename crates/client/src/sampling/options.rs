//! [`SampleOptions`]: parameters of one sampling request.

use tinkex_wire::{ModelInput, SampleRequest, SamplingParams, TensorData};

/// Sampling parameters with the optional settings of one request, for
/// [`SamplingClient::sample`](crate::SamplingClient::sample).
///
/// [`SamplingParams`] convert into options without further settings. Parameters and options convert
/// by value and by reference, so that several calls can use the same value.
///
/// ```
/// use tinkex::{SampleOptions, SamplingParams};
///
/// let params = SamplingParams::new().max_tokens(64);
/// let options = SampleOptions::new(params).num_samples(4).prompt_logprobs();
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use = "options do nothing until they are passed to `SamplingClient::sample`"]
pub struct SampleOptions {
    /// Request without prompt and sampling session.
    request: SampleRequest,
}

impl SampleOptions {
    /// Creates options for one completion.
    pub fn new(params: SamplingParams) -> Self {
        Self { request: SampleRequest::new(ModelInput::default(), params) }
    }

    /// Returns the sampling parameters.
    #[must_use]
    pub fn params(&self) -> &SamplingParams {
        &self.request.sampling_params
    }

    /// Returns the number of completions to generate.
    #[must_use]
    pub fn samples(&self) -> u32 {
        self.request.num_samples
    }

    /// Returns the request for completions of `prompt`.
    pub(super) fn into_request(mut self, prompt: ModelInput) -> SampleRequest {
        self.request.prompt = prompt;
        self.request
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
}

impl From<SamplingParams> for SampleOptions {
    fn from(params: SamplingParams) -> Self {
        Self::new(params)
    }
}

impl From<&SamplingParams> for SampleOptions {
    fn from(params: &SamplingParams) -> Self {
        Self::new(params.clone())
    }
}

impl From<&Self> for SampleOptions {
    fn from(options: &Self) -> Self {
        options.clone()
    }
}
