//! [`UsageDocument`]: the number of tokens of a request.

use serde::Serialize;

use crate::chat::AnswerUsage;

/// Number of tokens of a request.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct UsageDocument {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    total_tokens: usize,
    pub(super) prompt_tokens_details: PromptTokenDetails,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct PromptTokenDetails {
    /// Number of prompt tokens that were found in the KV cache.
    pub(super) cached_tokens: usize,
}

impl UsageDocument {
    /// Returns the usage with the sum of all tokens.
    pub(super) fn total(self) -> Self {
        Self { total_tokens: self.prompt_tokens + self.completion_tokens, ..self }
    }
}

impl From<AnswerUsage> for UsageDocument {
    fn from(usage: AnswerUsage) -> Self {
        let AnswerUsage { prompt_tokens, cached_tokens, completion_tokens } = usage;
        let prompt_tokens_details = PromptTokenDetails { cached_tokens };
        Self { prompt_tokens, completion_tokens, prompt_tokens_details, ..Self::default() }.total()
    }
}
