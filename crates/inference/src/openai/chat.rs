//! The `chat/completions` endpoint.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tinkex_text::{AnswerEvent, Tokenizer};

use super::chat_documents::{
    ChatChoice, ChatChoiceDelta, ChatDocument, ChatMessageDocument, MessageDelta, ToolCallDocument,
    finish_reason,
};
use super::chat_logprobs::ChatLogprobs;
use super::chat_request::ChatCompletionRequest;
use super::chunk::{ChunkHead, ChunkWriter};
use super::error::with_document;
use crate::chat::{Answer, AnswerEnd, AnswerUpdate, Answers, ChatModel};
use crate::{
    EndpointRequest, EventSource, EventWriter, InferenceError, InferenceResponse, PendingResponse,
    ServedModel,
};

impl EndpointRequest for ChatCompletionRequest {
    const USES_CHAT: bool = true;

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
        let (completion, answers) = ChatCompletion::start(model, self, created)?;
        if completion.stream {
            let id = completion.id.clone();
            let response = InferenceResponse::events(&id, ChatStream::new(completion, answers));
            return Ok(Box::pin(std::future::ready(Ok(response))));
        }
        Ok(Box::pin(completion.collect(answers)))
    }
}

/// Fields that all documents of a response contain.
struct ChatCompletion {
    id: String,
    /// Time of the request in seconds since the Unix epoch.
    created: i64,
    model: String,
    /// Number of answers.
    choices: usize,
    stream: bool,
    include_usage: bool,
    /// Tokens of the prompt, if the response has token ids.
    prompt: Option<Arc<[u32]>>,
    /// Tokenizer for the texts of tokens, if the response has log-probabilities.
    logprobs: Option<Tokenizer>,
}

impl ChatCompletion {
    fn start(
        model: &dyn ServedModel,
        mut request: ChatCompletionRequest,
        created: i64,
    ) -> Result<(Self, Answers), InferenceError> {
        let chat = ChatModel::of(model)?;
        if let Some(effort) = request.reasoning_effort.take() {
            if !chat.reads_variable("reasoning_effort") {
                let reason = "the chat template of this model does not read it";
                return Err(InferenceError::invalid("reasoning_effort", reason));
            }
            request.conversation.variables.push(("reasoning_effort".to_owned(), effort.into()));
        }
        let answers = Answers::start(model, &chat, &request.conversation, request.generation)?;
        let completion = Self {
            id: format!("chatcmpl-{}", answers.id()),
            created,
            model: model.name().to_owned(),
            choices: answers.count(),
            stream: request.delivery.stream,
            include_usage: request.delivery.include_usage,
            prompt: request.delivery.return_token_ids.then(|| answers.prompt()),
            logprobs: request.logprobs.then(|| chat.tokenizer().clone()),
        };
        Ok((completion, answers))
    }

    /// Waits for all answers and returns them in one document.
    async fn collect(self, answers: Answers) -> Result<InferenceResponse, InferenceError> {
        let (answers, usage) = answers.collect().await?;
        let choices = answers.into_iter().enumerate();
        let choices = choices.map(|(index, answer)| self.choice(index, answer)).collect();
        let prompt_token_ids = self.prompt.as_deref();
        let head = self.head("chat.completion");
        let document = ChatDocument { head, choices, prompt_token_ids, usage: usage.into() };
        InferenceResponse::json(Some(&self.id), &document)
    }

    fn head(&self, object: &'static str) -> ChunkHead<'_> {
        ChunkHead { id: &self.id, object, created: self.created, model: &self.model }
    }

    fn choice(&self, index: usize, answer: Answer) -> ChatChoice {
        let calls = answer.tool_calls.into_iter();
        let tool_calls: Vec<_> =
            calls.map(|(name, arguments)| ToolCallDocument::new(None, name, arguments)).collect();
        let only_calls = !tool_calls.is_empty() && answer.content.is_empty();
        let message = ChatMessageDocument {
            role: "assistant",
            content: (!only_calls).then_some(answer.content),
            refusal: None,
            reasoning_content: Some(answer.reasoning).filter(|text| !text.is_empty()),
            tool_calls,
        };
        let logprobs = self.logprobs.as_ref();
        let logprobs = logprobs.map(|tokenizer| ChatLogprobs::new(tokenizer, &answer.tokens));
        let finish_reason = finish_reason(answer.end.as_ref().unwrap_or(&AnswerEnd::Length));
        let token_ids = self.prompt.is_some().then_some(answer.token_ids);
        ChatChoice { index, message, logprobs, finish_reason, token_ids }
    }
}

/// A response that is streamed while it is sampled.
struct ChatStream {
    completion: ChatCompletion,
    chunks: ChunkWriter,
    out: EventWriter,
    /// `None` after the last event.
    answers: Option<Answers>,
    /// Whether the event with the role was sent, by answer.
    started: Vec<bool>,
}

impl ChatStream {
    fn new(completion: ChatCompletion, answers: Answers) -> Self {
        let chunks = ChunkWriter::new(completion.head(CHUNK), completion.include_usage);
        let started = vec![false; completion.choices];
        let out = EventWriter::default();
        Self { completion, chunks, out, answers: Some(answers), started }
    }
}

impl EventSource for ChatStream {
    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let Some(answers) = &mut self.answers else { return Poll::Ready(None) };
        let out = &mut self.out;
        while out.is_empty() {
            match ready!(answers.poll_updates(context)) {
                Ok(Some(updates)) => {
                    for update in updates {
                        let started = self.started.get_mut(update.index);
                        let is_first = started.is_some_and(|sent| !std::mem::replace(sent, true));
                        self.completion.write_update(update, is_first, &self.chunks, out);
                    }
                }
                Ok(None) => {
                    if self.completion.include_usage {
                        out.data(&ChatDocument {
                            head: self.completion.head(CHUNK),
                            choices: Vec::<ChatChoiceDelta>::new(),
                            prompt_token_ids: None,
                            usage: answers.usage().into(),
                        });
                    }
                    out.done();
                    self.answers = None;
                    break;
                }
                Err(error) => {
                    with_document(&error, |document| out.data(document));
                    self.answers = None;
                    break;
                }
            }
        }
        Poll::Ready(Some(out.take()))
    }
}

/// Type of the events of a stream.
const CHUNK: &str = "chat.completion.chunk";

impl ChatCompletion {
    /// Writes the events of an update: the role first, one event per part, and the reason at the
    /// end. The first event after the role has the ids and log-probabilities of the new tokens.
    fn write_update(
        &self,
        update: AnswerUpdate,
        is_first: bool,
        chunks: &ChunkWriter,
        out: &mut EventWriter,
    ) {
        let index = update.index;
        let tokenizer = self.logprobs.as_ref().filter(|_| !update.tokens.is_empty());
        let mut logprobs = tokenizer.map(|tokenizer| ChatLogprobs::new(tokenizer, &update.tokens));
        let mut token_ids = self.prompt.is_some().then_some(update.token_ids);
        let mut write = |delta, logprobs, finish_reason, token_ids| {
            let choice = ChatChoiceDelta { index, delta, logprobs, finish_reason, token_ids };
            chunks.write(&choice, out);
        };
        if is_first {
            let content = Some(String::new());
            let role = Some("assistant");
            write(MessageDelta { role, content, ..MessageDelta::default() }, None, None, None);
        }
        for part in update.parts {
            write(MessageDelta::from(part), logprobs.take(), None, token_ids.take());
        }
        let finish = update.end.as_ref().map(finish_reason);
        if finish.is_some() || logprobs.is_some() || token_ids.is_some() {
            write(MessageDelta::default(), logprobs, finish, token_ids);
        }
    }
}

impl From<AnswerEvent> for MessageDelta {
    fn from(part: AnswerEvent) -> Self {
        let mut delta = Self::default();
        match part {
            AnswerEvent::Reasoning(text) => delta.reasoning_content = Some(text),
            AnswerEvent::Content(text) => delta.content = Some(text),
            AnswerEvent::ToolCallStart { index, name } => {
                delta.tool_calls = vec![ToolCallDocument::new(Some(index), name, String::new())];
            }
            AnswerEvent::ToolArguments { index, text } => {
                delta.tool_calls = vec![ToolCallDocument::arguments(index, text)];
            }
        }
        delta
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Returns the choices of the events of updates of one answer.
    fn choices(updates: Vec<AnswerUpdate>) -> Vec<Value> {
        let completion = ChatCompletion {
            id: "chatcmpl-1".to_owned(),
            created: 5,
            model: "m".to_owned(),
            choices: 1,
            stream: true,
            include_usage: true,
            prompt: None,
            logprobs: None,
        };
        let mut out = EventWriter::default();
        let chunks = ChunkWriter::new(completion.head(CHUNK), true);
        for (at, update) in updates.into_iter().enumerate() {
            completion.write_update(update, at == 0, &chunks, &mut out);
        }
        let text = String::from_utf8(out.take().to_vec()).unwrap();
        let events =
            text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
        events
            .map(|event| {
                let event: Value = serde_json::from_str(event).unwrap();
                assert_eq!((&event["object"], &event["usage"]), (&json!(CHUNK), &Value::Null));
                assert!(event.as_object().unwrap().contains_key("usage"));
                event["choices"][0].clone()
            })
            .collect()
    }

    #[test]
    fn the_role_is_first_and_the_reason_last() {
        let parts = |parts: Vec<AnswerEvent>| AnswerUpdate { parts, ..AnswerUpdate::default() };
        let end = AnswerUpdate { end: Some(AnswerEnd::ToolCalls), ..AnswerUpdate::default() };
        let choices = choices(vec![
            parts(Vec::new()),
            parts(vec![AnswerEvent::Reasoning("hm".into()), AnswerEvent::Content("a".into())]),
            parts(vec![
                AnswerEvent::ToolCallStart { index: 0, name: "f".into() },
                AnswerEvent::ToolArguments { index: 0, text: "{}".into() },
            ]),
            end,
        ]);
        let id = choices[3]["delta"]["tool_calls"][0]["id"].clone();
        let deltas: Vec<&Value> = choices.iter().map(|choice| &choice["delta"]).collect();
        let function = json!({"name": "f", "arguments": ""});
        assert_eq!(
            json!(deltas),
            json!([
                {"role": "assistant", "content": ""},
                {"reasoning_content": "hm"},
                {"content": "a"},
                {"tool_calls": [{"index": 0, "id": id, "type": "function", "function": function}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
                {},
            ])
        );
        let reasons: Vec<&Value> = choices.iter().map(|choice| &choice["finish_reason"]).collect();
        assert_eq!(reasons[5], "tool_calls");
        assert!(reasons[..5].iter().all(|reason| reason.is_null()));
    }
}
