//! [`ChatModel`]: the chat template of a base model.

use std::sync::Arc;

use tinkex_text::{ChatFormat, Tokenizer};

use crate::{InferenceError, ServedModel};

/// Chat template and tokenizer of a base model. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ChatModel {
    pub(super) tokenizer: Tokenizer,
    pub(super) format: ChatFormat,
    /// Tokens that end an answer: the end tokens of the template and of the model.
    pub(super) end_tokens: Arc<[u32]>,
}

impl ChatModel {
    /// Reads the chat template of the base model `name` from its tokenizer. `eos` are the
    /// end-of-sequence tokens of the model, and `vocab_size` is the number of its tokens.
    ///
    /// # Errors
    /// Returns the reason why the model has no chat template that can be used.
    pub fn new(
        name: &str,
        tokenizer: Option<Tokenizer>,
        eos: &[u32],
        vocab_size: usize,
    ) -> Result<Self, String> {
        let Some(tokenizer) = tokenizer else {
            return Err(format!("{name} has no tokenizer; use completions with token ids"));
        };
        if !tokenizer.has_chat_template() {
            return Err(format!("{name} has no chat template; use completions with a prompt"));
        }
        let format = tokenizer.chat().map_err(|error| format!("{name}: {error}"))?;
        let mut end_tokens = eos.to_vec();
        // Not an error: the configuration of the model may have an end token instead.
        end_tokens.extend(format.stop_tokens().unwrap_or_default());
        end_tokens.retain(|id| (*id as usize) < vocab_size);
        Ok(Self { tokenizer, format, end_tokens: end_tokens.into() })
    }

    /// Returns the chat template of a model.
    ///
    /// # Errors
    /// Names the parameter `model` if the model has no chat template that can be used.
    pub(crate) fn of(model: &dyn ServedModel) -> Result<Self, InferenceError> {
        model.chat().map_err(|reason| InferenceError::invalid("model", reason))
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns whether the template reads the variable `name`.
    pub(crate) fn reads_variable(&self, name: &str) -> bool {
        self.format.template_contains(name)
    }
}
