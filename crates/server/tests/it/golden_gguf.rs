//! Writes the recorded Qwen3 model as a GGUF file. Used by tests and by the benchmark.

use std::path::Path;

use tinkex_weights::{DType, GgufWriter, ModelFolder, gguf_tensor_name};

/// Writes the model in `folder` to the GGUF file `path`, with the first of `tokens` as its
/// vocabulary.
pub(crate) fn write(
    folder: &Path,
    path: &Path,
    tokens: impl Iterator<Item = String>,
    chat_template: Option<&str>,
) {
    let source = ModelFolder::open(folder).unwrap();
    let config = source.config();
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", "qwen3");
    for (key, value) in [
        ("block_count", config.layers),
        ("context_length", config.max_positions),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
    ] {
        writer.metadata(format!("qwen3.{key}"), u32::try_from(value).unwrap());
    }
    let tokens: Vec<String> = tokens.take(config.vocab_size).collect();
    writer
        .metadata("qwen3.attention.layer_norm_rms_epsilon", config.norm_eps)
        .metadata("qwen3.rope.freq_base", 1e6_f32)
        .metadata("tokenizer.ggml.model", "gpt2")
        .metadata("tokenizer.ggml.pre", "qwen2")
        .metadata("tokenizer.ggml.eos_token_id", config.eos[0])
        .metadata("tokenizer.ggml.token_type", vec![1_i32; tokens.len()])
        .metadata("tokenizer.ggml.tokens", tokens)
        .metadata("tokenizer.ggml.merges", vec!["t 1".to_owned()]);
    if let Some(template) = chat_template {
        writer.metadata("tokenizer.chat_template", template);
    }
    let names: Vec<String> = config.tensors().map(|(name, _)| name).collect();
    for (name, shape) in config.tensors() {
        writer.tensor(&gguf_tensor_name(&name).unwrap(), DType::F32, &shape).unwrap();
    }
    let fill = |i: usize, out: &mut dyn std::io::Write| {
        for value in source.tensor(&names[i])?.to_f32()? {
            out.write_all(&value.to_le_bytes())?;
        }
        Ok(())
    };
    writer.write(path, fill).unwrap();
}
