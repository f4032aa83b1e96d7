//! The `completions` endpoint: a response to one or more prompts, complete or streamed.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use serde::Serialize;
use tinkex_text::Tokenizer;

use super::choice::ChoicePiece;
use super::chunk::{ChunkHead, ChunkWriter};
use super::completion_request::CompletionRequest;
use super::error::with_document;
use super::prompt_completion::PromptCompletion;
use super::sampling::Delivery;
use super::usage::UsageDocument;
use crate::inference::{
    EventSource, EventWriter, InferenceError, InferenceResponse, NamedModel, tokenizing_cost,
};
use crate::state::ServerState;
use crate::task::run_blocking;

/// Handles a request to `completions`.
///
/// # Errors
/// Fails if the request is invalid or cannot be enqueued, and unless it is streamed, if it fails.
pub(crate) async fn completions(
    state: &Arc<ServerState>,
    body: Bytes,
) -> Result<InferenceResponse, InferenceError> {
    let size = body.len();
    let request =
        run_blocking(&state.decode_jobs, size, move || CompletionRequest::parse(&body)).await?;
    let model = NamedModel::resolve(state, &request.model)?;
    let tokenizer = model.tokenizer().await;
    let task_state = Arc::clone(state);
    let start = move || Completion::start(&task_state, &model, tokenizer.as_ref(), &request);
    let completion = run_blocking(&state.decode_jobs, tokenizing_cost(size), start).await?;
    if completion.delivery.stream {
        let id = completion.id.clone();
        return Ok(InferenceResponse::events(&id, CompletionStream::new(completion)));
    }
    completion.collect().await
}

/// A request whose prompts are being completed.
struct Completion {
    id: String,
    /// Time of the request in seconds since the Unix epoch.
    created: i64,
    model: String,
    prompts: Vec<PromptCompletion>,
    delivery: Delivery,
    usage: UsageDocument,
}

/// A complete response, or the last event of a stream, which has no choices.
#[derive(Serialize)]
struct CompletionDocument<'a> {
    #[serde(flatten)]
    head: ChunkHead<'a>,
    choices: &'a [ChoicePiece],
    usage: UsageDocument,
}

impl Completion {
    /// Enqueues all prompts of a request. If one is rejected, dropping the others cancels them.
    fn start(
        state: &Arc<ServerState>,
        model: &NamedModel,
        tokenizer: Option<&Tokenizer>,
        request: &CompletionRequest,
    ) -> Result<Self, InferenceError> {
        let mut usage = UsageDocument::default();
        let mut prompts: Vec<PromptCompletion> = Vec::with_capacity(request.prompts.len());
        let mut choices = 0;
        for prompt in &request.prompts {
            let started =
                PromptCompletion::start(state, model, tokenizer, request, prompt, choices)?;
            choices += started.choice_count();
            usage.prompt_tokens += started.prompt_tokens();
            prompts.push(started);
        }
        let first = prompts.iter().find_map(PromptCompletion::id);
        let id = first.map_or_else(String::new, |id| format!("cmpl-{id}"));
        let (created, model) = (state.clock.now().div_euclid(1_000_000), model.name.clone());
        Ok(Self { id, created, model, prompts, delivery: request.delivery, usage })
    }

    /// Waits for all choices and returns them in one document.
    async fn collect(mut self) -> Result<InferenceResponse, InferenceError> {
        let mut choices: Vec<ChoicePiece> = Vec::new();
        for prompt in std::mem::take(&mut self.prompts) {
            let return_token_ids = self.delivery.return_token_ids;
            choices.extend(prompt.collect(&mut self.usage, return_token_ids).await?);
        }
        InferenceResponse::json(Some(&self.id), &self.document(&choices))
    }

    fn head(&self) -> ChunkHead<'_> {
        let (id, created, model) = (&self.id, self.created, &self.model);
        ChunkHead { id, object: "text_completion", created, model }
    }

    fn document<'a>(&'a self, choices: &'a [ChoicePiece]) -> CompletionDocument<'a> {
        CompletionDocument { head: self.head(), choices, usage: self.usage.total() }
    }
}

/// A response that is sent as it is sampled.
struct CompletionStream {
    completion: Completion,
    chunks: ChunkWriter,
    out: EventWriter,
    /// Whether the last event was returned.
    ended: bool,
}

impl CompletionStream {
    fn new(completion: Completion) -> Self {
        let chunks = ChunkWriter::new(completion.head(), completion.delivery.include_usage);
        Self { completion, chunks, out: EventWriter::default(), ended: false }
    }

    /// Writes the events of the tokens that are available, one per choice, and the last events once
    /// all tokens were sampled. Returns [`Poll::Pending`] if it wrote nothing.
    fn poll_write(&mut self, context: &Context<'_>) -> Poll<Result<(), InferenceError>> {
        let Completion { prompts, usage, .. } = &mut self.completion;
        loop {
            let (mut waits, mut has_read) = (false, false);
            for prompt in &mut *prompts {
                match prompt.poll_read(context, usage)? {
                    Poll::Pending => waits = true,
                    Poll::Ready(more) => has_read |= more,
                }
                prompt.send_pieces(|piece| self.chunks.write(piece, &mut self.out));
            }
            if !self.out.is_empty() {
                return Poll::Ready(Ok(()));
            }
            // Tokens without a complete character have no event.
            if !has_read && waits {
                return Poll::Pending;
            }
            if !has_read {
                break;
            }
        }
        if self.completion.delivery.include_usage {
            self.out.data(&self.completion.document(&[]));
        }
        self.out.done();
        self.ended = true;
        Poll::Ready(Ok(()))
    }
}

impl EventSource for CompletionStream {
    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if let Err(error) = std::task::ready!(self.poll_write(context)) {
            with_document(&error, |document| self.out.data(document));
            self.ended = true;
            self.completion.prompts.clear();
        }
        Poll::Ready(Some(self.out.take()))
    }
}
