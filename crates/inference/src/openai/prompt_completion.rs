//! [`PromptCompletion`]: one prompt of a `completions` request, and the choices that complete it.

use std::ops::Range;
use std::task::{Context, Poll, ready};

use tinkex_text::Tokenizer;

use super::choice::{ChoicePiece, ChoiceWriter};
use super::completion_request::{CompletionRequest, Prompt};
use super::usage::UsageDocument;
use crate::{GenerationProgress, InferenceError, ServedModel, TokenStream};

/// Maximum number of prompt tokens that the choices of a prompt repeat, with `echo` or
/// `return_token_ids`. Without the limit, a short request could need any amount of memory.
const MAX_REPEATED_TOKENS: usize = 1 << 21;

/// A prompt that is being completed. Dropping it cancels the generation.
pub(super) struct PromptCompletion {
    /// `None` after the last token.
    tokens: Option<TokenStream>,
    choices: Vec<ChoiceWriter>,
    prompt: Vec<u32>,
    /// Text of the prompt, if the choices begin with it.
    echo: Option<String>,
}

impl PromptCompletion {
    /// Enqueues a prompt of a request. Its choices have consecutive indices from `first_choice`.
    pub(super) fn start(
        model: &dyn ServedModel,
        tokenizer: Option<&Tokenizer>,
        request: &CompletionRequest,
        prompt: &Prompt,
        first_choice: usize,
    ) -> Result<Self, InferenceError> {
        let prompt_tokens = prompt.tokens(model, tokenizer)?;
        let mut generation = request.generation.clone();
        let count = usize::try_from(generation.completions).unwrap_or(usize::MAX);
        if request.echo || request.delivery.return_token_ids {
            check_repetition(prompt_tokens.len(), count)?;
        }
        generation.prompt.clone_from(&prompt_tokens);
        let echo = request.echo.then(|| prompt.text(&prompt_tokens, tokenizer));
        let writer = ChoiceWriter::new(request.content, tokenizer, &generation, model.eos())
            .after(prompt_tokens.last().copied());
        let tokens = Some(model.generate(generation)?);
        let indices: Range<usize> = first_choice..first_choice + count;
        let choices = indices.map(|index| writer.with_index(index)).collect();
        Ok(Self { tokens, choices, prompt: prompt_tokens, echo })
    }

    /// Returns the id of the generation, until its end.
    pub(super) fn id(&self) -> Option<&str> {
        self.tokens.as_ref().map(TokenStream::id)
    }

    /// Returns the number of prompt tokens.
    pub(super) fn prompt_tokens(&self) -> usize {
        self.prompt.len()
    }

    /// Returns the number of choices.
    pub(super) fn choice_count(&self) -> usize {
        self.choices.len()
    }

    /// Adds the tokens that have been sampled since the last call to the choices. Returns whether
    /// more may follow.
    ///
    /// # Errors
    /// Fails like [`TokenStream::poll_progress`].
    pub(super) fn poll_read(
        &mut self,
        context: &Context<'_>,
        usage: &mut UsageDocument,
    ) -> Poll<Result<bool, InferenceError>> {
        let Some(tokens) = &mut self.tokens else { return Poll::Ready(Ok(false)) };
        let more = match ready!(tokens.poll_progress(context))? {
            Some(progress) => {
                self.read(progress, usage)?;
                true
            }
            None => {
                self.tokens = None;
                false
            }
        };
        Poll::Ready(Ok(more))
    }

    /// Waits for all tokens and returns the complete choices.
    ///
    /// # Errors
    /// Fails like [`TokenStream::poll_progress`].
    pub(super) async fn collect(
        mut self,
        usage: &mut UsageDocument,
        return_token_ids: bool,
    ) -> Result<Vec<ChoicePiece>, InferenceError> {
        while std::future::poll_fn(|context| self.poll_read(context, usage)).await? {}
        let mut choices: Vec<ChoicePiece> =
            self.choices.into_iter().map(ChoiceWriter::into_piece).collect();
        if return_token_ids {
            for choice in &mut choices {
                choice.prompt_token_ids = Some(self.prompt.clone());
            }
        }
        Ok(choices)
    }

    /// Calls `send` with the new part of every choice, and removes the part from the choice.
    pub(super) fn send_pieces(&mut self, mut send: impl FnMut(&ChoicePiece)) {
        self.choices.iter_mut().for_each(|choice| choice.send_piece(&mut send));
    }

    fn read(
        &mut self,
        progress: GenerationProgress,
        usage: &mut UsageDocument,
    ) -> Result<(), InferenceError> {
        if let Some(report) = progress.prompt {
            usage.prompt_tokens_details.cached_tokens += report.cached_tokens;
            if let Some(text) = &self.echo {
                for choice in &mut self.choices {
                    choice.echo(text, &self.prompt, &report)?;
                }
            }
        }
        for token in &progress.tokens {
            let index = usize::try_from(token.completion).unwrap_or(usize::MAX);
            let Some(choice) = self.choices.get_mut(index) else { continue };
            choice.push(token)?;
            usage.completion_tokens += usize::from(choice.counts_tokens());
        }
        Ok(())
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_choices_of_a_long_prompt_do_not_repeat_it() {
        assert!(check_repetition(1 << 11, 1 << 10).is_ok());
        let error = check_repetition(100_000, 1_000).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("n"));
        assert!(error.to_string().starts_with("n: 1000 choices would each repeat"));
    }
}
