//! Configurations of models, read as `transformers` 5.22 reads them.

use std::fs;

use serde_json::{Value, json};
use tinkex_weights::{Architecture, Error, ModelConfig, RopeScaling};

use crate::golden::folder;

#[test]
fn configurations_differ_by_architecture() {
    let config = |name| ModelConfig::read(folder(name).join("config.json")).unwrap();
    let llama = config("llama");
    let qwen2 = config("qwen2");
    let qwen3 = config("qwen3");
    assert_eq!(llama.architecture, Architecture::Llama);
    assert!(!llama.tied && !llama.qk_norm && !llama.qkv_bias);
    let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 };
    assert_eq!(llama.rope.scaling, scaling);
    assert!(qwen2.qkv_bias && !qwen2.o_bias && !qwen2.tied);
    assert!(qwen3.qk_norm && qwen3.tied && !qwen3.qkv_bias);
    assert_eq!((qwen3.rope.theta, qwen3.head_dim), (1e6, 16));
}

#[test]
fn the_older_form_of_rope_settings_is_accepted() {
    let new = fs::read_to_string(folder("llama").join("config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&new).unwrap();
    let object = json.as_object_mut().unwrap();
    let mut rope = object.remove("rope_parameters").unwrap();
    let theta = rope.as_object_mut().unwrap().remove("rope_theta").unwrap();
    object.insert("rope_scaling".to_owned(), rope);
    object.insert("rope_theta".to_owned(), theta);
    let old = ModelConfig::parse(json.to_string().as_bytes(), "old").unwrap();
    assert_eq!(old, ModelConfig::parse(new.as_bytes(), "new").unwrap());
}

#[test]
fn unsupported_settings_are_named_in_the_error() {
    let good = fs::read_to_string(folder("qwen3").join("config.json")).unwrap();
    for (key, value, want) in [
        ("architectures", serde_json::json!(["MambaForCausalLM"]), "\"MambaForCausalLM\""),
        ("architectures", serde_json::json!([]), ""),
        (
            "quantization_config",
            serde_json::json!({"bits": 4}),
            "quantization_config has quant_method",
        ),
        (
            "layer_types",
            serde_json::json!(["sliding_attention"]),
            "layer_types has \"sliding_attention\"",
        ),
        ("hidden_act", serde_json::json!("gelu"), "gelu"),
        (
            "num_key_value_heads",
            serde_json::json!(3),
            "num_key_value_heads is 3, expected a divisor of num_attention_heads 4",
        ),
        ("head_dim", serde_json::json!(15), "even"),
        ("hidden_size", serde_json::json!(0), "hidden_size is 0"),
        ("vocab_size", serde_json::json!(1_u64 << 60), "vocab_size"),
        ("rope_parameters", serde_json::json!({"rope_type": "longrope"}), "longrope"),
        ("rms_norm_eps", serde_json::json!(-1.0), "rms_norm_eps"),
    ] {
        let mut json: serde_json::Value = serde_json::from_str(&good).unwrap();
        json[key] = value.clone();
        let parsed = ModelConfig::parse(json.to_string().as_bytes(), "config.json");
        if want.is_empty() {
            // `model_type` names the architecture as well.
            assert!(parsed.is_ok());
            continue;
        }
        let error = parsed.unwrap_err();
        assert!(!matches!(error, Error::Io { .. }), "{error}");
        assert!(error.to_string().contains(want), "{key} = {value}: {error}");
    }
}

/// Returns a configuration with the required fields only.
fn minimal(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 4,
    })
}

fn parse(config: &Value) -> Result<ModelConfig, Error> {
    ModelConfig::parse(config.to_string().as_bytes(), "config.json")
}

fn with(mut config: Value, changes: &Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

#[test]
fn unsupported_architectures_are_named_with_the_supported_ones() {
    for (config, name) in [
        (
            json!({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8}),
            "GPT2LMHeadModel",
        ),
        (json!({"architectures": ["MambaForCausalLM"], "d_model": 8}), "MambaForCausalLM"),
        (json!({"model_type": "mamba"}), "mamba"),
        (
            json!({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                "text_config": {"model_type": "gemma3_text", "hidden_size": 8}}),
            "Gemma3ForConditionalGeneration",
        ),
        (json!({"model_type": "llava", "text_config": {"model_type": "llama"}}), "llava"),
        (
            json!({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}),
            "Qwen3MoeForCausalLM",
        ),
        // The class of `transformers` depends on `model_type` alone.
        (
            json!({"architectures": ["LlamaForCausalLM"], "model_type": "mistral"}),
            "LlamaForCausalLM with model_type mistral",
        ),
    ] {
        let error = parse(&config).unwrap_err();
        assert!(matches!(error, Error::UnknownArchitecture { .. }), "{config}: {error}");
        assert_eq!(
            error.to_string(),
            format!(
                "cannot load config.json: architecture {name:?} is not supported; supported: \
                 LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
            )
        );
    }
    let error = parse(&json!({"hidden_size": 8})).unwrap_err().to_string();
    assert!(error.contains("architectures and model_type are missing"), "{error}");
    let headless = with(minimal("llama"), &json!({"architectures": ["LlamaModel"]}));
    assert_eq!(parse(&headless).unwrap().architecture, Architecture::Llama);
}

#[test]
fn missing_fields_and_fields_of_the_wrong_type_are_named() {
    for field in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ] {
        let mut config = minimal("llama");
        config.as_object_mut().unwrap().remove(field);
        let error = parse(&config).unwrap_err().to_string();
        assert_eq!(error, format!("cannot use config.json: {field} is missing"));
        config[field] = json!("64");
        let error = parse(&config).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("cannot use config.json: {field} is \"64\", expected 1 to 16777216")
        );
    }
    for (changes, want) in [
        (json!({"eos_token_id": "2"}), "eos_token_id is \"2\", expected a token id"),
        (json!({"architectures": "LlamaForCausalLM"}), "architectures is \"LlamaForCausalLM\""),
        (json!({"tie_word_embeddings": "yes"}), "tie_word_embeddings is \"yes\""),
        (json!({"hidden_act": 3}), "hidden_act is 3"),
        (json!({"hidden_size": 30}), "hidden_size is 30, expected a multiple of"),
        (
            json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
            "quantization_config has quant_method \"gptq\", which is not supported",
        ),
    ] {
        let error = parse(&with(minimal("llama"), &changes)).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
}

/// The configurations that `transformers` creates have the expected values.
#[test]
fn missing_fields_have_the_defaults_of_their_architecture() {
    let read = |kind: &str, changes: &Value| parse(&with(minimal(kind), changes)).unwrap();
    let llama = read("llama", &json!({}));
    assert_eq!((llama.max_positions, llama.kv_heads, llama.head_dim), (2048, 4, 8));
    assert_eq!((llama.rope.theta, llama.tied), (1e4, false));
    let qwen2 = read("qwen2", &json!({"num_key_value_heads": null}));
    assert_eq!((qwen2.max_positions, qwen2.kv_heads, qwen2.head_dim), (32_768, 4, 8));
    let qwen3 = read("qwen3", &json!({"num_key_value_heads": 2}));
    assert_eq!((qwen3.max_positions, qwen3.kv_heads, qwen3.head_dim), (32_768, 2, 128));
    // Without the field, Qwen has 32 key-value heads; with `null`, as many as query heads.
    let wide = json!({"num_attention_heads": 64, "hidden_size": 512});
    assert_eq!(read("qwen2", &wide).kv_heads, 32);
    assert_eq!(read("llama", &wide).kv_heads, 64);
    let error = parse(&minimal("qwen2")).unwrap_err().to_string();
    assert!(error.contains("num_key_value_heads is missing"), "{error}");
    // Only Llama reads the field.
    assert!(read("llama", &json!({"mlp_bias": true})).mlp_bias);
    assert!(!read("qwen3", &json!({"mlp_bias": true, "num_key_value_heads": 4})).mlp_bias);
}

#[test]
fn token_ids_of_minus_one_are_no_tokens() {
    let ids = |changes: Value| {
        let config = parse(&with(minimal("llama"), &changes)).unwrap();
        (config.bos, config.eos)
    };
    assert_eq!(ids(json!({})), (None, vec![]));
    assert_eq!(ids(json!({"bos_token_id": null, "eos_token_id": null})), (None, vec![]));
    assert_eq!(ids(json!({"bos_token_id": -1, "eos_token_id": -1})), (None, vec![]));
    assert_eq!(ids(json!({"bos_token_id": 0, "eos_token_id": [5, -1, 9]})), (Some(0), vec![5, 9]));
}

/// If `use_sliding_window` is true, `transformers` gives a window to the layers from
/// `max_window_layers` on.
#[test]
fn windows_that_no_layer_uses_are_accepted() {
    let qwen = |changes: Value| {
        let config = with(minimal("qwen2"), &json!({"num_key_value_heads": 4}));
        parse(&with(config, &changes))
    };
    for accepted in [
        json!({"sliding_window": 16, "max_window_layers": 0}),
        json!({"use_sliding_window": true, "sliding_window": 16}),
        json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1}),
        json!({"use_sliding_window": true, "sliding_window": null, "max_window_layers": 0}),
        json!({"use_sliding_window": true, "sliding_window": 32768, "max_window_layers": 0}),
        json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 0,
            "layer_types": ["full_attention"]}),
    ] {
        assert!(qwen(accepted.clone()).is_ok(), "{accepted}");
    }
    for refused in [
        json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 0}),
        json!({"use_sliding_window": true, "max_window_layers": 0}),
        json!({"layer_types": ["sliding_attention"]}),
    ] {
        let error = qwen(refused.clone()).unwrap_err().to_string();
        assert!(error.contains("sliding"), "{refused}: {error}");
    }
    let llama =
        with(minimal("llama"), &json!({"use_sliding_window": true, "max_window_layers": 0}));
    assert!(parse(&llama).is_ok(), "Llama has no windows");
}
