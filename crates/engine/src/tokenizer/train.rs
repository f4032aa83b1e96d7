//! Trains a vocabulary on text.

use std::collections::{BTreeMap, HashMap};

use super::split::pieces;
use super::{Tokenizer, Vocabulary};
use crate::{Error, Result};

impl Tokenizer {
    /// Trains a vocabulary of at most `size` tokens: all bytes, the most frequent merges, and
    /// `specials`, which are never merged.
    ///
    /// The result is deterministic. It has fewer tokens if no remaining pair occurs twice.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `size` is smaller than 256 plus the number of special tokens, or a
    /// special token is empty or a duplicate.
    pub fn train<'a>(
        texts: impl IntoIterator<Item = &'a str>,
        size: usize,
        specials: &[&str],
    ) -> Result<Self> {
        let Some(max_merges) = size.checked_sub(256 + specials.len()) else {
            let least = 256 + specials.len();
            let reason = format!("{size} tokens, expected at least {least} for bytes and specials");
            return Err(Error::invalid("vocabulary size", reason));
        };
        let mut words = words(texts);
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        let mut merges = HashMap::new();
        while merges.len() < max_merges {
            let Some(pair) = most_frequent(&words, &tokens) else { break };
            let merged = u32::try_from(tokens.len()).map_err(|_| {
                Error::invalid("vocabulary size", "the number of tokens exceeds 32 bits")
            })?;
            let text = [&tokens[pair.0 as usize][..], &tokens[pair.1 as usize]].concat();
            tokens.push(text);
            merges.insert(pair, merged);
            words.iter_mut().for_each(|word| replace(&mut word.tokens, pair, merged));
        }
        Self::new(tokens, merges, specials)
    }

    /// Creates a tokenizer from the bytes 0 to 255 followed by the merged tokens; special tokens
    /// are appended.
    pub(super) fn new(
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
}

/// A piece of text with its number of occurrences.
struct Word {
    tokens: Vec<u32>,
    count: u64,
}

/// Returns the distinct pieces of the texts, as byte tokens, with their counts.
fn words<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<Word> {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for text in texts {
        for piece in pieces(text) {
            *counts.entry(piece).or_default() += 1;
        }
    }
    let word = |(piece, count): (&str, u64)| Word {
        tokens: piece.bytes().map(u32::from).collect(),
        count,
    };
    counts.into_iter().map(word).collect()
}

/// Returns the most frequent pair that occurs at least twice; of equally frequent ones the first by
/// its bytes.
fn most_frequent(words: &[Word], tokens: &[Vec<u8>]) -> Option<(u32, u32)> {
    let mut counts: HashMap<(u32, u32), u64> = HashMap::new();
    for word in words {
        for pair in word.tokens.windows(2) {
            *counts.entry((pair[0], pair[1])).or_default() += word.count;
        }
    }
    let text = |pair: (u32, u32)| (&tokens[pair.0 as usize], &tokens[pair.1 as usize]);
    let best = counts.into_iter().max_by(|(a, a_count), (b, b_count)| {
        a_count.cmp(b_count).then_with(|| text(*b).cmp(&text(*a)))
    });
    best.filter(|(_, count)| *count > 1).map(|(pair, _)| pair)
}

/// Replaces every occurrence of `pair` in a word by the token `merged`.
fn replace(word: &mut Vec<u32>, pair: (u32, u32), merged: u32) {
    let (mut from, mut to) = (0, 0);
    while from < word.len() {
        if word[from] == pair.0 && word.get(from + 1) == Some(&pair.1) {
            word[to] = merged;
            from += 2;
        } else {
            word[to] = word[from];
            from += 1;
        }
        to += 1;
    }
    word.truncate(to);
}
