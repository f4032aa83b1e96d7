//! The `completions` endpoint.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use serde::Serialize;
use tinkex_text::Tokenizer;

use super::choice::{ChoicePiece, ChoiceWriter};
use super::completion_request::CompletionRequest;
use super::error::with_document;
use super::sampling::Delivery;
use super::usage::UsageDocument;
use crate::inference::{
    EventSource, EventWriter, Generation, GenerationProgress, InferenceError, InferenceResponse,
    NamedModel,
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
        run_blocking(&state.decode_permits, size, move || CompletionRequest::parse(&body)).await?;
    let model = NamedModel::resolve(state, &request.model)?;
    let tokenizer = model.tokenizer().await;
    let task_state = Arc::clone(state);
    let start = move || Completion::start(&task_state, &model, tokenizer.as_ref(), &request);
    let completion = run_blocking(&state.decode_permits, size, start).await?;
    if completion.delivery.stream {
        return Ok(InferenceResponse::events(&completion.id.clone(), completion));
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
    /// Whether the last event was returned.
    ended: bool,
}

/// A prompt and its choices.
struct PromptCompletion {
    /// `None` after the last token.
    generation: Option<Generation>,
    choices: Vec<ChoiceWriter>,
    prompt: Vec<u32>,
    /// Text of the prompt, if the request has `echo`.
    echo: Option<String>,
}

/// Maximum number of prompt tokens that the choices of a prompt repeat, with `echo` or
/// `return_token_ids`. A short request would need any amount of memory otherwise.
const MAX_REPEATED_TOKENS: usize = 1 << 21;

fn check_repetition(prompt: usize, choices: usize) -> Result<(), InferenceError> {
    if prompt.saturating_mul(choices) <= MAX_REPEATED_TOKENS {
        return Ok(());
    }
    let reason = format!(
        "{choices} choices would each repeat a prompt of {prompt} tokens (echo, \
         return_token_ids); the limit is {MAX_REPEATED_TOKENS} tokens in total"
    );
    Err(InferenceError::invalid("n", reason))
}

/// A response, or one event of a stream.
#[derive(Serialize)]
struct CompletionDocument<'a> {
    id: &'a str,
    object: &'static str,
    created: i64,
    model: &'a str,
    choices: &'a [ChoicePiece],
    /// Number of tokens. A stream with usage has `null` in all events but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageDocument>>,
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
        let mut prompts = Vec::with_capacity(request.prompts.len());
        let mut first_choice = 0;
        for prompt in &request.prompts {
            let mut generation = request.generation.clone();
            generation.prompt = prompt.tokens(tokenizer)?;
            let tokens = generation.prompt.clone();
            usage.prompt_tokens += tokens.len();
            let count = usize::try_from(generation.completions).unwrap_or(usize::MAX);
            if request.echo || request.delivery.return_token_ids {
                check_repetition(tokens.len(), count)?;
            }
            let indices = first_choice..first_choice + count;
            first_choice = indices.end;
            let echo = request.echo.then(|| prompt.text(&tokens, tokenizer));
            let eos = &model.base.config.eos;
            let started = Generation::start(state, model, generation)?;
            let writer = ChoiceWriter::new(request.content, tokenizer, &request.generation, eos);
            let writer = writer.after(tokens.last().copied());
            let choices = indices.map(|index| writer.with_index(index)).collect();
            let generation = Some(started);
            prompts.push(PromptCompletion { generation, choices, prompt: tokens, echo });
        }
        let first = prompts.iter().find_map(|prompt| prompt.generation.as_ref());
        let id = first.map_or_else(String::new, |first| format!("cmpl-{}", first.id()));
        let (created, model) = (state.clock.now().div_euclid(1_000_000), model.name.clone());
        Ok(Self { id, created, model, prompts, delivery: request.delivery, usage, ended: false })
    }

    /// Waits for all choices and returns them in one document.
    async fn collect(mut self) -> Result<InferenceResponse, InferenceError> {
        let mut choices: Vec<ChoicePiece> = Vec::new();
        let mut prompts = std::mem::take(&mut self.prompts);
        for prompt in &mut prompts {
            let first = choices.len();
            choices.resize_with(first + prompt.choices.len(), ChoicePiece::default);
            let Some(mut generation) = prompt.generation.take() else { continue };
            while let Some(progress) = generation.progress().await? {
                for (piece, choice) in
                    prompt.pieces(progress, &mut self.usage)?.into_iter().zip(&mut choices[first..])
                {
                    if let Some(piece) = piece {
                        choice.index = piece.index;
                        choice.append(piece);
                    }
                }
            }
            if self.delivery.return_token_ids {
                for choice in &mut choices[first..] {
                    choice.prompt_token_ids = Some(prompt.prompt.clone());
                }
            }
        }
        let usage = Some(Some(self.usage.total()));
        InferenceResponse::json(Some(&self.id), &self.document(&choices, usage))
    }

    fn document<'a>(
        &'a self,
        choices: &'a [ChoicePiece],
        usage: Option<Option<UsageDocument>>,
    ) -> CompletionDocument<'a> {
        let (id, created, model) = (&self.id, self.created, &self.model);
        CompletionDocument { id, object: "text_completion", created, model, choices, usage }
    }

    /// Writes the events of everything that is available. Returns whether all tokens were sampled.
    fn write_available(
        &mut self,
        context: &Context<'_>,
        out: &mut EventWriter,
    ) -> Result<bool, InferenceError> {
        let mut ended = true;
        let mut prompts = std::mem::take(&mut self.prompts);
        for prompt in &mut prompts {
            while let Some(generation) = &mut prompt.generation {
                match generation.poll_progress(context)? {
                    Poll::Pending => {
                        ended = false;
                        break;
                    }
                    Poll::Ready(None) => prompt.generation = None,
                    Poll::Ready(Some(progress)) => {
                        let pieces = prompt.pieces(progress, &mut self.usage)?;
                        for piece in pieces.into_iter().flatten().filter(|piece| !piece.is_empty())
                        {
                            let usage = self.delivery.include_usage.then_some(None);
                            out.data(&self.document(&[piece], usage));
                        }
                    }
                }
            }
        }
        self.prompts = prompts;
        Ok(ended)
    }
}

impl EventSource for Completion {
    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let mut out = EventWriter::default();
        match self.write_available(context, &mut out) {
            Ok(false) if out.is_empty() => return Poll::Pending,
            Ok(false) => {}
            Ok(true) => {
                if self.delivery.include_usage {
                    out.data(&self.document(&[], Some(Some(self.usage.total()))));
                }
                out.done();
                self.ended = true;
            }
            Err(error) => {
                with_document(&error, |document| out.data(document));
                self.ended = true;
                self.prompts.clear();
            }
        }
        Poll::Ready(Some(out.take()))
    }
}

impl PromptCompletion {
    /// Converts new tokens to pieces, one per choice that has any.
    fn pieces(
        &mut self,
        progress: GenerationProgress,
        usage: &mut UsageDocument,
    ) -> Result<Vec<Option<ChoicePiece>>, InferenceError> {
        let mut pieces: Vec<Option<ChoicePiece>> = Vec::new();
        pieces.resize_with(self.choices.len(), || None);
        if let Some(report) = progress.prompt {
            usage.prompt_tokens_details.cached_tokens += report.cached_tokens;
            if let Some(text) = &self.echo {
                for (choice, piece) in self.choices.iter_mut().zip(&mut pieces) {
                    *piece = Some(choice.echo(text, &self.prompt, &report.scores)?);
                }
            }
        }
        for token in &progress.tokens {
            let index = usize::try_from(token.completion).unwrap_or(usize::MAX);
            let (Some(choice), Some(piece)) = (self.choices.get_mut(index), pieces.get_mut(index))
            else {
                continue;
            };
            choice.push(piece.get_or_insert_default(), token)?;
            usage.completion_tokens += usize::from(choice.counts_tokens());
        }
        Ok(pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_choices_of_a_long_prompt_do_not_repeat_it() {
        assert!(check_repetition(1 << 11, 1 << 10).is_ok());
        let error = check_repetition(100_000, 1_000).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("n"));
        assert!(error.error.to_string().starts_with("n: 1000 choices would each repeat"));
    }
}
