//! [`Sampling`]: the interface of a [`SamplingClient`], for programs that replace it in tests.

use std::sync::Arc;

use tinkex_wire::{Logprobs, ModelInput, SampleResponse};

use crate::future::RequestFuture;

use super::{SampleOptions, SamplingClient};

/// Samples completions: a [`SamplingClient`], or a replacement in a test.
///
/// A function that takes `&dyn Sampling` or `&impl Sampling` can be tested without a server. The
/// methods are those of [`SamplingClient`] with concrete argument types. To test requests and
/// retries too, use a `SamplingClient` with `testing::FakeServer` (feature `testing`).
///
/// ```
/// use tinkex::{
///     Logprobs, ModelInput, RequestFuture, SampleOptions, SampleResponse, SampledSequence, Sampling,
///     SamplingParams,
/// };
///
/// // The program under test.
/// async fn answer(sampler: &dyn Sampling, prompt: Vec<u32>) -> tinkex::Result<Vec<u32>> {
///     let params = SamplingParams::new().max_tokens(8);
///     let response = sampler.sample(prompt.into(), params.into()).await?;
///     Ok(response.sequences[0].tokens.to_vec())
/// }
///
/// // A sampler that repeats the prompt.
/// struct Echo;
///
/// impl Sampling for Echo {
///     fn sample(&self, prompt: ModelInput, _: SampleOptions) -> RequestFuture<SampleResponse> {
///         let tokens = prompt.to_tokens().unwrap_or_default();
///         let sequence = SampledSequence::default().tokens(tokens);
///         RequestFuture::ready(Ok(SampleResponse::default().sequences(vec![sequence])))
///     }
///
///     fn compute_logprobs(&self, tokens: ModelInput) -> RequestFuture<Logprobs> {
///         RequestFuture::ready(Ok(vec![-1.0; tokens.token_count().unwrap_or(0)].into()))
///     }
/// }
///
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// assert_eq!(answer(&Echo, vec![1, 2]).await?, [1, 2]);
/// # Ok::<_, tinkex::Error>(()) }).unwrap();
/// ```
pub trait Sampling: Send + Sync {
    /// Samples completions of `prompt`; see [`SamplingClient::sample`].
    fn sample(&self, prompt: ModelInput, options: SampleOptions) -> RequestFuture<SampleResponse>;

    /// Computes the log-probability of every token given the tokens before it; see
    /// [`SamplingClient::compute_logprobs`].
    fn compute_logprobs(&self, tokens: ModelInput) -> RequestFuture<Logprobs>;
}

impl Sampling for SamplingClient {
    fn sample(&self, prompt: ModelInput, options: SampleOptions) -> RequestFuture<SampleResponse> {
        Self::sample(self, prompt, options)
    }

    fn compute_logprobs(&self, tokens: ModelInput) -> RequestFuture<Logprobs> {
        Self::compute_logprobs(self, tokens)
    }
}

impl<T: Sampling + ?Sized> Sampling for Arc<T> {
    fn sample(&self, prompt: ModelInput, options: SampleOptions) -> RequestFuture<SampleResponse> {
        (**self).sample(prompt, options)
    }

    fn compute_logprobs(&self, tokens: ModelInput) -> RequestFuture<Logprobs> {
        (**self).compute_logprobs(tokens)
    }
}
