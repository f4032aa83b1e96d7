//! The `completions` endpoint: a response to one or more prompts, complete or streamed.

use std::task::{Context, Poll};

use bytes::Bytes;
use serde::Serialize;

use super::choice::ChoicePiece;
use super::chunk::{ChunkHead, ChunkWriter};
use super::completion_request::CompletionRequest;
use super::error::with_document;
use super::prompt_completion::PromptCompletion;
use super::sampling::Delivery;
use super::usage::UsageDocument;
use crate::{
    EndpointRequest, EventSource, EventWriter, InferenceError, InferenceResponse, PendingResponse,
    ServedModel,
};

impl EndpointRequest for CompletionRequest {
    const USES_CHAT: bool = false;

    fn read(body: &[u8]) -> Result<Self, InferenceError> {
        Self::parse(body)
    }

    fn model(&self) -> &str {
        &self.model
    }

    fn start(
        self,
        model: &dyn ServedModel,
        created: i64,
    ) -> Result<PendingResponse, InferenceError> {
        let completion = Completion::start(model, &self, created)?;
        if completion.delivery.stream {
            let id = completion.id.clone();
            let response = InferenceResponse::events(&id, CompletionStream::new(completion));
            return Ok(Box::pin(std::future::ready(Ok(response))));
        }
        Ok(Box::pin(completion.collect()))
    }
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
    /// Enqueues all prompts of a request. If a prompt is rejected, dropping the others cancels
    /// them.
    fn start(
        model: &dyn ServedModel,
        request: &CompletionRequest,
        created: i64,
    ) -> Result<Self, InferenceError> {
        let tokenizer = model.tokenizer();
        let mut usage = UsageDocument::default();
        let mut prompts: Vec<PromptCompletion> = Vec::with_capacity(request.prompts.len());
        let mut choices = 0;
        for prompt in &request.prompts {
            let started =
                PromptCompletion::start(model, tokenizer.as_ref(), request, prompt, choices)?;
            choices += started.choice_count();
            usage.prompt_tokens += started.prompt_tokens();
            prompts.push(started);
        }
        let first = prompts.iter().find_map(PromptCompletion::id);
        let id = first.map_or_else(String::new, |id| format!("cmpl-{id}"));
        Ok(Self {
            id,
            created,
            model: model.name().to_owned(),
            prompts,
            delivery: request.delivery,
            usage,
        })
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
        ChunkHead {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.model,
        }
    }

    fn document<'a>(&'a self, choices: &'a [ChoicePiece]) -> CompletionDocument<'a> {
        CompletionDocument { head: self.head(), choices, usage: self.usage.total() }
    }
}

/// A response that is streamed while it is sampled.
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
            let mut waits = false;
            let mut has_read = false;
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
