//! Trains the tokenizer of the built-in model and writes it as `tokenizer.json`.
//!
//! The file has the format of the `tokenizers` library, which produces the same tokens with it as
//! the tokenizer of the engine.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde_json::{Map, Value, json};
use tinkex_engine::builtin_model_tools::{SPLIT_PATTERN, byte_char, pieces};

use crate::Result;
use crate::corpus::SPECIALS;

/// Number of documents on which the tokenizer of the built-in model is trained.
pub(crate) const DOCUMENTS: u64 = 4_000;
/// Maximum number of tokens of the built-in model.
const MAX_TOKENS: usize = 1024;
/// Number of tokens that are single bytes.
const BYTES: usize = 256;

/// Trains the tokenizer of the built-in model on the first [`DOCUMENTS`] of `documents`.
pub(crate) fn builtin(documents: &[String]) -> Result<TrainedTokenizer> {
    let count = usize::try_from(DOCUMENTS)?;
    let texts = documents.iter().take(count).map(String::as_str);
    TrainedTokenizer::train(texts, MAX_TOKENS, &SPECIALS)
}

/// A byte-level BPE tokenizer: the 256 bytes, the merged tokens, and the special tokens.
#[derive(Debug)]
pub(crate) struct TrainedTokenizer {
    /// Bytes of every token without the special tokens, in the order of token ids.
    tokens: Vec<Vec<u8>>,
    /// The two tokens that each merged token consists of, in the order of token ids.
    merges: Vec<(u32, u32)>,
    specials: Vec<String>,
}

impl TrainedTokenizer {
    /// Trains a vocabulary of at most `size` tokens: all bytes, the most frequent merges, and
    /// `specials`, which are never merged.
    ///
    /// The result is deterministic. It has fewer tokens if no remaining pair occurs twice.
    ///
    /// # Errors
    /// If `size` is smaller than 256 plus the number of special tokens, or a special token is empty
    /// or a duplicate.
    fn train<'a>(
        texts: impl IntoIterator<Item = &'a str>,
        size: usize,
        specials: &[&str],
    ) -> Result<Self> {
        let min_size = BYTES + specials.len();
        let Some(max_merges) = size.checked_sub(min_size) else {
            let reason = format!("a vocabulary of {size} tokens is smaller than {min_size}");
            return Err(reason.into());
        };
        for (index, special) in specials.iter().enumerate() {
            if special.is_empty() || specials[..index].contains(special) {
                return Err(format!("the special token {special:?} is empty or a duplicate").into());
            }
        }
        let mut words = words(texts);
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        let mut merges = Vec::new();
        while merges.len() < max_merges {
            let Some(pair) = most_frequent(&words, &tokens) else { break };
            let merged = u32::try_from(tokens.len())?;
            tokens.push([&tokens[pair.0 as usize][..], &tokens[pair.1 as usize]].concat());
            merges.push(pair);
            words.iter_mut().for_each(|word| replace(&mut word.tokens, pair, merged));
        }
        let specials = specials.iter().map(|&special| special.to_owned()).collect();
        Ok(Self { tokens, merges, specials })
    }

    /// Returns the contents of a `tokenizer.json`.
    pub(crate) fn to_json(&self) -> String {
        let encoded = |token: usize| -> String {
            self.tokens[token].iter().map(|&byte| byte_char(byte)).collect()
        };
        let vocab: Map<String, Value> =
            (0..self.tokens.len()).map(|token| (encoded(token), json!(token))).collect();
        let added: Vec<Value> = (self.tokens.len()..)
            .zip(&self.specials)
            .map(|(id, content)| {
                json!({
                    "id": id, "content": content, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": true,
                })
            })
            .collect();
        let merges: Vec<Value> = self
            .merges
            .iter()
            .map(|(left, right)| json!([encoded(*left as usize), encoded(*right as usize)]))
            .collect();
        let split = json!({
            "type": "Split", "pattern": { "Regex": SPLIT_PATTERN }, "behavior": "Isolated",
            "invert": false,
        });
        let bytes = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
        });
        let all = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": null,
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": [split, bytes] },
            "post_processor": null,
            "decoder": bytes,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": false,
                "vocab": vocab,
                "merges": merges,
            },
        });
        all.to_string()
    }

    /// Writes a `tokenizer.json`, atomically replacing the file.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let text = self.to_json();
        Ok(tinkex_weights::write_file(path, |out| out.write_all(text.as_bytes()))?)
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

/// Returns the most frequent pair of tokens that occurs at least twice; of equally frequent pairs
/// the first one by its bytes.
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
    let mut from = 0;
    let mut to = 0;
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

#[cfg(test)]
mod tests {
    use tinkex_engine::builtin;
    use tinkex_engine::tokenizer::Tokenizer;

    use super::*;
    use crate::corpus::{document, documents};

    /// If this test fails because the corpus was changed on purpose, train the model again, copy its
    /// `tokenizer.json` to the recordings of the engine, and record the encodings with `record.py`.
    #[test]
    fn training_gives_the_tokenizer_of_the_built_in_model() {
        let documents: Vec<String> = documents(DOCUMENTS).collect();
        let json = super::builtin(&documents).unwrap().to_json();
        assert_eq!(json, std::str::from_utf8(builtin::TOKENIZER).unwrap());
    }

    #[test]
    fn the_engine_encodes_with_a_trained_tokenizer() {
        let text = "low lower lowest, slow slower slowest. ".repeat(9);
        let trained = TrainedTokenizer::train([text.as_str()], 280, &["<|end|>"]).unwrap();
        let tokenizer = Tokenizer::parse(trained.to_json().as_bytes(), "tokenizer.json").unwrap();
        let tokens = tokenizer.encode("slower ☃<|end|>");
        assert!(tokens.len() < "slower ☃".len());
        assert_eq!(tokens.last(), tokenizer.special("<|end|>").as_ref());
        assert_eq!(tokenizer.vocabulary().decode(&tokens), "slower ☃<|end|>");
    }

    #[test]
    fn a_token_has_more_than_three_bytes_on_average() {
        let tokenizer = builtin::tokenizer().unwrap();
        let text: String = (0..200).map(|index| document(2, index)).collect();
        let count = tokenizer.encode(&text).len();
        assert!(text.len() as f64 / count as f64 > 3.0, "{} bytes in {count} tokens", text.len());
    }

    #[test]
    fn a_too_small_vocabulary_and_invalid_special_tokens_are_refused() {
        for (size, specials, want) in [
            (257, &["a", "b"][..], "257 tokens is smaller than 258"),
            (300, &[""], "\"\" is empty or a duplicate"),
            (300, &["x", "x"], "\"x\" is empty or a duplicate"),
        ] {
            let error = TrainedTokenizer::train(["some text"], size, specials).unwrap_err();
            assert!(error.to_string().contains(want), "{error}");
        }
    }
}
