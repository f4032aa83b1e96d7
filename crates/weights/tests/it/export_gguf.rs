//! Exports of adapters as GGUF files.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;
use tinkex_weights::{
    AdapterExport, DType, Error, ExportDType, ExportFormat, GgufModel, GgufValue, ModelFolder,
    RopeScaling,
};

use crate::golden::{MODELS, OwnedTensor, change_json, change_tensors, copy_of, folder};

const TEMPLATE: &str = "{{ messages[0].content }}";

/// Writes a tokenizer with `count` tokens into a folder.
pub(crate) fn add_tokenizer(folder: &Path, count: usize) {
    let mut vocab: serde_json::Map<String, Value> =
        (0..count - 4).map(|id| (format!("t{id}"), json!(id))).collect();
    vocab.insert("t0t1".to_owned(), json!(count - 4));
    let tokenizer = json!({
        "added_tokens": [
            { "id": count - 3, "content": "<|im_end|>", "special": true },
            { "id": count - 2, "content": "<tool>", "special": false },
        ],
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": false, "use_regex": true, "trim_offsets": false,
        },
        "model": { "type": "BPE", "vocab": vocab, "merges": [["t0", "t1"]] },
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({ "eos_token": { "content": "<|im_end|>" }, "chat_template": TEMPLATE });
    fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}

fn export(base: &Path, name: &str, to: &Path, format: ExportFormat, dtype: ExportDType) {
    let export = AdapterExport::new(folder(name).join("adapter"), to).base(base);
    let prepared = export.format(format).dtype(dtype).prepare().unwrap();
    let expected = prepared.bytes();
    let mut last = 0;
    let exported = prepared
        .write(|now| {
            last = now.bytes;
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!((last, exported.bytes), (expected, expected));
    let size = |file: &String| fs::metadata(to.join(file)).unwrap().len();
    assert_eq!(exported.files.iter().map(size).sum::<u64>(), expected);
}

#[test]
fn gguf_files_contain_the_merged_model() {
    for name in MODELS {
        let base = copy_of(name);
        let vocab_size = ModelFolder::open(base.path()).unwrap().config().vocab_size;
        add_tokenizer(base.path(), vocab_size);
        let out = TempDir::new().unwrap();
        let merged = out.path().join("merged");
        export(base.path(), name, &merged, ExportFormat::Hf, ExportDType::F32);
        let merged = ModelFolder::open(&merged).unwrap();
        for dtype in ExportDType::ALL {
            let to = out.path().join(format!("{dtype}"));
            export(base.path(), name, &to, ExportFormat::Gguf, dtype);
            let model = GgufModel::open(to.join(format!("{dtype}.gguf"))).unwrap();
            assert!(model.warnings().is_empty(), "{:?}", model.warnings());

            let mut config = model.config().clone();
            let frequencies = config.rope.frequencies(config.head_dim);
            let wanted = merged.config().rope.frequencies(config.head_dim);
            for (got, want) in frequencies.iter().zip(wanted) {
                assert!((got - want).abs() < 1e-6 * want, "{got} for {want}");
            }
            if let RopeScaling::Llama3 { .. } = merged.config().rope.scaling {
                config.rope = merged.config().rope.clone();
            }
            config.eos = merged.config().eos.clone();
            config.bos = merged.config().bos;
            config.rope.theta = merged.config().rope.theta;
            assert_eq!(config, *merged.config());

            for (tensor, _) in merged.config().tensors() {
                let want = merged.tensor(&tensor).unwrap().to_f32().unwrap();
                let stored = model.tensor(&tensor).unwrap();
                let got = stored.to_f32().unwrap();
                let largest = want.iter().fold(0.0_f32, |all, value| all.max(value.abs()));
                let bound = match stored.dtype() {
                    DType::F32 => 0.0,
                    DType::F16 => 0.001 * largest,
                    DType::Bf16 => 0.004 * largest,
                    _ => 0.08 * largest,
                };
                for (got, want) in got.iter().zip(&want) {
                    assert!(
                        (got - want).abs() <= bound,
                        "{name} {dtype} {tensor}: {got} for {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_tokenizer_and_the_chat_template_are_stored() {
    let base = copy_of("qwen3");
    let vocab_size = ModelFolder::open(base.path()).unwrap().config().vocab_size;
    add_tokenizer(base.path(), vocab_size);
    let out = TempDir::new().unwrap();
    let to = out.path().join("model");
    export(base.path(), "qwen3", &to, ExportFormat::Gguf, ExportDType::Q8_0);
    let model = GgufModel::open(to.join("model.gguf")).unwrap();
    let get = |key: &str| model.file().get(key);
    assert_eq!(get("tokenizer.ggml.pre").and_then(GgufValue::as_str), Some("gpt-2"));
    let tokens = get("tokenizer.ggml.tokens").and_then(GgufValue::as_strings).unwrap();
    assert_eq!(tokens.len(), vocab_size);
    assert_eq!(tokens[vocab_size - 1], format!("[PAD{}]", vocab_size - 1));
    let eos = get("tokenizer.ggml.eos_token_id").and_then(GgufValue::as_u64);
    assert_eq!(eos, Some(vocab_size as u64 - 3));
    assert_eq!(get("tokenizer.chat_template").and_then(GgufValue::as_str), Some(TEMPLATE));
    let files = model.tokenizer_files().unwrap();
    let tokenizer: Value = serde_json::from_str(&files.tokenizer).unwrap();
    assert_eq!(tokenizer["model"]["merges"], json!([["t0", "t1"]]));
    assert_eq!(tokenizer["added_tokens"].as_array().unwrap().len(), 2);
    let card = fs::read_to_string(to.join("README.md")).unwrap();
    assert!(card.contains("| weights | q8_0 |") && card.contains("model.gguf"), "{card}");
}

#[test]
fn tokenizers_that_llama_cpp_does_not_know_are_refused() {
    let base = copy_of("qwen3");
    let out = TempDir::new().unwrap();
    let to = out.path().join("model");
    let error = || {
        let export = AdapterExport::new(folder("qwen3").join("adapter"), &to).base(base.path());
        export.format(ExportFormat::Gguf).prepare().unwrap_err().to_string()
    };
    assert!(error().contains("tokenizer.json"), "{}", error());
    let path = base.path().join("tokenizer.json");
    fs::write(&path, json!({ "model": { "type": "Unigram" } }).to_string()).unwrap();
    assert!(error().contains("type Unigram cannot be stored in GGUF"), "{}", error());
    fs::copy(folder("tokenizer.json"), &path).unwrap();
    assert!(error().contains("llama.cpp has no pre-tokenizer that splits text as"), "{}", error());
    let hf = AdapterExport::new(folder("qwen3").join("adapter"), &to).base(base.path());
    let error = hf.dtype(ExportDType::Q4KM).prepare().unwrap_err().to_string();
    assert!(error.contains("format hf cannot store q4_k_m"), "{error}");
}

#[test]
fn context_extensions_are_stored() {
    let yarn = json!({
        "rope_type": "yarn", "rope_theta": 500_000.0, "factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    let custom = json!({
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.5,
        "attention_factor": 1.25, "original_max_position_embeddings": 100,
    });
    let linear = json!({ "rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0 });
    let llama3 = json!({
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    });
    for (name, settings) in [
        ("llama", &linear),
        ("llama", &yarn),
        ("llama", &llama3),
        ("qwen2", &linear),
        ("qwen2", &custom),
        ("qwen3", &yarn),
        ("qwen3", &custom),
    ] {
        let base = copy_of(name);
        change_json(&base, "config.json", &json!({ "rope_parameters": settings }));
        let source = ModelFolder::open(base.path()).unwrap();
        let want = source.config();
        assert_ne!(want.rope.scaling, RopeScaling::None, "{name} {settings}");
        add_tokenizer(base.path(), want.vocab_size);
        let out = TempDir::new().unwrap();
        let to = out.path().join("model");
        export(base.path(), name, &to, ExportFormat::Gguf, ExportDType::F32);
        let model = GgufModel::open(to.join("model.gguf")).unwrap();
        assert!(model.warnings().is_empty(), "{:?}", model.warnings());
        let got = model.config();
        let is_close = |got: f64, want: f64| (got - want).abs() < 1e-6 * want.abs();
        let frequencies = got.rope.frequencies(got.head_dim);
        for (got, want) in frequencies.iter().zip(want.rope.frequencies(want.head_dim)) {
            assert!(is_close(*got, want), "{name} {settings}: {got} for {want}");
        }
        let got = &got.rope;
        let want = &want.rope;
        assert!(is_close(got.attention_factor(), want.attention_factor()), "{name} {settings}");
        // Llama 3's extension is stored as factors of the frequencies.
        if !matches!(want.scaling, RopeScaling::Llama3 { .. }) {
            let kinds = [got, want].map(|rope| std::mem::discriminant(&rope.scaling));
            assert_eq!(kinds[0], kinds[1], "{name} {settings}");
        }
    }
}

#[test]
fn models_that_llama_cpp_refuses_are_refused() {
    let out = TempDir::new().unwrap();
    let to = out.path().join("model");
    let error = |base: &TempDir, name: &str| {
        add_tokenizer(base.path(), ModelFolder::open(base.path()).unwrap().config().vocab_size);
        let export = AdapterExport::new(folder(name).join("adapter"), &to).base(base.path());
        let export = export.format(ExportFormat::Gguf);
        let checked = export.check(None).unwrap_err();
        let error = export.prepare().unwrap_err();
        assert!(matches!(error, Error::InvalidExport { .. }), "{error:?}");
        assert_eq!(checked.to_string(), error.to_string());
        error.to_string()
    };
    let base = copy_of("qwen3");
    change_json(&base, "config.json", &json!({ "attention_bias": true }));
    change_tensors(&base, |tensors| {
        let biases: Vec<OwnedTensor> = tensors
            .iter()
            .filter(|tensor| tensor.name.contains("self_attn") && tensor.shape.len() == 2)
            .map(|tensor| OwnedTensor {
                name: tensor.name.replace(".weight", ".bias"),
                shape: vec![tensor.shape[0]],
                values: vec![0.5; tensor.shape[0]],
            })
            .collect();
        tensors.extend(biases);
    });
    let text = error(&base, "qwen3");
    assert!(text.contains("config.json: attention_bias is true, but llama.cpp's qwen3"), "{text}");
    let base = copy_of("qwen2");
    let settings = json!({
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    });
    change_json(&base, "config.json", &json!({ "rope_parameters": settings }));
    let text = error(&base, "qwen2");
    assert!(text.contains("llama.cpp's qwen2 models cannot scale rotary frequencies"), "{text}");
    let base = copy_of("llama");
    let settings = json!({
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "truncate": false,
        "original_max_position_embeddings": 64,
    });
    change_json(&base, "config.json", &json!({ "rope_parameters": settings }));
    let text = error(&base, "llama");
    assert!(text.contains("GGUF cannot store rope_scaling with truncate false"), "{text}");
    let settings = json!({
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 16.0,
        "original_max_position_embeddings": 64,
    });
    change_json(&base, "config.json", &json!({ "rope_parameters": settings }));
    let text = error(&base, "llama");
    assert!(text.contains("beta_fast 16 and beta_slow 1, but llama.cpp always computes"), "{text}");
    let base = copy_of("llama");
    change_json(&base, "config.json", &json!({ "rms_norm_eps": 0.0 }));
    let text = error(&base, "llama");
    assert!(text.contains("llama.cpp cannot load a model with rms_norm_eps 0"), "{text}");
}
