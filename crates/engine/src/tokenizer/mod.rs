//! A byte-level BPE tokenizer for the built-in model, and vocabularies of other tokenizers.
//!
//! [`Tokenizer`] is trained on text and writes a `tokenizer.json` that the `tokenizers` library
//! loads and with which it produces the same tokens. It reads only files that it wrote. For the
//! tokenizers of other models, [`Vocabulary`] provides the bytes of every token, which decoding and
//! stop strings need.

mod json;
mod merge;
mod split;
mod train;
mod vocabulary;

pub use vocabulary::Vocabulary;

use std::collections::HashMap;

use self::merge::merge;
use self::split::pieces;

/// Encodes text as tokens.
///
/// Every text can be encoded: characters that no merged token covers become single bytes.
///
/// ```
/// use tinkex_engine::tokenizer::Tokenizer;
///
/// let text = "low lower lowest, slow slower slowest. ".repeat(9);
/// let tokenizer = Tokenizer::train([text.as_str()], 280, &["<|end|>"])?;
/// let tokens = tokenizer.encode("slower ☃<|end|>");
/// assert!(tokens.len() < "slower ☃".len());
/// assert_eq!(tokens.last(), tokenizer.special("<|end|>").as_ref());
/// assert_eq!(tokenizer.vocabulary().decode(&tokens), "slower ☃<|end|>");
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
