//! [`SampledTokens`]: forwards the tokens of the engine to an inference request.

use tinkex_engine::decode::NO_LOGPROB;
use tinkex_engine::sample::{
    PromptScores, SampledToken, StopReason as EngineStopReason, TokenObserver,
};
use tinkex_inference::{GeneratedToken, PromptReport, StopReason, TokenSink};

/// Sends the tokens that the engine samples to a [`TokenSink`].
#[derive(Debug)]
pub(crate) struct SampledTokens(pub(crate) TokenSink);

impl TokenObserver for SampledTokens {
    fn prompt(&mut self, scores: &PromptScores, cache_hits: usize) {
        let top = scores.top_k.as_ref().map(|table| {
            let pairs: Vec<(u32, f32)> =
                table.tokens.iter().copied().zip(table.logprobs.iter().copied()).collect();
            pairs.chunks(table.k.max(1)).map(<[_]>::to_vec).collect()
        });
        self.0.prompt(PromptReport {
            logprobs: scores.logprobs.clone().unwrap_or_default(),
            top: top.unwrap_or_default(),
            cached_tokens: cache_hits,
        });
    }

    fn token(&mut self, sampled: SampledToken<'_>) {
        let top = sampled.top_tokens.iter().copied().zip(sampled.top_logprobs.iter().copied());
        self.0.token(GeneratedToken {
            completion: u32::try_from(sampled.completion).unwrap_or(u32::MAX),
            token: sampled.token,
            logprob: sampled.logprob,
            // The engine fills empty entries with this pair; do not report them as tokens.
            top: top.filter(|pair| *pair != (0, NO_LOGPROB)).collect(),
            stop: sampled.stop.map(|reason| match reason {
                EngineStopReason::Stop => StopReason::Stop,
                EngineStopReason::Length => StopReason::Length,
            }),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use tinkex_engine::sample::TopK;

    use super::*;

    #[test]
    fn empty_entries_of_the_most_probable_tokens_are_dropped() {
        let (sink, mut stream) = tinkex_inference::token_stream("1".to_owned(), |_| {});
        let mut observer = SampledTokens(sink);
        let top_k = TopK { k: 2, tokens: vec![1, 2, 3, 4], logprobs: vec![-1.0; 4] };
        let scores = PromptScores { top_k: Some(top_k), ..PromptScores::default() };
        observer.prompt(&scores, 16);
        observer.token(SampledToken {
            completion: 0,
            token: 5,
            logprob: -1.0,
            top_tokens: &[7, 0],
            top_logprobs: &[-0.5, NO_LOGPROB],
            stop: None,
        });
        let progress = stream.poll_progress(&Context::from_waker(Waker::noop()));
        let Poll::Ready(Ok(Some(progress))) = progress else { panic!("no progress") };
        assert_eq!(*progress.tokens[0].top, [(7, -0.5)]);
        let prompt = progress.prompt.unwrap();
        assert_eq!(prompt.top, [[(1, -1.0), (2, -1.0)], [(3, -1.0), (4, -1.0)]]);
        assert_eq!(prompt.cached_tokens, 16);
    }
}
