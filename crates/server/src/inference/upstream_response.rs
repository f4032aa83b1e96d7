//! [`UpstreamResponse`]: delivers the response of an upstream to an inference request.

use tinkex_backend::upstream::ResponseSink;
use tinkex_inference::{GeneratedToken, PromptReport, StopReason, TokenSink};
use tinkex_store::error::ServerError;
use tinkex_wire::{SampleResponse, StopReason as WireStopReason, TopkLogprobs};

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
        top: response.topk_prompt_logprobs.as_ref().map(all_rows).unwrap_or_default(),
        cached_tokens: usize::try_from(response.prompt_cache_hit_tokens).unwrap_or(0),
    });
    for (completion, sequence) in response.sequences.iter().enumerate() {
        for (i, token) in sequence.tokens.iter().enumerate() {
            let logprob = sequence.logprobs.as_ref().and_then(|logprobs| logprobs.get(i));
            let top = sequence.topk_logprobs.as_ref().and_then(|table| table.row(i));
            let is_last = i + 1 == sequence.tokens.len();
            let reason = match sequence.stop_reason {
                WireStopReason::Length => StopReason::Length,
                _ => StopReason::Stop,
            };
            sink.token(GeneratedToken {
                completion: u32::try_from(completion).unwrap_or(u32::MAX),
                token: *token,
                logprob: logprob.unwrap_or(f32::NAN),
                top: top.map(Iterator::collect).unwrap_or_default(),
                stop: is_last.then_some(reason),
            });
        }
    }
}

/// Returns the most probable tokens of all positions. A position without tokens has an empty list.
fn all_rows(table: &TopkLogprobs) -> Vec<Vec<(u32, f32)>> {
    table.rows().map(|row| row.map(Iterator::collect).unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use tinkex_inference::token_stream;
    use tinkex_wire::SampledSequence;

    use super::*;

    #[test]
    fn the_most_probable_tokens_of_an_upstream_are_delivered() {
        let (sink, mut stream) = token_stream("id".to_owned(), drop);
        let table = TopkLogprobs::from_rows([Some(vec![(7, -0.5), (8, -1.0)]), None]);
        let sequence = SampledSequence::default()
            .stop_reason(WireStopReason::Stop)
            .tokens([7, 9])
            .topk_logprobs(Some(table.clone()));
        let response =
            SampleResponse::default().sequences(vec![sequence]).topk_prompt_logprobs(Some(table));
        UpstreamResponse(sink).finish(Ok(response));
        let context = Context::from_waker(Waker::noop());
        let Poll::Ready(Ok(Some(progress))) = stream.poll_progress(&context) else {
            panic!("the response is complete")
        };
        let expected = [vec![(7, -0.5), (8, -1.0)], vec![]];
        assert_eq!(progress.prompt.unwrap().top, expected);
        let tops: Vec<_> = progress.tokens.iter().map(|token| token.top.to_vec()).collect();
        assert_eq!(tops, expected);
        assert_eq!(progress.tokens[1].stop, Some(StopReason::Stop));
    }
}
