//! The tokenizer compared with recorded output of the `tokenizers` library.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::Value;
use tinkex_engine::tokenizer::{Tokenizer, Vocabulary};
use tinkex_engine::{Error, builtin};

use crate::golden::folder;

fn recorded() -> &'static Tokenizer {
    static TOKENIZER: LazyLock<Tokenizer> =
        LazyLock::new(|| Tokenizer::read(folder("tokenizer.json")).unwrap());
    &TOKENIZER
}

#[test]
fn the_recorded_tokenizer_is_the_built_in_one() {
    assert_eq!(std::fs::read(folder("tokenizer.json")).unwrap(), builtin::TOKENIZER);
}

#[test]
fn encodings_match_the_tokenizers_library() {
    let tokenizer = recorded();
    let cases: Value =
        serde_json::from_slice(&std::fs::read(folder("encodings.json")).unwrap()).unwrap();
    let cases = cases.as_array().unwrap();
    assert!(cases.len() > 30);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text), ids, "{text:?}");
        assert_eq!(tokenizer.vocabulary().decode(&ids), text);
        assert_eq!(case["decoded"], text);
    }
}

#[test]
fn the_vocabulary_is_read_from_the_same_file() {
    let vocabulary = Vocabulary::read(folder("tokenizer.json")).unwrap();
    assert_eq!(&vocabulary, recorded().vocabulary());
}

#[test]
fn other_tokenizers_are_refused() {
    let good = std::fs::read_to_string(folder("tokenizer.json")).unwrap();
    let mut other: Value = serde_json::from_str(&good).unwrap();
    other["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+".into();
    let mut swapped: Value = serde_json::from_str(&good).unwrap();
    let merges = swapped["model"]["merges"].as_array_mut().unwrap();
    merges.swap(0, 9);
    let mut fewer: Value = serde_json::from_str(&good).unwrap();
    fewer["model"]["merges"].as_array_mut().unwrap().pop();
    for (json, want) in [
        (other, "pre-tokenizer"),
        (swapped, "is not token 256"),
        (fewer, "the merges"),
        (serde_json::json!({"model": {}}), "not a tokenizer"),
    ] {
        let error = Tokenizer::parse(json.to_string().as_bytes(), "x").unwrap_err();
        assert!(matches!(error, Error::File(tinkex_weights::Error::BadFile { .. })), "{error}");
        assert!(error.to_string().contains(want), "{error}");
    }
}

#[test]
fn a_word_of_200_000_bytes_is_encoded() {
    let text = "la".repeat(100_000);
    let tokenizer = recorded();
    assert_eq!(tokenizer.vocabulary().decode(&tokenizer.encode(&text)), text);
}

proptest! {
    #[test]
    fn decoding_restores_the_encoded_text(text in ".*") {
        let tokenizer = recorded();
        prop_assert_eq!(tokenizer.vocabulary().decode(&tokenizer.encode(&text)), text);
    }
}
