//! Reads the `tokenizer.json` format of the `tokenizers` library.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::split::PATTERN;
use super::vocabulary::byte_char;
use super::{Tokenizer, Vocabulary};
use crate::{Error, Result};

impl Tokenizer {
    /// Reads a `tokenizer.json` file.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read; otherwise as [`parse`](Self::parse).
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::parse(&std::fs::read(path).map_err(Error::io("read", path))?, path)
    }

    /// Parses the text of a `tokenizer.json`. `path` is used only in errors.
    ///
    /// # Errors
    /// [`Error::File`] if the text is not a tokenizer, or has a pre-tokenizer or an order of
    /// tokens that this type does not support.
    pub fn parse(text: &[u8], path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bad = |reason: String| Error::bad_file(path, reason);
        let vocabulary = Vocabulary::parse(text, path)?;
        let raw: RawTokenizer = serde_json::from_slice(text)
            .map_err(|e| bad(format!("not a supported tokenizer: {e}")))?;
        if raw.pre_tokenizer.to_string().matches("Regex").count() != 1
            || raw.pre_tokenizer["pretokenizers"][0]["pattern"]["Regex"] != PATTERN
        {
            return Err(bad("the pre-tokenizer is not supported".to_owned()));
        }
        let ids: HashMap<&[u8], u32> =
            (0..).take(vocabulary.len()).map(|token| (vocabulary.bytes(token), token)).collect();
        let tokens: Vec<Vec<u8>> = (0..)
            .take(vocabulary.len() - raw.added_tokens.len().min(vocabulary.len()))
            .map(|token| vocabulary.bytes(token).to_vec())
            .collect();
        let in_order = (0..=255_u8).zip(&tokens).all(|(byte, token)| *token == [byte]);
        if tokens.len() != 256 + raw.model.merges.len() || !in_order {
            return Err(bad("the tokens are not the 256 bytes followed by the merges".to_owned()));
        }
        let byte_of: HashMap<char, u8> = (0..=255).map(|byte| (byte_char(byte), byte)).collect();
        let bytes = |text: &str| -> Option<Vec<u8>> {
            text.chars().map(|c| byte_of.get(&c).copied()).collect()
        };
        let mut merges = HashMap::with_capacity(raw.model.merges.len());
        for (merged, (a, b)) in (256..).zip(&raw.model.merges) {
            let pair = bytes(a).zip(bytes(b)).filter(|(a, b)| {
                tokens.get(merged as usize).is_some_and(|token| *token == [&a[..], b].concat())
            });
            let ids = pair.and_then(|(a, b)| Some((*ids.get(&a[..])?, *ids.get(&b[..])?)));
            let earlier = ids.filter(|(a, b)| *a < merged && *b < merged);
            let Some(pair) = earlier else {
                return Err(bad(format!("the merge of {a:?} and {b:?} is not token {merged}")));
            };
            merges.insert(pair, merged);
        }
        let specials: Vec<&str> =
            raw.added_tokens.iter().map(|added| added.content.as_str()).collect();
        let tokenizer = Self::new(tokens, merges, &specials)?;
        if tokenizer.vocabulary != vocabulary {
            return Err(bad("the special tokens do not follow the other tokens".to_owned()));
        }
        Ok(tokenizer)
    }
}

#[derive(Deserialize)]
struct RawTokenizer {
    model: RawTokenizerModel,
    pre_tokenizer: Value,
    #[serde(default)]
    added_tokens: Vec<RawAddedToken>,
}

#[derive(Deserialize)]
struct RawTokenizerModel {
    merges: Vec<(String, String)>,
}

#[derive(Deserialize)]
struct RawAddedToken {
    content: String,
}
