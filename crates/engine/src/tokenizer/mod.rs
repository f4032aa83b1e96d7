//! A byte-level BPE tokenizer for the built-in model, and vocabularies of other tokenizers.
//!
//! [`Tokenizer`] reads the `tokenizer.json` of the built-in model and produces the same tokens as the
//! `tokenizers` library. For the tokenizers of other models, [`Vocabulary`] provides the bytes of
//! every token, which decoding and stop strings need.

mod json;
mod merge;
mod split;
mod vocabulary;

pub use vocabulary::Vocabulary;

use std::collections::HashMap;

use crate::{Error, Result};

use self::merge::merge;
pub(crate) use self::split::pieces;
#[cfg(feature = "builtin-model-tools")]
pub(crate) use self::{split::PATTERN as SPLIT_PATTERN, vocabulary::byte_char};

/// Encodes text as tokens.
///
/// Every text can be encoded: characters that no merged token covers become single bytes.
///
/// ```
/// let tokenizer = tinkex_engine::builtin::tokenizer()?;
/// let tokens = tokenizer.encode("slower ☃<|endoftext|>");
/// assert!(tokens.len() < "slower ☃".len());
/// assert_eq!(tokens.last(), tokenizer.special("<|endoftext|>").as_ref());
/// assert_eq!(tokenizer.vocabulary().decode(&tokens), "slower ☃<|endoftext|>");
/// # Ok::<_, tinkex_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokenizer {
    vocabulary: Vocabulary,
    /// Token of each byte.
    bytes: [u32; 256],
    /// Merged token of two neighbours. Lower tokens were learned earlier and are merged first.
    merges: HashMap<(u32, u32), u32>,
    specials: Vec<(String, u32)>,
}

impl Tokenizer {
    /// Creates a tokenizer from the bytes 0 to 255 followed by the merged tokens; special tokens
    /// are appended.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a special token is empty or a duplicate.
    fn new(
        mut tokens: Vec<Vec<u8>>,
        merges: HashMap<(u32, u32), u32>,
        specials: &[&str],
    ) -> Result<Self> {
        let mut named: Vec<(String, u32)> = Vec::with_capacity(specials.len());
        for &special in specials {
            if special.is_empty() || named.iter().any(|(name, _)| name == special) {
                let reason = format!("{special:?} is empty or a duplicate");
                return Err(Error::invalid("special tokens", reason));
            }
            let token = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            named.push((special.to_owned(), token));
            tokens.push(special.as_bytes().to_vec());
        }
        let mut bytes = [0; 256];
        (0_u32..).zip(&mut bytes).for_each(|(token, byte)| *byte = token);
        let vocabulary = Vocabulary::new(tokens);
        Ok(Self { vocabulary, bytes, merges, specials: named })
    }

    /// Encodes `text`. Special tokens are recognized where the text contains their names.
    #[must_use]
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut out = Vec::with_capacity(text.len() / 3 + 1);
        let mut rest = text;
        while let Some((before, token, after)) = self.next_special(rest) {
            self.encode_plain(before, &mut out);
            out.push(token);
            rest = after;
        }
        self.encode_plain(rest, &mut out);
        out
    }

    /// Returns the token of a special text, for example `<|endoftext|>`.
    #[must_use]
    pub fn special(&self, text: &str) -> Option<u32> {
        self.specials.iter().find(|(name, _)| name == text).map(|(_, token)| *token)
    }

    /// Returns the vocabulary.
    #[must_use]
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Appends the tokens of `text`, which contains no special tokens, to `out`.
    fn encode_plain(&self, text: &str, out: &mut Vec<u32>) {
        for piece in pieces(text) {
            let start = out.len();
            out.extend(piece.bytes().map(|byte| self.bytes[usize::from(byte)]));
            merge(out, start, &self.merges);
        }
    }

    /// Returns the first special token in `text` with the text before and after it; of several at
    /// the same position the longest.
    fn next_special<'a>(&self, text: &'a str) -> Option<(&'a str, u32, &'a str)> {
        let found = self.specials.iter().filter_map(|(name, token)| {
            let at = text.find(name.as_str())?;
            Some((at, std::cmp::Reverse(name.len()), *token))
        });
        let (at, length, token) = found.min()?;
        Some((&text[..at], token, &text[at + length.0..]))
    }
}
