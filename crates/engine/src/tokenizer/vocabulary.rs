//! [`Vocabulary`]: the bytes of every token.

use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::{Error, Result};

/// The bytes of every token of a tokenizer.
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
    /// Bytes of all tokens, concatenated.
    text: Vec<u8>,
    /// End offset of each token in `text`.
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

    /// Reads the tokens of a `tokenizer.json` of the `tokenizers` library: byte-level tokenizers
    /// (GPT-2, Llama 3, Qwen) and tokenizers that write a space as `▁` (Llama 2), with a BPE,
    /// Unigram or WordLevel model.
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
    /// [`Error::File`] if it is not a tokenizer, its model has another type, or its highest token id
    /// exceeds four times the number of tokens plus 1,023.
    pub fn parse(text: &[u8], path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let raw: RawVocabulary = serde_json::from_slice(text)
            .map_err(|e| Error::bad_file(path, format!("not a tokenizer: {e}")))?;
        if let Some(kind) = raw.model.kind.filter(|kind| !KINDS.contains(&kind.as_str())) {
            let reason = format!(
                "the tokenizer model {kind:?} is not supported; supported: {}",
                KINDS.join(", ")
            );
            return Err(Error::bad_file(path, reason));
        }
        let vocab = raw.model.vocab.0;
        let byte_level = has_decoder(&raw.decoder, "ByteLevel");
        let ids = vocab.iter().map(|(_, id)| *id);
        let count = ids.chain(raw.added_tokens.iter().map(|added| added.id)).max();
        let count = count.map_or(0, |last| last as usize + 1);
        let entries = vocab.len() + raw.added_tokens.len();
        // A single token with a huge id must not cause an allocation for all ids below it.
        if count > entries.saturating_mul(4).saturating_add(1024) {
            let reason =
                format!("it has {entries} tokens, but the highest token id is {}", count - 1);
            return Err(Error::bad_file(path, reason));
        }
        let mut tokens = vec![Vec::new(); count];
        for (token, id) in &vocab {
            tokens[*id as usize] = if byte_level {
                from_byte_chars(token).unwrap_or_else(|| token.clone().into_bytes())
            } else {
                from_piece(token)
            };
        }
        for added in &raw.added_tokens {
            tokens[added.id as usize] = added.content.clone().into_bytes();
        }
        Ok(Self::new(tokens))
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the bytes of a token, which need not be valid UTF-8; empty if the token does not
    /// exist.
    #[must_use]
    pub fn bytes(&self, token: u32) -> &[u8] {
        let token = token as usize;
        let Some(&end) = self.ends.get(token) else { return &[] };
        let start = token.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.text[start..end]
    }

    /// Decodes tokens to text; invalid UTF-8 becomes `�`.
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

/// Types of tokenizer models whose tokens are pieces of text.
const KINDS: [&str; 3] = ["BPE", "Unigram", "WordLevel"];

#[derive(Deserialize)]
struct RawVocabularyModel {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: RawTokens,
}

/// Tokens and their ids: a map, or the list of a Unigram model, which contains the tokens in the
/// order of their ids with their scores.
struct RawTokens(Vec<(String, u32)>);

impl<'de> Deserialize<'de> for RawTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawTokensVisitor)
    }
}

struct RawTokensVisitor;

impl<'de> Visitor<'de> for RawTokensVisitor {
    type Value = RawTokens;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tokens to ids, or a list of tokens with scores")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawTokens, A::Error> {
        let mut tokens = Vec::new();
        while let Some(entry) = map.next_entry()? {
            tokens.push(entry);
        }
        Ok(RawTokens(tokens))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<RawTokens, A::Error> {
        let mut tokens = Vec::new();
        while let Some((token, _score)) = list.next_element::<(String, IgnoredAny)>()? {
            let id = u32::try_from(tokens.len()).map_err(A::Error::custom)?;
            tokens.push((token, id));
        }
        Ok(RawTokens(tokens))
    }
}

#[derive(Deserialize)]
struct AddedTokenText {
    id: u32,
    content: String,
}

/// Returns whether a decoder, or a member of a sequence of decoders, has this type.
fn has_decoder(decoder: &Value, kind: &str) -> bool {
    decoder["type"] == kind
        || decoder["decoders"].as_array().is_some_and(|all| all.iter().any(|d| d["type"] == kind))
}

/// Returns the bytes of a SentencePiece token: `▁` is a space, `<0x0A>` a byte.
fn from_piece(token: &str) -> Vec<u8> {
    let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('▁', " ").into_bytes(),
    }
}

/// Returns the character that represents a byte in a byte-level vocabulary: the byte itself if it
/// is printable, else U+0100 plus the number of lower bytes that are not printable.
pub(crate) fn byte_char(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let index = (0..byte).filter(|&other| !printable(other)).count();
    u32::try_from(index).ok().and_then(|index| char::from_u32(256 + index)).unwrap_or('\0')
}

/// Returns the bytes that a byte-level token represents; `None` if a character represents none.
fn from_byte_chars(token: &str) -> Option<Vec<u8>> {
    token
        .chars()
        .map(|c| match u32::from(c) {
            latin @ 0..=255 => {
                let byte = u8::try_from(latin).ok()?;
                (byte_char(byte) == c).then_some(byte)
            }
            // The bytes 0 to 32, 127 to 160, and 173 are not printable.
            code @ 256..=288 => u8::try_from(code - 256).ok(),
            code @ 289..=322 => u8::try_from(code - 289 + 127).ok(),
            323 => Some(173),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_unique_character() {
        let mut characters = std::collections::BTreeSet::new();
        for byte in 0..=255 {
            let character = byte_char(byte);
            assert!(characters.insert(character));
            assert_eq!(from_byte_chars(&character.to_string()), Some(vec![byte]), "{byte}");
        }
        assert_eq!((byte_char(b' '), byte_char(b'\n'), byte_char(173)), ('Ġ', 'Ċ', 'Ń'));
        assert_eq!(from_byte_chars("☃"), None);
    }

    #[test]
    fn sentencepiece_tokens_are_read() {
        let json = r#"{"model": {"vocab": {"▁the": 0, "<0x0A>": 1, "<s>": 2}},
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}}"#;
        let vocabulary = Vocabulary::parse(json.as_bytes(), "x").unwrap();
        assert_eq!(vocabulary.decode(&[0, 1, 0]), " the\n the");
    }

    #[test]
    fn unigram_tokenizers_are_read_and_other_models_are_named() {
        let json = r#"{"model": {"type": "Unigram", "unk_id": 0, "byte_fallback": true,
            "vocab": [["<unk>", 0.0], ["▁the", -2.5], ["<0x0A>", -3], ["s", -1e1]]},
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"},
                {"type": "Metaspace", "replacement": "▁"}]},
            "added_tokens": [{"id": 4, "content": "</s>"}]}"#;
        let vocabulary = Vocabulary::parse(json.as_bytes(), "x").unwrap();
        assert_eq!(vocabulary.decode(&[1, 3, 2, 1, 4]), " thes\n the</s>");
        let json = br###"{"model": {"type": "WordPiece", "vocab": {"##a": 0}}}"###;
        let error = Vocabulary::parse(json, "tokenizer.json").unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot use tokenizer.json: the tokenizer model \"WordPiece\" is not supported; \
             supported: BPE, Unigram, WordLevel"
        );
    }

    #[test]
    fn a_huge_token_id_is_refused() {
        let json = br#"{"model": {"vocab": {"a": 4294967295}}}"#;
        assert!(matches!(Vocabulary::parse(json, "x"), Err(Error::File(_))));
    }
}
