//! Channel for sampled tokens, from the thread that samples to the connection of the client.
//!
//! [`TokenSink`] never waits for the reader: otherwise one client that reads slowly would delay all
//! requests of the batch. The channel is therefore unbounded. The server limits its size when it
//! admits a request: it counts the maximum number of tokens of the request towards its queue
//! limits.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use crate::error::InferenceError;

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct GeneratedToken {
    /// Index of the completion in its request.
    pub completion: u32,
    /// Id of the token.
    pub token: u32,
    /// Log-probability as the Tinker API reports it: at the temperature of the request, unless the
    /// server has `--raw-logprobs`.
    pub logprob: f32,
    /// Most probable tokens with their log-probabilities, in descending order; empty if the request
    /// has no `top_logprobs`.
    pub top: Box<[(u32, f32)]>,
    /// Reason why the completion ends with this token; `None` if it continues.
    pub stop: Option<StopReason>,
}

/// Reason why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token or stop string occurred.
    Stop,
    /// The completion reached its maximum length.
    Length,
}

/// Scores of the prompt, and its use of the KV cache.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptReport {
    /// Log-probability of each prompt token, NaN where it is not known; empty if the request has no
    /// `prompt_logprobs`.
    pub logprobs: Vec<f32>,
    /// Most probable tokens at each prompt position, in descending order; empty if they were not
    /// requested.
    pub top: Vec<Vec<(u32, f32)>>,
    /// Number of prompt tokens that were found in the KV cache.
    pub cached_tokens: usize,
}

/// Output of a generation since the previous call.
#[derive(Debug, Default)]
pub struct GenerationProgress {
    /// Report about the prompt; in the first progress only.
    pub prompt: Option<PromptReport>,
    /// New tokens, in the order in which they were sampled.
    pub tokens: Vec<GeneratedToken>,
}

/// Number of tokens that a generation has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Prompt tokens that were found in the KV cache.
    pub cached: usize,
    /// Sampled tokens of all completions.
    pub sampled: usize,
}

/// How far a [`TokenStream`] was read when it was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamDrop {
    /// The reader has received the end of the generation.
    Finished,
    /// The reader needs no further token: cancel the generation if it is running.
    Cancelled,
}

/// Creates the channel of the generation with the id `id`. `on_drop` is called when the reader
/// drops the stream.
pub fn token_stream(
    id: String,
    on_drop: impl FnOnce(StreamDrop) + Send + 'static,
) -> (TokenSink, TokenStream) {
    let channel = Arc::new(Mutex::default());
    let sink = TokenSink(Arc::clone(&channel));
    let stream = TokenStream { id, channel, ended: false, on_drop: Some(Box::new(on_drop)) };
    (sink, stream)
}

#[derive(Debug, Default)]
struct Channel {
    progress: GenerationProgress,
    /// Tokens used so far; `None` until the prompt is computed.
    counts: Option<TokenCounts>,
    /// Whether the reader needs no further token because it has a complete answer.
    is_complete: bool,
    /// Set when no token follows.
    end: Option<Result<(), InferenceError>>,
    /// Wakes the reader.
    reader: Option<Waker>,
}

impl Channel {
    /// Ends the generation, unless it has ended.
    fn end(&mut self, end: Result<(), InferenceError>) {
        self.end.get_or_insert(end);
        self.wake();
    }

    fn wake(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

/// Receives the tokens of a generation. Dropping the stream cancels the generation.
pub struct TokenStream {
    id: String,
    channel: Arc<Mutex<Channel>>,
    /// Whether the end was returned, so that there is nothing to cancel.
    ended: bool,
    /// `None` once it was called.
    on_drop: Option<Box<dyn FnOnce(StreamDrop) + Send>>,
}

impl TokenStream {
    /// Returns the id of the generation, which log events contain.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns new tokens, or `None` after the last token. The last token of every completion has a
    /// stop reason.
    ///
    /// # Errors
    /// Returns the error with which the generation was ended.
    pub fn poll_progress(
        &mut self,
        context: &Context<'_>,
    ) -> Poll<Result<Option<GenerationProgress>, InferenceError>> {
        let mut channel = self.channel.lock();
        if channel.progress.prompt.is_some() || !channel.progress.tokens.is_empty() {
            return Poll::Ready(Ok(Some(std::mem::take(&mut channel.progress))));
        }
        if let Some(end) = &channel.end {
            self.ended = true;
            return Poll::Ready(end.clone().map(|()| None));
        }
        channel.reader = Some(context.waker().clone());
        Poll::Pending
    }

    /// Ends the generation because the tokens so far are a complete answer. Unlike a generation
    /// whose stream is dropped, it counts as successful.
    pub fn complete(self) {
        self.channel.lock().is_complete = true;
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        if !self.ended {
            self.channel.lock().end(Ok(()));
        }
        let state = if self.ended { StreamDrop::Finished } else { StreamDrop::Cancelled };
        if let Some(on_drop) = self.on_drop.take() {
            on_drop(state);
        }
    }
}

impl fmt::Debug for TokenStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenStream").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Sends the tokens of a generation. Cheap to clone.
#[derive(Clone, Debug)]
pub struct TokenSink(Arc<Mutex<Channel>>);

impl TokenSink {
    /// Sends the report about the prompt. The reader receives it with the first token.
    pub fn prompt(&self, report: PromptReport) {
        let mut channel = self.0.lock();
        channel.counts = Some(TokenCounts { cached: report.cached_tokens, sampled: 0 });
        channel.progress.prompt = Some(report);
    }

    /// Sends the next token of a completion; drops the token if the generation has ended.
    pub fn token(&self, token: GeneratedToken) {
        let mut channel = self.0.lock();
        if let Some(counts) = &mut channel.counts {
            counts.sampled += 1;
        }
        if channel.end.is_none() {
            channel.progress.tokens.push(token);
            // Wake the reader now, not after the step. Tokens are selected on one thread, so the
            // reader's task runs on an idle core. After the step it would occupy a core of the
            // next step, and all threads of the engine would wait for that core.
            channel.wake();
        }
    }

    /// Ends the generation after its last token, or with an error, unless it has ended.
    pub fn finish(&self, end: Result<(), InferenceError>) {
        self.0.lock().end(end);
    }

    /// Returns whether the generation needs no further token: its reader is gone, or the server has
    /// ended it.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.0.lock().end.is_some()
    }

    /// Returns whether the generation was ended because its reader has a complete answer.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.0.lock().is_complete
    }

    /// Returns the tokens used so far; `None` if the prompt was not computed.
    #[must_use]
    pub fn counts(&self) -> Option<TokenCounts> {
        self.0.lock().counts
    }
}

#[cfg(test)]
mod tests {
    use crate::error::ErrorClass;

    use super::*;

    fn channel() -> (TokenSink, TokenStream) {
        token_stream("1".to_owned(), |_| {})
    }

    fn sampled(token: u32, stop: Option<StopReason>) -> GeneratedToken {
        GeneratedToken { completion: 0, token, logprob: -1.0, top: Box::default(), stop }
    }

    fn poll(stream: &mut TokenStream) -> Poll<Result<Option<GenerationProgress>, InferenceError>> {
        stream.poll_progress(&Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_slow_reader_receives_all_tokens_before_the_end() {
        let (sink, mut stream) = channel();
        assert!(poll(&mut stream).is_pending());
        sink.prompt(PromptReport { cached_tokens: 16, ..PromptReport::default() });
        for token in 0..3 {
            sink.token(sampled(token, (token == 2).then_some(StopReason::Length)));
        }
        sink.finish(Ok(()));
        let Poll::Ready(Ok(Some(progress))) = poll(&mut stream) else { panic!("no progress") };
        assert_eq!(progress.prompt.unwrap().cached_tokens, 16);
        let tokens: Vec<u32> = progress.tokens.iter().map(|token| token.token).collect();
        assert_eq!(tokens, [0, 1, 2]);
        assert_eq!(sink.counts(), Some(TokenCounts { cached: 16, sampled: 3 }));
        assert!(matches!(poll(&mut stream), Poll::Ready(Ok(None))));
    }

    #[test]
    fn the_first_end_counts_and_no_token_follows_it() {
        let (sink, mut stream) = channel();
        sink.finish(Err(InferenceError::new(ErrorClass::RateLimit, "shutting down")));
        sink.token(sampled(1, None));
        sink.finish(Ok(()));
        assert!(sink.has_ended());
        let Poll::Ready(Err(error)) = poll(&mut stream) else { panic!("no error") };
        assert_eq!(error.class(), ErrorClass::RateLimit);
    }

    #[test]
    fn a_stream_that_is_dropped_before_its_end_is_cancelled() {
        let drops = Arc::new(Mutex::new(Vec::new()));
        let recorded = || {
            let drops = Arc::clone(&drops);
            token_stream("1".to_owned(), move |state| drops.lock().push(state))
        };
        let (sink, stream) = recorded();
        drop(stream);
        assert!(sink.has_ended() && !sink.is_complete());
        let (sink, stream) = recorded();
        stream.complete();
        assert!(sink.has_ended() && sink.is_complete());
        let (sink, mut stream) = recorded();
        sink.finish(Ok(()));
        assert!(poll(&mut stream).is_ready());
        drop(stream);
        let expected = [StreamDrop::Cancelled, StreamDrop::Cancelled, StreamDrop::Finished];
        assert_eq!(*drops.lock(), expected);
    }
}
