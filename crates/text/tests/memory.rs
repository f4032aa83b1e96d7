//! Memory of encoding, measured with a counting allocator.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

use peak_alloc::PeakAlloc;
use serde_json::{Map, Value, json};
use tinkex_text::Tokenizer;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Returns a byte-level tokenizer without merges: every letter is a token, so that encoding needs as
/// much memory as possible.
fn letters() -> Tokenizer {
    let letters = ('a'..='z').chain(['Ġ']).zip(0..);
    let vocab: Map<String, Value> =
        letters.map(|(letter, id)| (letter.to_string(), json!(id))).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let json = json!({
        "version": "1.0",
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
    });
    Tokenizer::from_json(json.to_string()).unwrap()
}

/// Returns a SentencePiece tokenizer as Llama 2 has it: it normalizes the text and merges all of it as
/// one word.
fn sentence_piece() -> Tokenizer {
    let pieces = ('a'..='z').map(String::from).chain(["▁", "▁a", "ab"].map(str::to_owned));
    let vocab: Map<String, Value> = pieces.zip(0..).map(|(piece, id)| (piece, json!(id))).collect();
    let json = json!({
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["▁", "a"], ["a", "b"]]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
    });
    Tokenizer::from_json(json.to_string()).unwrap()
}

#[test]
fn encoding_needs_no_more_memory_than_documented() {
    assert_eq!(letters().max_text_bytes(100), Some(100), "every token is one byte");
    let bytes = 256 << 10;
    for tokenizer in [letters(), sentence_piece()] {
        for word in ["a", "a ", "b ", "abcdefgh "] {
            let text = word.repeat(bytes / word.len());
            ALLOCATOR.reset_peak_usage();
            let before = ALLOCATOR.current_usage();
            let tokens = tokenizer.encode_piece(&text).unwrap();
            let used = ALLOCATOR.peak_usage() - before;
            println!("{word:?}: {} tokens, {} bytes per byte", tokens.len(), used / text.len());
            assert!(tokens.len() >= text.len() / 2);
            assert!(used <= Tokenizer::ENCODING_BYTES * text.len(), "{word:?}: {used} bytes");
        }
    }
}
