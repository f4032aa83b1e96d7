//! Tokenizers that were stored in a GGUF file and read from it encode as before.

use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Value, json};
use tinkex_text::Tokenizer;
use tinkex_weights::{
    AdapterExport, AdapterFile, ExportDType, ExportFormat, GgufModel, LoraPairRef, ModelConfig,
    PeftConfig,
};

const LLAMA3_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN2_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const TEXTS: [&str; 12] = [
    "",
    "The cow says moo. What does the duck say?",
    "I'll say it's THEY'RE 12345 and 6.7e89",
    "  two  spaces,\ttabs\t\tand \r\n lines\n\n\nend   ",
    "naïve café – Straße, Ærø",
    // A composed and a decomposed character, which NFC unites.
    "\u{e9} e\u{301}",
    "日本語のテキスト。 한국어 русский العربية",
    "🦆👩‍👩‍👧‍👦 \u{1f1e9}\u{1f1ea}",
    "<|endoftext|>user\nHi<|im_end|>\n",
    "a<tool>b <tool> c<|im_end|>",
    "\u{0}\u{7f}\u{feff}",
    "fn main() { println!(\"{}\", 1 << 20); }",
];

/// Changes the `tokenizer.json` of a folder to a tokenizer that llama.cpp knows, with the same
/// tokens and merges.
fn change_tokenizer(folder: &Path, pre: &str) {
    let path = folder.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let bytes = |use_regex: bool| {
        json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": use_regex,
        })
    };
    let split = |pattern: &str| {
        let first = json!({
            "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated",
            "invert": false,
        });
        json!({ "type": "Sequence", "pretokenizers": [first, bytes(false)] })
    };
    tokenizer["pre_tokenizer"] = match pre {
        "gpt-2" => bytes(true),
        "smollm" => json!({
            "type": "Sequence",
            "pretokenizers": [{ "type": "Digits", "individual_digits": true }, bytes(true)],
        }),
        "llama-bpe" => split(LLAMA3_SPLIT),
        _ => split(QWEN2_SPLIT),
    };
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    added[1]["content"] = json!("<tool>");
    added[1]["special"] = json!(false);
    let first = added[0]["content"].as_str().unwrap().to_owned();
    let id = added[0]["id"].clone();
    match pre {
        "qwen2" => tokenizer["normalizer"] = json!({ "type": "NFC" }),
        "llama-bpe" => {
            tokenizer["model"]["ignore_merges"] = json!(true);
            let bos = json!({ "SpecialToken": { "id": first, "type_id": 0 } });
            let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
            tokenizer["post_processor"] = json!({
                "type": "TemplateProcessing", "single": [bos, text], "pair": [bos, text, bos, text],
                "special_tokens": { &first: { "id": first, "ids": [id], "tokens": [first] } },
            });
        }
        _ => {}
    }
    std::fs::write(path, tokenizer.to_string()).unwrap();
    let config = match pre {
        "llama-bpe" => json!({ "bos_token": first, "eos_token": "<|im_end|>" }),
        _ => json!({ "eos_token": "<|im_end|>" }),
    };
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}

/// Writes an adapter of the model in `base` that changes nothing.
fn write_adapter(folder: &Path, base: &Path) {
    let config = ModelConfig::read(base.join("config.json")).unwrap();
    let inputs = config.hidden_size;
    let outputs = config.vocab_size;
    let peft = PeftConfig {
        rank: 1,
        alpha: 1.0,
        base_model: String::new(),
        target_modules: vec!["lm_head".to_owned()],
    };
    let a = vec![0.0; inputs];
    let b = vec![0.0; outputs];
    let pair = LoraPairRef { module: "lm_head", inputs, outputs, a: &a, b: &b };
    AdapterFile::save(folder, &peft, &[pair]).unwrap();
}

#[test]
fn a_converted_tokenizer_encodes_like_the_original() {
    for pre in ["gpt-2", "smollm", "llama-bpe", "qwen2"] {
        let folder = tempfile::tempdir().unwrap();
        let [base, adapter, to] = ["base", "adapter", "out"].map(|name| folder.path().join(name));
        for folder in [&base, &adapter] {
            std::fs::create_dir(folder).unwrap();
        }
        tinkex_server::write_built_in_model(&base).unwrap();
        change_tokenizer(&base, pre);
        write_adapter(&adapter, &base);
        let export = AdapterExport::new(&adapter, &to).base(&base).format(ExportFormat::Gguf);
        let prepared = export.dtype(ExportDType::Q8_0).prepare().unwrap();
        prepared.write(|_| ControlFlow::Continue(())).unwrap();

        let original = Tokenizer::from_folder(&base).unwrap();
        let files = GgufModel::open(to.join("out.gguf")).unwrap().tokenizer_files().unwrap();
        std::fs::write(to.join("tokenizer.json"), files.tokenizer).unwrap();
        std::fs::write(to.join("tokenizer_config.json"), files.config).unwrap();
        let converted = Tokenizer::from_folder(&to).unwrap();
        let mut longest = 0;
        for text in TEXTS {
            let ids = original.encode(text).unwrap();
            assert_eq!(converted.encode(text).unwrap(), ids, "{pre}: {text:?}");
            let pieces = original.encode_piece(text).unwrap();
            assert_eq!(converted.encode_piece(text).unwrap(), pieces, "{pre}: {text:?}");
            let decoded = converted.decode(&pieces).unwrap();
            assert_eq!(decoded, original.decode(&pieces).unwrap(), "{pre}: {text:?}");
            if !text.contains('\u{301}') {
                assert_eq!(decoded, text, "{pre}");
            }
            let shown = converted.decode_text(&ids).unwrap();
            assert_eq!(shown, original.decode_text(&ids).unwrap(), "{pre}: {text:?}");
            longest = longest.max(text.len() - pieces.len().min(text.len()));
        }
        assert!(longest > 10, "{pre}: no merge was applied");
        assert_eq!(converted.eos_id(), original.eos_id(), "{pre}");
        assert_eq!(converted.bos_id(), original.bos_id(), "{pre}");
    }
}
