//! A small byte-level BPE tokenizer, for the built-in model.
//!
//! It learns from text, and writes a `tokenizer.json` that the `tokenizers` library loads and
//! agrees with. It reads back what it wrote, not the tokenizers of others: for those,
//! [`Vocabulary`] knows the bytes of every token, which is what decoding and stop texts need.

mod json;
mod merge;
mod split;
mod train;
mod vocabulary;

pub use vocabulary::Vocabulary;

use std::collections::HashMap;

use self::merge::merge;
use self::split::pieces;

/// Turns text into tokens and back.
///
/// Any text can be written: what no longer token covers is written in bytes.
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
    /// The token of each byte.
    bytes: [u32; 256],
    /// What two neighbours become; lower tokens were learnt earlier and go first.
    merges: HashMap<(u32, u32), u32>,
    specials: Vec<(String, u32)>,
}

impl Tokenizer {
    /// The tokens of `text`. Special tokens are recognised where they are written out.
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

    /// The token of a special text such as `<|endoftext|>`.
    #[must_use]
    pub fn special(&self, text: &str) -> Option<u32> {
        self.specials.iter().find(|(name, _)| name == text).map(|(_, token)| *token)
    }

    /// The bytes of its tokens.
    #[must_use]
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    fn encode_plain(&self, text: &str, out: &mut Vec<u32>) {
        for piece in pieces(text) {
            let start = out.len();
            out.extend(piece.bytes().map(|byte| self.bytes[usize::from(byte)]));
            merge(out, start, &self.merges);
        }
    }

    /// The first special token in `text`, the longest of several at one place.
    fn next_special<'a>(&self, text: &'a str) -> Option<(&'a str, u32, &'a str)> {
        let found = self.specials.iter().filter_map(|(name, token)| {
            let at = text.find(name.as_str())?;
            Some((at, std::cmp::Reverse(name.len()), *token))
        });
        let (at, length, token) = found.min()?;
        Some((&text[..at], token, &text[at + length.0..]))
    }
}
