//! [`UpstreamResponse`]: delivers the response of an upstream to an inference request.

use tinkex_backend::upstream::ResponseSink;
use tinkex_inference::{GeneratedToken, PromptReport, StopReason, TokenSink};
use tinkex_store::error::ServerError;
use tinkex_wire::{SampleResponse, StopReason as WireStopReason};

use super::error::inference_error;

/// Sends the tokens of an upstream's response to a [`TokenSink`].
pub(crate) struct UpstreamResponse(pub(crate) TokenSink);

impl ResponseSink for UpstreamResponse {
    fn finish(&self, response: Result<SampleResponse, ServerError>) {
        let end = response.map(|response| deliver(&self.0, &response));
        self.0.finish(end.map_err(inference_error));
    }
}

/// Sends all tokens of `response` to the sink of an inference request.
fn deliver(sink: &TokenSink, response: &SampleResponse) {
    let logprobs = response.prompt_logprobs.as_ref();
    let logprobs: Option<Vec<f32>> =
        logprobs.map(|all| all.iter().map(|logprob| logprob.unwrap_or(f32::NAN)).collect());
    sink.prompt(PromptReport {
        logprobs: logprobs.unwrap_or_default(),
        top: Vec::new(),
        cached_tokens: usize::try_from(response.prompt_cache_hit_tokens).unwrap_or(0),
    });
    for (completion, sequence) in response.sequences.iter().enumerate() {
        for (i, token) in sequence.tokens.iter().enumerate() {
            let logprob = sequence.logprobs.as_ref().and_then(|logprobs| logprobs.get(i));
            let is_last = i + 1 == sequence.tokens.len();
            let reason = match sequence.stop_reason {
                WireStopReason::Length => StopReason::Length,
                _ => StopReason::Stop,
            };
            sink.token(GeneratedToken {
                completion: u32::try_from(completion).unwrap_or(u32::MAX),
                token: *token,
                logprob: logprob.unwrap_or(f32::NAN),
                top: Box::default(),
                stop: is_last.then_some(reason),
            });
        }
    }
}
