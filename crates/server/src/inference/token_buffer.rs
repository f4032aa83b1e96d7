//! Buffers of sampled tokens between the worker and the connections.
//!
//! The worker must not wait for a client that reads slowly, so the buffer accepts every token. Its
//! size is bounded by the number of tokens that the request asked for, which the queue has counted
//! when it admitted the request.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tinkex_engine::decode::NO_LOGPROB;
use tinkex_engine::sample::{PromptScores, SampledToken, StopReason, TokenObserver};

use crate::error::ServerError;

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GeneratedToken {
    /// Index of the completion in its request.
    pub(crate) completion: u32,
    pub(crate) token: u32,
    /// Log-probability as the Tinker API reports it: at the temperature of the request, unless the
    /// server has `--raw-logprobs`.
    pub(crate) logprob: f32,
    /// Most probable tokens with their log-probabilities, in descending order; empty if the request
    /// has no `top_logprobs`.
    pub(crate) top: Box<[(u32, f32)]>,
    /// Reason why the completion ends with this token; `None` if it continues.
    pub(crate) stop: Option<StopReason>,
}

/// What is known about the prompt before the first token.
#[derive(Clone, Debug, Default)]
pub(crate) struct PromptReport {
    /// Requested scores.
    pub(crate) scores: PromptScores,
    /// Number of prompt tokens that were found in the KV cache.
    pub(crate) cached_tokens: usize,
}

/// What a generation has produced since the previous call.
#[derive(Debug, Default)]
pub(crate) struct GenerationProgress {
    /// Report about the prompt; in the first progress only.
    pub(crate) prompt: Option<PromptReport>,
    /// New tokens, in the order in which they were sampled.
    pub(crate) tokens: Vec<GeneratedToken>,
}

/// Number of tokens that a generation has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenCounts {
    /// Prompt tokens that were found in the KV cache.
    pub(crate) cached: usize,
    /// Sampled tokens of all completions.
    pub(crate) sampled: usize,
}

/// Buffer between the worker and one reader.
#[derive(Debug, Default)]
pub(super) struct TokenBuffer(Mutex<BufferState>);

#[derive(Debug, Default)]
struct BufferState {
    progress: GenerationProgress,
    /// Tokens used so far; `None` until the prompt is computed.
    counts: Option<TokenCounts>,
    /// Whether the reader needs no further token because it has a complete answer.
    is_complete: bool,
    /// Set when no token follows.
    end: Option<Result<(), ServerError>>,
    /// Wakes the reader.
    reader: Option<Waker>,
}

impl TokenBuffer {
    fn lock(&self) -> MutexGuard<'_, BufferState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the generation, unless it has ended.
    pub(super) fn end(&self, end: Result<(), ServerError>) {
        let mut state = self.lock();
        state.end.get_or_insert(end);
        state.wake();
    }

    /// Ends the generation because its reader has a complete answer.
    pub(super) fn complete(&self) {
        self.lock().is_complete = true;
        self.end(Ok(()));
    }

    /// Returns the buffered progress; `None` after the last token.
    pub(super) fn poll(
        &self,
        context: &Context<'_>,
    ) -> Poll<Result<Option<GenerationProgress>, ServerError>> {
        let mut state = self.lock();
        if state.progress.prompt.is_some() || !state.progress.tokens.is_empty() {
            return Poll::Ready(Ok(Some(std::mem::take(&mut state.progress))));
        }
        if let Some(end) = &state.end {
            return Poll::Ready(end.clone().map(|()| None));
        }
        state.reader = Some(context.waker().clone());
        Poll::Pending
    }

    fn has_ended(&self) -> bool {
        self.lock().end.is_some()
    }
}

impl BufferState {
    fn wake(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

/// The worker's end of a generation: receives the tokens from the engine.
#[derive(Clone, Debug)]
pub(crate) struct TokenSink(pub(super) Arc<TokenBuffer>);

impl TokenSink {
    /// Returns whether the generation needs no further token: its reader is gone, or the server is
    /// shutting down.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.has_ended()
    }

    /// Returns whether the generation was ended because its reader has a complete answer.
    pub(crate) fn is_complete(&self) -> bool {
        self.0.lock().is_complete
    }

    /// Returns the tokens used so far; `None` if the prompt was not computed.
    pub(crate) fn counts(&self) -> Option<TokenCounts> {
        self.0.lock().counts
    }

    /// Ends the generation after its last token, or with an error.
    pub(crate) fn finish(&self, end: Result<(), ServerError>) {
        self.0.end(end);
    }
}

impl TokenObserver for TokenSink {
    fn prompt(&mut self, scores: &PromptScores, cache_hits: usize) {
        // The first token follows in the same step and wakes the reader.
        let report = PromptReport { scores: scores.clone(), cached_tokens: cache_hits };
        let mut state = self.0.lock();
        state.progress.prompt = Some(report);
        state.counts = Some(TokenCounts { cached: cache_hits, sampled: 0 });
    }

    fn token(&mut self, sampled: SampledToken<'_>) {
        let top = sampled.top_tokens.iter().copied().zip(sampled.top_logprobs.iter().copied());
        let token = GeneratedToken {
            completion: u32::try_from(sampled.completion).unwrap_or(u32::MAX),
            token: sampled.token,
            logprob: sampled.logprob,
            // The engine fills empty entries with this pair.
            top: top.filter(|pair| *pair != (0, NO_LOGPROB)).collect(),
            stop: sampled.stop,
        };
        let mut state = self.0.lock();
        if let Some(counts) = &mut state.counts {
            counts.sampled += 1;
        }
        if state.end.is_none() {
            state.progress.tokens.push(token);
            // Wake the reader now, not after the step: tokens are sampled on one thread, so its task
            // runs on the other cores. At the start of the next step it would take one from the
            // engine, whose other threads would wait for it.
            state.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampled(token: u32, stop: Option<StopReason>) -> SampledToken<'static> {
        let (top_tokens, top_logprobs) = (&[7, 0][..], &[-0.5, NO_LOGPROB][..]);
        SampledToken { completion: 0, token, logprob: -1.0, top_tokens, top_logprobs, stop }
    }

    fn poll(buffer: &TokenBuffer) -> Poll<Result<Option<GenerationProgress>, ServerError>> {
        buffer.poll(&Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_slow_reader_receives_all_tokens_before_the_end() {
        let mut sink = TokenSink(Arc::default());
        assert!(poll(&sink.0).is_pending());
        sink.prompt(&PromptScores::default(), 16);
        for token in 0..3 {
            sink.token(sampled(token, (token == 2).then_some(StopReason::Length)));
        }
        sink.finish(Ok(()));
        let Poll::Ready(Ok(Some(progress))) = poll(&sink.0) else { panic!("no progress") };
        assert_eq!(progress.prompt.unwrap().cached_tokens, 16);
        let tokens: Vec<u32> = progress.tokens.iter().map(|token| token.token).collect();
        assert_eq!(tokens, [0, 1, 2]);
        assert_eq!(*progress.tokens[0].top, [(7, -0.5)], "empty entries are dropped");
        assert_eq!(sink.counts(), Some(TokenCounts { cached: 16, sampled: 3 }));
        assert!(matches!(poll(&sink.0), Poll::Ready(Ok(None))));
    }

    #[test]
    fn the_first_end_counts_and_no_token_follows_it() {
        let mut sink = TokenSink(Arc::default());
        sink.finish(Err(ServerError::shutting_down()));
        sink.token(sampled(1, None));
        sink.finish(Ok(()));
        assert!(sink.has_ended());
        assert!(matches!(poll(&sink.0), Poll::Ready(Err(ServerError::Busy { .. }))));
    }
}
