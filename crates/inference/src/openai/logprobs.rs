//! [`LogprobColumns`]: log-probabilities in the format of the `completions` endpoint, which has one
//! list per column.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use tinkex_text::Tokenizer;

/// Log-probabilities of consecutive tokens. All columns have one entry per token.
#[derive(Clone, Default, Serialize)]
pub(super) struct LogprobColumns {
    /// Names of the tokens; see [`token_name`].
    tokens: Vec<String>,
    /// `None` for the first token of a prompt, which no token precedes.
    token_logprobs: Vec<Option<f32>>,
    /// Log-probabilities of the most probable tokens and of the token itself, by name; `None` if
    /// the request has `logprobs: 0`.
    top_logprobs: Option<Vec<Option<BTreeMap<String, f32>>>>,
    /// Position of the token in the text of the choice, in characters.
    text_offset: Vec<usize>,
}

/// A row of [`LogprobColumns`].
pub(super) struct LogprobRow<'a> {
    pub(super) token: u32,
    /// `None` or NaN if the log-probability is not known.
    pub(super) logprob: Option<f32>,
    /// Most probable tokens.
    pub(super) top: &'a [(u32, f32)],
    pub(super) text_offset: usize,
}

impl LogprobColumns {
    /// Creates empty columns, with a column of most probable tokens if `top` is true.
    pub(super) fn new(top: bool) -> Self {
        Self { top_logprobs: top.then(Vec::new), ..Self::default() }
    }

    pub(super) fn push(&mut self, tokenizer: Option<&Tokenizer>, row: &LogprobRow<'_>) {
        let name = token_name(tokenizer, row.token);
        let logprob = row.logprob.filter(|logprob| logprob.is_finite());
        if let Some(column) = &mut self.top_logprobs {
            column.push(logprob.map(|logprob| {
                let mut top = BTreeMap::from([(name.clone(), logprob)]);
                for (token, logprob) in row.top {
                    let entry = top.entry(token_name(tokenizer, *token)).or_insert(*logprob);
                    // Two tokens may have one name.
                    *entry = entry.max(*logprob);
                }
                top
            }));
        }
        self.tokens.push(name);
        self.token_logprobs.push(logprob);
        self.text_offset.push(row.text_offset);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Removes all rows.
    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.token_logprobs.clear();
        self.top_logprobs.as_mut().map(Vec::clear);
        self.text_offset.clear();
    }

    /// Serializes columns without rows as `null`.
    pub(super) fn serialize_or_null<S: Serializer>(
        &self,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        if self.is_empty() {
            return serializer.serialize_none();
        }
        self.serialize(serializer)
    }
}

/// Returns the text of a token. A part of a character is written as `bytes:\xe2\x82`, as in the
/// OpenAI API; a token without a text as `token_id:5`, as in vLLM.
pub(super) fn token_name(tokenizer: Option<&Tokenizer>, token: u32) -> String {
    let bytes = tokenizer.and_then(|tokenizer| {
        let bytes = tokenizer.token_bytes(token);
        bytes.or_else(|| tokenizer.token(token).map(String::into_bytes))
    });
    match bytes.map(String::from_utf8) {
        Some(Ok(text)) => text,
        Some(Err(error)) => {
            let escaped = error.as_bytes().iter().map(|byte| format!("\\x{byte:02x}"));
            format!("bytes:{}", escaped.collect::<String>())
        }
        None => format!("token_id:{token}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sampled_token_is_among_the_top_tokens() {
        let mut columns = LogprobColumns::new(true);
        let row = |logprob, top| LogprobRow { token: 7, logprob, top, text_offset: 3 };
        columns.push(None, &row(None, &[]));
        columns.push(None, &row(Some(-2.0), &[(1, -0.5), (2, -1.0)]));
        columns.push(None, &row(Some(-0.5), &[(7, -0.5)]));
        let json = serde_json::to_value(&columns).unwrap();
        let expected = serde_json::json!({
            "tokens": ["token_id:7", "token_id:7", "token_id:7"],
            "token_logprobs": [null, -2.0, -0.5],
            "top_logprobs": [
                null,
                {"token_id:1": -0.5, "token_id:2": -1.0, "token_id:7": -2.0},
                {"token_id:7": -0.5},
            ],
            "text_offset": [3, 3, 3],
        });
        assert_eq!(json, expected);
    }
}
