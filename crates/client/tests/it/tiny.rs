//! A tokenizer whose results can be checked by hand: one token per byte, whose id is the byte,
//! three merges, and special tokens from [`FIRST_SPECIAL`] on.

use serde_json::{Value, json};
use tempfile::TempDir;
use tinkex::Tokenizer;

pub(crate) const HE: u32 = 256;
pub(crate) const LL: u32 = 257;
pub(crate) const HELL: u32 = 258;
pub(crate) const FIRST_SPECIAL: u32 = 259;

/// Returns the text of a `tokenizer.json`.
pub(crate) fn json(special: &[&str]) -> String {
    let mut other = 256_u32;
    let mut vocab = serde_json::Map::new();
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let c = if printable {
            char::from(byte)
        } else {
            other += 1;
            char::from_u32(other - 1).unwrap()
        };
        vocab.insert(c.to_string(), json!(byte));
    }
    for (token, id) in [("he", HE), ("ll", LL), ("hell", HELL)] {
        vocab.insert(token.to_owned(), json!(id));
    }
    let added: Vec<Value> = (FIRST_SPECIAL..)
        .zip(special)
        .map(|(id, content)| {
            // Real models mark thinking with added tokens that are not special.
            let special = !matches!(*content, "<think>" | "</think>");
            json!({"id": id, "content": content, "special": special, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false,
        "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": ["h e", "l l", "he ll"]},
    })
    .to_string()
}

/// Creates a folder with a tokenizer and its settings.
pub(crate) fn folder(special: &[&str], config: Value) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), json(special)).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

pub(crate) fn tokenizer(special: &[&str], config: Value) -> Tokenizer {
    Tokenizer::from_folder(folder(special, config).path()).unwrap()
}
