//! The bytes of tokens.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::{Error, Result};

/// The bytes of every token of a model, whoever made its tokenizer.
///
/// ```
/// use tinkex_engine::tokenizer::Vocabulary;
///
/// let json = br#"{"model": {"vocab": {"\u0120a": 0, "\u010a": 1}},
///     "decoder": {"type": "ByteLevel"}, "added_tokens": [{"id": 2, "content": "<end>"}]}"#;
/// let vocabulary = Vocabulary::parse(json, "tokenizer.json")?;
/// assert_eq!(vocabulary.decode(&[0, 1, 2]), " a\n<end>");
/// assert_eq!(vocabulary.bytes(9), b"");
/// # Ok::<_, tinkex_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    /// All bytes in a row, and where each token ends.
    text: Vec<u8>,
    ends: Vec<usize>,
}

impl Vocabulary {
    pub(crate) fn new(tokens: Vec<Vec<u8>>) -> Self {
        let mut ends = Vec::with_capacity(tokens.len());
        let mut text = Vec::new();
        for token in tokens {
            text.extend_from_slice(&token);
            ends.push(text.len());
        }
        Self { text, ends }
    }

    /// Reads the bytes of tokens from a `tokenizer.json` of the `tokenizers` library: byte-level
    /// ones (GPT-2, Llama 3, Qwen) and those with `▁` for a space (Llama 2).
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadFile`] if it is something else.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::parse(&std::fs::read(path).map_err(Error::io("read", path))?, path)
    }

    /// Reads the text of a `tokenizer.json`; `path` is what errors call it.
    ///
    /// # Errors
    /// [`Error::BadFile`].
    pub fn parse(text: &[u8], path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let raw: RawVocabulary = serde_json::from_slice(text)
            .map_err(|e| Error::bad_file(path, format!("is not a tokenizer: {e}")))?;
        let byte_level = mentions(&raw.decoder, "ByteLevel");
        let count = raw.model.vocab.values().chain(raw.added_tokens.iter().map(|added| &added.id));
        let count = count.max().map_or(0, |&last| last as usize + 1);
        let given = raw.model.vocab.len() + raw.added_tokens.len();
        // A lone token with a huge number must not make us allocate for all below it.
        if count > given.saturating_mul(4).saturating_add(1024) {
            let reason = format!("has {given} tokens, but the last has number {}", count - 1);
            return Err(Error::bad_file(path, reason));
        }
        let mut tokens = vec![Vec::new(); count];
        for (token, id) in &raw.model.vocab {
            tokens[*id as usize] = match byte_level {
                true => from_letters(token).unwrap_or_else(|| token.clone().into_bytes()),
                false => from_piece(token),
            };
        }
        for added in &raw.added_tokens {
            tokens[added.id as usize] = added.content.clone().into_bytes();
        }
        Ok(Self::new(tokens))
    }

    /// How many tokens there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of a token; none if it does not exist. They need not be whole characters.
    #[must_use]
    pub fn bytes(&self, token: u32) -> &[u8] {
        let token = token as usize;
        let Some(&end) = self.ends.get(token) else { return &[] };
        let start = token.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.text[start..end]
    }

    /// The text of tokens; bytes that are no characters become `�`.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|&token| self.bytes(token)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

#[derive(Deserialize)]
struct RawVocabulary {
    model: RawVocabularyModel,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Vec<AddedTokenText>,
}

#[derive(Deserialize)]
struct RawVocabularyModel {
    vocab: BTreeMap<String, u32>,
}

#[derive(Deserialize)]
struct AddedTokenText {
    id: u32,
    content: String,
}

/// Whether a decoder, or one of several in a row, is of this type.
fn mentions(decoder: &Value, kind: &str) -> bool {
    decoder["type"] == kind
        || decoder["decoders"].as_array().is_some_and(|all| all.iter().any(|d| d["type"] == kind))
}

/// The bytes behind a piece of the other kind: `▁` is a space, `<0x0A>` a byte.
fn from_piece(token: &str) -> Vec<u8> {
    let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('▁', " ").into_bytes(),
    }
}

/// The letter that stands for a byte in a byte-level vocabulary: itself where it can be seen, else
/// one beyond Latin-1, in order.
pub(super) fn letter(byte: u8) -> char {
    let seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if seen(byte) {
        return char::from(byte);
    }
    let hidden = (0..byte).filter(|&other| !seen(other)).count();
    u32::try_from(hidden).ok().and_then(|hidden| char::from_u32(256 + hidden)).unwrap_or('\0')
}

/// The bytes that letters stand for; `None` if one stands for none.
fn from_letters(token: &str) -> Option<Vec<u8>> {
    token
        .chars()
        .map(|c| match u32::from(c) {
            latin @ 0..=255 => {
                let byte = u8::try_from(latin).ok()?;
                (letter(byte) == c).then_some(byte)
            }
            // 0 to 32, then 127 to 160, then 173.
            hidden @ 256..=288 => u8::try_from(hidden - 256).ok(),
            hidden @ 289..=322 => u8::try_from(hidden - 289 + 127).ok(),
            323 => Some(173),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_letter_of_its_own() {
        let mut seen = std::collections::BTreeSet::new();
        for byte in 0..=255 {
            let letter = letter(byte);
            assert!(seen.insert(letter));
            assert_eq!(from_letters(&letter.to_string()), Some(vec![byte]), "{byte}");
        }
        assert_eq!((letter(b' '), letter(b'\n'), letter(173)), ('Ġ', 'Ċ', 'Ń'));
        assert_eq!(from_letters("☃"), None);
    }

    #[test]
    fn pieces_with_low_lines_are_read() {
        let json = r#"{"model": {"vocab": {"▁the": 0, "<0x0A>": 1, "<s>": 2}},
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}}"#;
        let vocabulary = Vocabulary::parse(json.as_bytes(), "x").unwrap();
        assert_eq!(vocabulary.decode(&[0, 1, 0]), " the\n the");
    }

    #[test]
    fn a_huge_number_allocates_nothing() {
        let json = br#"{"model": {"vocab": {"a": 4294967295}}}"#;
        assert!(matches!(Vocabulary::parse(json, "x"), Err(Error::BadFile { .. })));
    }
}
