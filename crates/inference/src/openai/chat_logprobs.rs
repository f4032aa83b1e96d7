//! Log-probabilities of `chat/completions`.

use serde::Serialize;
use tinkex_text::Tokenizer;

use crate::GeneratedToken;

/// Smallest log-probability in a response, as in vLLM: JSON cannot represent negative infinity.
const MIN_LOGPROB: f32 = -9999.0;

/// Log-probabilities of the tokens of an answer.
#[derive(Debug, Serialize)]
pub(super) struct ChatLogprobs {
    content: Vec<TokenLogprob>,
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct TokenLogprob {
    #[serde(flatten)]
    token: TokenWithLogprob,
    top_logprobs: Vec<TokenWithLogprob>,
}

#[derive(Debug, Serialize)]
struct TokenWithLogprob {
    /// Text of the token; bytes that are not UTF-8 are U+FFFD.
    token: String,
    logprob: f32,
    bytes: Option<Vec<u8>>,
}

impl ChatLogprobs {
    pub(super) fn new(tokenizer: &Tokenizer, tokens: &[GeneratedToken]) -> Self {
        let describe = |token: u32, logprob: f32| {
            let bytes = tokenizer.token_bytes(token);
            let text = match &bytes {
                Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                None => tokenizer.token(token).unwrap_or_default(),
            };
            TokenWithLogprob { token: text, logprob: logprob.max(MIN_LOGPROB), bytes }
        };
        let content = tokens
            .iter()
            .map(|token| TokenLogprob {
                token: describe(token.token, token.logprob),
                top_logprobs: token
                    .top
                    .iter()
                    .map(|(id, logprob)| describe(*id, *logprob))
                    .collect(),
            })
            .collect();
        Self { content, refusal: None }
    }
}
