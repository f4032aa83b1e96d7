//! [`ChatModel`]: the chat template of a base model, read once.

use std::sync::Arc;

use tinkex_text::{ChatFormat, Tokenizer};

use crate::inference::{InferenceError, NamedModel};
use crate::models::BaseModel;
use crate::task::job_error;

/// Chat template and tokenizer of a base model. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct ChatModel {
    pub(super) tokenizer: Tokenizer,
    pub(super) format: ChatFormat,
    /// Tokens that end an answer: those of the template and of the model.
    pub(super) end_tokens: Arc<[u32]>,
}

impl ChatModel {
    /// Returns the chat template of a model, reading it on the blocking pool on first use.
    ///
    /// # Errors
    /// Names the parameter `model` if the model has no chat template, or if it is malformed.
    pub(crate) async fn of(model: &NamedModel) -> Result<Self, InferenceError> {
        let base = Arc::clone(&model.base);
        let read = match base.loaded_chat() {
            Some(read) => read,
            None => tokio::task::spawn_blocking(move || base.chat())
                .await
                .map_err(|error| job_error(&error))?,
        };
        read.map_err(|reason| InferenceError::invalid("model", reason))
    }

    /// Reads the chat template of a base model.
    ///
    /// # Errors
    /// Returns the reason why the model has none that can be used.
    pub(crate) fn read(base: &BaseModel) -> Result<Self, String> {
        let name = &base.name;
        let Some(tokenizer) = base.tokenizer() else {
            return Err(format!("{name} has no tokenizer; use completions with token ids"));
        };
        if !tokenizer.has_chat_template() {
            return Err(format!("{name} has no chat template; use completions with a prompt"));
        }
        let format = tokenizer.chat().map_err(|error| format!("{name}: {error}"))?;
        let mut end_tokens = base.eos().to_vec();
        // The tokenizer may have no end token if the configuration of the model has one.
        end_tokens.extend(format.stop_tokens().unwrap_or_default());
        end_tokens.retain(|id| (*id as usize) < base.vocab_size());
        Ok(Self { tokenizer, format, end_tokens: end_tokens.into() })
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns whether the template reads a variable.
    pub(crate) fn reads_variable(&self, name: &str) -> bool {
        self.format.template_contains(name)
    }
}
