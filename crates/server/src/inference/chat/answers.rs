//! [`Answers`]: the answers to a conversation, while they are sampled.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tinkex_engine::sample::StopReason;
use tinkex_text::{AnswerEvent, AnswerParser, TextDecoder};
use tinkex_wire::RequestId;

use super::chat_model::ChatModel;
use super::request::ChatRequest;
use crate::error::ServerError;
use crate::inference::{
    GeneratedToken, Generation, GenerationProgress, GenerationRequest, InferenceError, NamedModel,
};
use crate::state::ServerState;

/// Answers to one conversation. Dropping them cancels the generation.
pub(crate) struct Answers {
    id: RequestId,
    /// `None` once all answers have ended.
    generation: Option<Generation>,
    readers: Vec<AnswerReader>,
    prompt: Arc<[u32]>,
    usage: AnswerUsage,
}

/// Number of tokens that a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnswerUsage {
    pub(crate) prompt_tokens: usize,
    /// Prompt tokens that were found in the KV cache.
    pub(crate) cached_tokens: usize,
    /// Sampled tokens of all answers, with those that ended them.
    pub(crate) completion_tokens: usize,
}

/// Next part of one answer.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct AnswerUpdate {
    /// Index of the answer.
    pub(crate) index: usize,
    /// Ids of all new tokens, with the one that ended the answer.
    pub(crate) token_ids: Vec<u32>,
    /// New tokens, without the one that ended the answer.
    pub(crate) tokens: Vec<GeneratedToken>,
    /// Parts that have become certain.
    pub(crate) parts: Vec<AnswerEvent>,
    /// Why the answer ended, in its last update.
    pub(crate) finish: Option<AnswerEnd>,
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AnswerEnd {
    /// The model ended it.
    EndOfTurn,
    /// It contains this stop string.
    StopString(String),
    /// It has the maximum number of tokens.
    Length,
    /// It calls tools.
    ToolCalls,
}

/// A complete answer.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    /// Names and arguments of tool calls.
    pub(crate) tool_calls: Vec<(String, String)>,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) tokens: Vec<GeneratedToken>,
    pub(crate) finish: Option<AnswerEnd>,
}

/// Converts the tokens of one answer to its parts.
#[derive(Clone)]
struct AnswerReader {
    decoder: TextDecoder,
    parser: AnswerParser,
    /// Whether the answer ends after its first tool call.
    is_single_call: bool,
    /// Tokens that end the answer and are not part of it.
    end_tokens: Arc<[u32]>,
    has_calls: bool,
    has_ended: bool,
    /// Whether the answer ended before the engine stopped sampling it.
    ended_early: bool,
}

impl Answers {
    /// Renders the prompt of a conversation and starts the generation. The prompt of `request` is
    /// replaced.
    ///
    /// # Errors
    /// Fails like [`Generation::start`], and names parameters that are invalid or that the chat
    /// template rejects.
    pub(crate) fn start(
        state: &Arc<ServerState>,
        model: &NamedModel,
        chat: &ChatModel,
        conversation: &ChatRequest,
        mut request: GenerationRequest,
    ) -> Result<Self, InferenceError> {
        let prompt = conversation.prompt(chat)?;
        request.prompt = prompt.tokens(chat)?;
        if !request.ignore_eos {
            request.stop_tokens.extend(&*chat.end_tokens);
        }
        let reader = AnswerReader {
            decoder: TextDecoder::new(&chat.tokenizer)
                .keep_special_tokens(AnswerParser::TAGS)
                .stop_strings(&request.stop_texts),
            parser: prompt.parser,
            is_single_call: conversation.is_single_call(),
            end_tokens: request.stop_tokens.as_slice().into(),
            has_calls: false,
            has_ended: false,
            ended_early: false,
        };
        let completions = usize::try_from(request.completions).unwrap_or(usize::MAX);
        let usage = AnswerUsage { prompt_tokens: request.prompt.len(), ..AnswerUsage::default() };
        let prompt = request.prompt.as_slice().into();
        let generation = Generation::start(state, model, request)?;
        let readers = vec![reader; completions];
        let id = generation.id().clone();
        Ok(Self { id, generation: Some(generation), readers, prompt, usage })
    }

    /// Returns the id of the request, which log events contain.
    pub(crate) fn id(&self) -> &RequestId {
        &self.id
    }

    /// Returns the tokens of the prompt.
    pub(crate) fn prompt(&self) -> Arc<[u32]> {
        Arc::clone(&self.prompt)
    }

    /// Returns the number of answers.
    pub(crate) fn count(&self) -> usize {
        self.readers.len()
    }

    /// Returns the tokens used so far.
    pub(crate) fn usage(&self) -> AnswerUsage {
        self.usage
    }

    /// Returns the next updates, at most one per answer; `None` after the last ones.
    ///
    /// # Errors
    /// Fails like [`Generation::poll_progress`].
    pub(crate) fn poll_updates(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<Vec<AnswerUpdate>>, InferenceError>> {
        loop {
            let Some(generation) = &mut self.generation else { return Poll::Ready(Ok(None)) };
            let Some(progress) = ready!(generation.poll_progress(context))? else {
                self.generation = None;
                continue;
            };
            let updates = self.read(progress)?;
            // Cancel the rest of answers that ended before the engine stopped sampling them. If
            // there are none, the engine has completed the generation.
            if self.readers.iter().all(|reader| reader.has_ended)
                && self.readers.iter().any(|reader| reader.ended_early)
            {
                self.generation = None;
            }
            if !updates.is_empty() {
                return Poll::Ready(Ok(Some(updates)));
            }
        }
    }

    fn read(&mut self, progress: GenerationProgress) -> Result<Vec<AnswerUpdate>, InferenceError> {
        if let Some(prompt) = progress.prompt {
            self.usage.cached_tokens = prompt.cached_tokens.min(self.usage.prompt_tokens);
        }
        let mut updates = BTreeMap::new();
        for token in progress.tokens {
            let index = usize::try_from(token.completion).unwrap_or(usize::MAX);
            let Some(reader) = self.readers.get_mut(index) else { continue };
            if reader.has_ended {
                continue;
            }
            self.usage.completion_tokens += 1;
            let update = updates
                .entry(index)
                .or_insert_with(|| AnswerUpdate { index, ..AnswerUpdate::default() });
            reader.read(token, update).map_err(|error| {
                let message = format!("cannot decode the sampled tokens: {error}");
                InferenceError::from(ServerError::Internal(message))
            })?;
        }
        Ok(updates.into_values().collect())
    }

    /// Waits for the complete answers.
    ///
    /// # Errors
    /// Fails like [`Generation::poll_progress`].
    pub(crate) async fn collect(mut self) -> Result<(Vec<Answer>, AnswerUsage), InferenceError> {
        let mut answers: Vec<Answer> = self.readers.iter().map(|_| Answer::default()).collect();
        while let Some(updates) = std::future::poll_fn(|context| self.poll_updates(context)).await?
        {
            for update in updates {
                if let Some(answer) = answers.get_mut(update.index) {
                    answer.add(update);
                }
            }
        }
        Ok((answers, self.usage))
    }
}

impl AnswerReader {
    fn read(
        &mut self,
        token: GeneratedToken,
        update: &mut AnswerUpdate,
    ) -> tinkex_text::Result<()> {
        let stop = token.stop;
        let is_end = stop == Some(StopReason::Stop) && self.end_tokens.contains(&token.token);
        let mut text = String::new();
        update.token_ids.push(token.token);
        if !is_end {
            text = self.decoder.push(token.token)?;
            update.tokens.push(token);
        }
        if stop.is_some() {
            text.push_str(&self.decoder.finish()?);
        }
        let mut parts = self.parser.push(&text);
        let stop_string = self.decoder.matched_stop();
        let mut finish = match (stop_string, stop) {
            (Some(string), _) => Some(AnswerEnd::StopString(string.to_owned())),
            (None, Some(StopReason::Length)) => Some(AnswerEnd::Length),
            (None, Some(StopReason::Stop)) => Some(AnswerEnd::EndOfTurn),
            (None, None) => None,
        };
        if finish.is_some() {
            parts.extend(self.parser.finish());
        }
        let is_call = |part: &AnswerEvent| matches!(part, AnswerEvent::ToolArguments { .. });
        if let Some(first) = parts.iter().position(is_call) {
            self.has_calls = true;
            if self.is_single_call {
                parts.truncate(first + 1);
                finish = Some(AnswerEnd::ToolCalls);
            }
        }
        if self.has_calls && finish == Some(AnswerEnd::EndOfTurn) {
            finish = Some(AnswerEnd::ToolCalls);
        }
        self.has_ended = finish.is_some();
        self.ended_early = self.has_ended && stop.is_none();
        update.parts.extend(parts);
        update.finish = finish;
        Ok(())
    }
}

impl Answer {
    fn add(&mut self, update: AnswerUpdate) {
        for part in update.parts {
            match part {
                AnswerEvent::Reasoning(text) => self.reasoning.push_str(&text),
                AnswerEvent::Content(text) => self.content.push_str(&text),
                AnswerEvent::ToolCallStart { name, .. } => {
                    self.tool_calls.push((name, String::new()));
                }
                AnswerEvent::ToolArguments { text, .. } => {
                    if let Some((_, arguments)) = self.tool_calls.last_mut() {
                        arguments.push_str(&text);
                    }
                }
            }
        }
        self.token_ids.extend(update.token_ids);
        self.tokens.extend(update.tokens);
        self.finish = self.finish.take().or(update.finish);
    }
}
