//! Parses `config.json` as `transformers` does.

use std::path::Path;

use serde_json::{Map, Value};

use crate::json_fields::JsonFields;
use crate::{Architecture, Error, ModelConfig, Result, Rope};

/// Names of the supported architectures, for errors.
const KNOWN: &str = "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM";

/// Implements [`ModelConfig::parse`].
pub(super) fn parse(text: &[u8], path: &Path) -> Result<ModelConfig> {
    let object: Map<String, Value> = serde_json::from_slice(text)
        .map_err(|e| Error::bad_file(path, format!("not a model configuration: {e}")))?;
    let fields = JsonFields::new(&object);
    // Check the architecture first. Configurations of unsupported architectures often lack fields,
    // and the error should name the architecture rather than a field.
    let architecture = architecture(fields, path)?;
    let config = config(fields, architecture).and_then(|config| {
        config.check()?;
        Ok(config)
    });
    config.map_err(|reason| Error::bad_file(path, reason))
}

/// Returns the architecture, which `model_type` and `architectures` must agree on if both exist.
fn architecture(fields: JsonFields<'_>, path: &Path) -> Result<Architecture> {
    let bad = |reason: String| Error::bad_file(path, reason);
    let classes = fields.texts("architectures").map_err(bad)?;
    let model_type = fields.text("model_type").map_err(bad)?;
    let mut found: Vec<Option<Architecture>> =
        classes.iter().map(|class| from_class(class)).collect();
    found.extend(model_type.map(Architecture::from_model_type));
    if let Some(Some(first)) = found.first().copied()
        && found.iter().all(|other| *other == Some(first))
    {
        return Ok(first);
    }
    let name = match (classes.as_slice(), model_type) {
        ([], None) => {
            let reason = "architectures and model_type are missing, expected at least one of them";
            return Err(Error::bad_file(path, reason));
        }
        ([], Some(model_type)) => model_type.to_owned(),
        (classes, Some(model_type)) if classes.iter().all(|class| from_class(class).is_some()) => {
            format!("{} with model_type {model_type}", classes.join(", "))
        }
        (classes, _) => classes.join(", "),
    };
    Err(Error::UnknownArchitecture { path: path.to_owned(), name, known: KNOWN })
}

/// Returns the architecture of a class of `transformers`, which is the model with or without its
/// unembedding.
fn from_class(name: &str) -> Option<Architecture> {
    let family = name.strip_suffix("ForCausalLM").or_else(|| name.strip_suffix("Model"))?;
    match family {
        "Llama" => Some(Architecture::Llama),
        "Qwen2" => Some(Architecture::Qwen2),
        "Qwen3" => Some(Architecture::Qwen3),
        _ => None,
    }
}

/// Reads all fields and applies the defaults of `transformers`. Returns a description of the first
/// problem.
fn config(fields: JsonFields<'_>, architecture: Architecture) -> Result<ModelConfig, String> {
    let qwen = architecture != Architecture::Llama;
    if let Some(quantization) = fields.value("quantization_config") {
        let method = quantization["quant_method"].as_str().unwrap_or("unknown");
        return Err(format!(
            "quantization_config has quant_method {method:?}, which is not supported; use the \
             model's f32, f16 or bf16 weights"
        ));
    }
    if let Some(other) =
        fields.text("hidden_act")?.filter(|name| !matches!(*name, "silu" | "swish"))
    {
        return Err(format!("hidden_act {other:?} is not supported, expected \"silu\""));
    }
    let hidden_size = fields.required_size("hidden_size")?;
    let heads = fields.required_size("num_attention_heads")?;
    let layers = fields.required_size("num_hidden_layers")?;
    let kv_heads = match fields.size("num_key_value_heads")? {
        Some(heads) => heads,
        // The default of `transformers` for Qwen is 32, whatever the number of heads.
        None if qwen && !fields.contains("num_key_value_heads") => {
            if heads % 32 != 0 {
                return Err(format!(
                    "num_key_value_heads is missing; the default 32 does not divide \
                     num_attention_heads {heads}"
                ));
            }
            32
        }
        None => heads,
    };
    let head_dim = match fields.size("head_dim")? {
        Some(width) => width,
        None if architecture == Architecture::Qwen3 => 128,
        None if hidden_size % heads == 0 => hidden_size / heads,
        None => {
            return Err(format!(
                "hidden_size is {hidden_size}, expected a multiple of num_attention_heads {heads}, \
                 or head_dim"
            ));
        }
    };
    let max_positions = fields
        .size("max_position_embeddings")?
        .unwrap_or_else(|| architecture.default_max_positions());
    if qwen {
        check_windows(fields, layers, max_positions)?;
    }
    let eps = fields.number("rms_norm_eps")?.unwrap_or(1e-6);
    let attention_bias = fields.flag("attention_bias")?.unwrap_or(false);
    Ok(ModelConfig {
        architecture,
        vocab_size: fields.required_size("vocab_size")?,
        hidden_size,
        intermediate_size: fields.required_size("intermediate_size")?,
        layers,
        heads,
        kv_heads,
        head_dim,
        #[expect(clippy::cast_possible_truncation, reason = "activations are f32")]
        norm_eps: eps as f32,
        rope: Rope::parse(fields, max_positions)?,
        max_positions,
        tied: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        qk_norm: architecture == Architecture::Qwen3,
        qkv_bias: attention_bias || architecture == Architecture::Qwen2,
        o_bias: attention_bias && architecture != Architecture::Qwen2,
        mlp_bias: !qwen && fields.flag("mlp_bias")?.unwrap_or(false),
        eos: fields.token_ids("eos_token_id")?,
        bos: fields.token_ids("bos_token_id")?.first().copied(),
    })
}

/// Checks that no layer of a Qwen model has sliding-window attention with a window shorter than the
/// context.
fn check_windows(
    fields: JsonFields<'_>,
    layers: usize,
    max_positions: usize,
) -> Result<(), String> {
    if let Some(other) = fields.texts("layer_types")?.iter().find(|kind| **kind != "full_attention")
    {
        return Err(format!("layer_types has {other:?}, expected only \"full_attention\""));
    }
    let windowed = fields.flag("use_sliding_window")?.unwrap_or(false);
    // Without the list, the layers from `max_window_layers` on have a window.
    if !windowed || fields.value("layer_types").is_some() {
        return Ok(());
    }
    let first = fields.number("max_window_layers")?.unwrap_or(28.0);
    let window = match fields.number("sliding_window")? {
        Some(window) => window,
        None if fields.contains("sliding_window") => return Ok(()),
        None => 4096.0,
    };
    if first < layers as f64 && window < max_positions as f64 {
        return Err(format!(
            "use_sliding_window is true with sliding_window {window}; sliding-window attention is \
             not supported"
        ));
    }
    Ok(())
}
