//! [`Answers`]: the answers to a conversation, while they are sampled.
//!
//! One generation samples all answers. Each answer has an [`AnswerReader`], which converts its
//! tokens.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tinkex_text::{AnswerParser, TextDecoder};

use super::answer::{Answer, AnswerUpdate};
use super::answer_reader::AnswerReader;
use super::chat_model::ChatModel;
use super::request::ChatRequest;
use crate::{
    GenerationProgress, GenerationRequest, InferenceError, ServedModel, TextLimit, TokenStream,
};

/// Answers to one conversation. Dropping them cancels the generation.
pub(crate) struct Answers {
    id: String,
    /// `None` once all answers have ended.
    tokens: Option<TokenStream>,
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
    /// Sampled tokens of all answers, including the tokens that ended them.
    pub(crate) completion_tokens: usize,
}

impl Answers {
    /// Renders the prompt of a conversation and starts the generation. The prompt of `request` is
    /// replaced.
    ///
    /// # Errors
    /// Fails like [`ServedModel::generate`], and names parameters that are invalid or that the chat
    /// template rejects.
    pub(crate) fn start(
        model: &dyn ServedModel,
        chat: &ChatModel,
        conversation: &ChatRequest,
        mut request: GenerationRequest,
    ) -> Result<Self, InferenceError> {
        let prompt = conversation.prompt(chat, TextLimit::new(model, &chat.tokenizer))?;
        request.prompt = prompt.tokens(model, chat)?;
        if !request.ignore_eos {
            request.stop_tokens.extend(&*chat.end_tokens);
        }
        let decoder = TextDecoder::new(&chat.tokenizer)
            .keep_special_tokens(AnswerParser::TAGS)
            .stop_strings(&request.stop_texts);
        let is_single_call = conversation.is_single_call();
        let reader =
            AnswerReader::new(decoder, prompt.parser, is_single_call, &request.stop_tokens);
        let completions = usize::try_from(request.completions).unwrap_or(usize::MAX);
        let usage = AnswerUsage { prompt_tokens: request.prompt.len(), ..AnswerUsage::default() };
        let prompt = request.prompt.as_slice().into();
        let tokens = model.generate(request)?;
        let readers = vec![reader; completions];
        let id = tokens.id().to_owned();
        Ok(Self { id, tokens: Some(tokens), readers, prompt, usage })
    }

    /// Returns the id of the request, which log events contain.
    pub(crate) fn id(&self) -> &str {
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

    /// Returns the next updates, at most one per answer; `None` after the last updates.
    ///
    /// # Errors
    /// Fails like [`TokenStream::poll_progress`].
    pub(crate) fn poll_updates(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<Vec<AnswerUpdate>>, InferenceError>> {
        loop {
            let Some(tokens) = &mut self.tokens else { return Poll::Ready(Ok(None)) };
            let Some(progress) = ready!(tokens.poll_progress(context))? else {
                self.tokens = None;
                continue;
            };
            let updates = self.read(progress)?;
            // If no answer ended early, the engine has completed the generation itself.
            if self.readers.iter().all(AnswerReader::has_ended)
                && self.readers.iter().any(AnswerReader::has_ended_early)
                && let Some(tokens) = self.tokens.take()
            {
                tokens.complete();
            }
            if !updates.is_empty() {
                return Poll::Ready(Ok(Some(updates)));
            }
        }
    }

    /// Converts new tokens to updates, at most one per answer.
    fn read(&mut self, progress: GenerationProgress) -> Result<Vec<AnswerUpdate>, InferenceError> {
        if let Some(prompt) = progress.prompt {
            self.usage.cached_tokens = prompt.cached_tokens.min(self.usage.prompt_tokens);
        }
        let mut updates = BTreeMap::new();
        for token in progress.tokens {
            let index = usize::try_from(token.completion).unwrap_or(usize::MAX);
            let Some(reader) = self.readers.get_mut(index) else { continue };
            if reader.has_ended() {
                continue;
            }
            self.usage.completion_tokens += 1;
            let update = updates
                .entry(index)
                .or_insert_with(|| AnswerUpdate { index, ..AnswerUpdate::default() });
            reader.read(token, update).map_err(|error| {
                let message = format!("cannot decode the sampled tokens: {error}");
                InferenceError::internal(message)
            })?;
        }
        Ok(updates.into_values().collect())
    }

    /// Waits for the complete answers.
    ///
    /// # Errors
    /// Fails like [`TokenStream::poll_progress`].
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
