//! The `messages` and `messages/count_tokens` endpoints.

use std::task::{Context, Poll, ready};

use bytes::Bytes;
use serde::Serialize;

use super::documents::{MessageDocument, StopDocument, content_blocks};
use super::error::write_error;
use super::event_stream::MessageEvents;
use super::request::{CountTokensRequest, MessagesRequest};
use crate::chat::{AnswerEnd, Answers, ChatModel};
use crate::{
    EndpointRequest, EventSource, EventWriter, InferenceError, InferenceResponse, PendingResponse,
    ServedModel,
};

impl EndpointRequest for MessagesRequest {
    const USES_CHAT: bool = true;

    fn read(body: &[u8]) -> Result<Self, InferenceError> {
        Self::parse(body)
    }

    fn model(&self) -> &str {
        &self.model
    }

    fn start(self, model: &dyn ServedModel, _: i64) -> Result<PendingResponse, InferenceError> {
        let chat = ChatModel::of(model)?;
        let answers = Answers::start(model, &chat, &self.conversation, self.generation)
            .map_err(|error| error.renamed("stop", "stop_sequences"))?;
        let id = format!("msg_{}", answers.id());
        let events = MessageEvents::new(id.clone(), model.name().to_owned(), self.thinking);
        if self.stream {
            let out = EventWriter::default();
            let stream = MessageStream { events, out, answers: Some(answers) };
            let response = InferenceResponse::events(&id, stream);
            return Ok(Box::pin(std::future::ready(Ok(response))));
        }
        Ok(Box::pin(async move { collect(&id, &events, answers).await }))
    }
}

/// Waits for the answer and returns it in one document.
async fn collect(
    id: &str,
    events: &MessageEvents,
    answers: Answers,
) -> Result<InferenceResponse, InferenceError> {
    let (mut answers, usage) = answers.collect().await?;
    let answer = answers.pop().unwrap_or_default();
    let stop = StopDocument::from(answer.end.as_ref().unwrap_or(&AnswerEnd::Length));
    let document = MessageDocument {
        content: content_blocks(answer, events.shows_thinking()),
        stop_reason: Some(stop.stop_reason),
        stop_sequence: stop.stop_sequence,
        ..events.document(usage)
    };
    InferenceResponse::json(Some(id), &document)
}

/// A message that is streamed while it is sampled.
struct MessageStream {
    events: MessageEvents,
    out: EventWriter,
    /// `None` after the last event.
    answers: Option<Answers>,
}

impl EventSource for MessageStream {
    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let out = &mut self.out;
        while out.is_empty() {
            let Some(answers) = &mut self.answers else { return Poll::Ready(None) };
            match ready!(answers.poll_updates(context)) {
                Ok(Some(updates)) => {
                    for update in updates {
                        self.events.write(update, answers.usage(), out);
                    }
                }
                Ok(None) => self.answers = None,
                Err(error) => {
                    write_error(&error, out);
                    self.answers = None;
                }
            }
        }
        Poll::Ready(Some(out.take()))
    }
}

#[derive(Serialize)]
struct TokenCount {
    input_tokens: usize,
}

impl EndpointRequest for CountTokensRequest {
    const USES_CHAT: bool = true;

    fn read(body: &[u8]) -> Result<Self, InferenceError> {
        Self::parse(body)
    }

    fn model(&self) -> &str {
        &self.model
    }

    fn start(self, model: &dyn ServedModel, _: i64) -> Result<PendingResponse, InferenceError> {
        let chat = ChatModel::of(model)?;
        let input_tokens = self.conversation.count_tokens(model, &chat)?;
        let response = InferenceResponse::json(None, &TokenCount { input_tokens })?;
        Ok(Box::pin(std::future::ready(Ok(response))))
    }
}
