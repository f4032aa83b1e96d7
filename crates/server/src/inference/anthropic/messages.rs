//! The `messages` and `messages/count_tokens` endpoints.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use serde::Serialize;

use super::documents::{MessageDocument, StopDocument, content_blocks};
use super::error::write_error;
use super::event_stream::MessageEvents;
use super::request::MessagesRequest;
use crate::inference::chat::{AnswerEnd, Answers, ChatModel};
use crate::inference::{
    EventSource, EventWriter, InferenceError, InferenceResponse, NamedModel, tokenizing_cost,
};
use crate::state::ServerState;
use crate::task::run_blocking;

/// Handles a request to `messages`.
///
/// # Errors
/// Fails if the request is invalid or cannot be enqueued, and unless it is streamed, if it fails.
pub(crate) async fn messages(
    state: &Arc<ServerState>,
    body: Bytes,
) -> Result<InferenceResponse, InferenceError> {
    let size = body.len();
    let request =
        run_blocking(&state.decode_jobs, size, move || MessagesRequest::read(&body)).await?;
    let (stream, thinking) = (request.stream, request.thinking);
    let model = NamedModel::resolve(state, &request.model)?;
    let chat = ChatModel::of(&model).await?;
    let (task_state, name) = (Arc::clone(state), model.name.clone());
    let start = move || {
        let MessagesRequest { conversation, generation, .. } = request;
        Answers::start(&task_state, &model, &chat, &conversation, generation)
            .map_err(|error| error.renamed("stop", "stop_sequences"))
    };
    let answers = run_blocking(&state.decode_jobs, tokenizing_cost(size), start).await?;
    let id = format!("msg_{}", answers.id());
    let events = MessageEvents::new(id.clone(), name, thinking);
    if stream {
        let out = EventWriter::default();
        let stream = MessageStream { events, out, answers: Some(answers) };
        return Ok(InferenceResponse::events(&id, stream));
    }
    collect(&id, &events, answers).await
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

/// A message that is sent as it is sampled.
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

/// Handles a request to `messages/count_tokens`.
///
/// # Errors
/// Fails if the request is invalid.
pub(crate) async fn count_tokens(
    state: &Arc<ServerState>,
    body: Bytes,
) -> Result<InferenceResponse, InferenceError> {
    let size = body.len();
    let request =
        run_blocking(&state.decode_jobs, size, move || MessagesRequest::read_count(&body)).await?;
    let model = NamedModel::resolve(state, &request.model)?;
    let chat = ChatModel::of(&model).await?;
    let count = move || request.conversation.count_tokens(&chat);
    let input_tokens = run_blocking(&state.decode_jobs, tokenizing_cost(size), count).await?;
    InferenceResponse::json(None, &TokenCount { input_tokens })
}
