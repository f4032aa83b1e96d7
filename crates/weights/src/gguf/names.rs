//! Names of tensors in GGUF files, and the row order that follows from them.

use crate::Architecture;
use crate::config::{EMBEDDING, UNEMBEDDING};

/// Name of the tensor with the factors of the rotary frequencies.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Name of the embedding in GGUF files.
pub(crate) const GGUF_EMBEDDING: &str = "token_embd.weight";
/// Name of the unembedding in GGUF files.
pub(crate) const GGUF_UNEMBEDDING: &str = "output.weight";

/// Parts of a layer: names in Hugging Face files and in GGUF files.
const LAYER_PARTS: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Tensors outside the layers.
const OUTER: [(&str, &str); 3] = [
    (EMBEDDING, GGUF_EMBEDDING),
    ("model.norm.weight", "output_norm.weight"),
    (UNEMBEDDING, GGUF_UNEMBEDDING),
];

/// Returns the name in a GGUF file of the tensor that Hugging Face files of the supported
/// architectures call `name`, or `None` if the architectures have no such tensor.
///
/// ```
/// use tinkex_weights::gguf_tensor_name;
///
/// let name = gguf_tensor_name("model.layers.3.self_attn.q_proj.weight");
/// assert_eq!(name.as_deref(), Some("blk.3.attn_q.weight"));
/// ```
#[must_use]
pub fn gguf_tensor_name(name: &str) -> Option<String> {
    if let Some((_, gguf)) = OUTER.iter().find(|(other, _)| *other == name) {
        return Some((*gguf).to_owned());
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (part, kind) = rest.rsplit_once('.')?;
    let (_, gguf) = LAYER_PARTS.iter().find(|(other, _)| *other == part)?;
    let valid =
        layer.bytes().all(|byte| byte.is_ascii_digit()) && matches!(kind, "weight" | "bias");
    valid.then(|| format!("blk.{layer}.{gguf}.{kind}"))
}

/// Returns whether the two rows that are rotated together are neighbours within each head of the
/// tensor that Hugging Face files call `name`. GGUF files of the llama architecture store the query
/// and key weights and biases this way. In other tensors, and in Hugging Face files, the two rows are
/// half a head apart.
pub(crate) fn has_interleaved_heads(name: &str, architecture: Architecture) -> bool {
    let is_rotated = [".q_proj.", ".k_proj."].iter().any(|part| name.contains(part));
    is_rotated && architecture == Architecture::Llama
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_queries_and_keys_of_llama_are_interleaved() {
        for (name, architecture, want) in [
            ("model.layers.0.self_attn.q_proj.weight", Architecture::Llama, true),
            ("model.layers.0.self_attn.k_proj.bias", Architecture::Llama, true),
            ("model.layers.0.self_attn.v_proj.weight", Architecture::Llama, false),
            ("model.layers.0.self_attn.q_proj.weight", Architecture::Qwen2, false),
            ("model.layers.0.self_attn.q_proj.weight", Architecture::Qwen3, false),
        ] {
            assert_eq!(has_interleaved_heads(name, architecture), want, "{name} {architecture:?}");
        }
    }

    #[test]
    fn names_are_translated() {
        for (name, want) in [
            ("model.layers.10.mlp.down_proj.weight", Some("blk.10.ffn_down.weight")),
            ("model.layers.0.self_attn.k_proj.bias", Some("blk.0.attn_k.bias")),
            ("model.layers.0.input_layernorm.weight", Some("blk.0.attn_norm.weight")),
            ("lm_head.weight", Some("output.weight")),
            ("model.layers.x.mlp.down_proj.weight", None),
            ("model.layers.0.mlp.experts.weight", None),
            ("model.rotary.weight", None),
        ] {
            assert_eq!(gguf_tensor_name(name).as_deref(), want, "{name}");
        }
    }
}
