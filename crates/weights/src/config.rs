//! [`ModelConfig`]: the architecture and dimensions of a model, from its `config.json`.

use std::path::Path;

#[cfg(doc)]
use crate::Error;
use crate::json_fields::{MAX_SIZE, read_small};
use crate::{Result, Rope, config_json};

/// Name of the embedding.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the unembedding.
pub(crate) const UNEMBEDDING: &str = "lm_head.weight";

/// A supported model architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Architecture {
    /// Llama 2 and 3, and models with the same architecture.
    Llama,
    /// Qwen2 and Qwen2.5, which have biases on queries, keys and values.
    Qwen2,
    /// Qwen3, which normalizes queries and keys.
    Qwen3,
}

impl Architecture {
    /// Returns the architecture whose `model_type` in `transformers` is `name`, if it is supported.
    pub(crate) fn from_model_type(name: &str) -> Option<Self> {
        [Self::Llama, Self::Qwen2, Self::Qwen3].into_iter().find(|one| one.model_type() == name)
    }

    /// Returns the `model_type` in `transformers`, which is also the name in GGUF files.
    pub(crate) fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// Returns the maximum context length of a configuration that does not state it.
    pub(crate) fn default_max_positions(self) -> usize {
        match self {
            Self::Llama => 2048,
            Self::Qwen2 | Self::Qwen3 => 32_768,
        }
    }
}

/// Architecture and dimensions of a model.
///
/// ```
/// use tinkex_weights::ModelConfig;
///
/// let text = br#"{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 256, "hidden_size": 64,
///     "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
///     "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
///     "max_position_embeddings": 512, "tie_word_embeddings": true}"#;
/// let config = ModelConfig::parse(text, "config.json")?;
/// assert!(config.qk_norm && config.tied && !config.qkv_bias);
/// # Ok::<_, tinkex_weights::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture.
    pub architecture: Architecture,
    /// Number of tokens: rows of the embedding and width of the logits.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP's hidden layer.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Dimension of a head; even. `heads * head_dim` may differ from `hidden_size`.
    pub head_dim: usize,
    /// Epsilon of the RMS norms.
    pub norm_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Maximum context length, in tokens.
    pub max_positions: usize,
    /// Whether the embedding is also the unembedding.
    pub tied: bool,
    /// Whether queries and keys are normalized per head.
    pub qk_norm: bool,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention output projection has a bias.
    pub o_bias: bool,
    /// Whether the linear layers of the MLP have biases.
    pub mlp_bias: bool,
    /// End-of-sequence tokens.
    pub eos: Vec<u32>,
    /// Beginning-of-sequence token, if the model has one.
    pub bos: Option<u32>,
}

impl ModelConfig {
    /// Reads and parses the file `path`.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read; otherwise as [`parse`](Self::parse).
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::parse(&read_small(path)?, path)
    }

    /// Parses the text of a `config.json`. `path` is used only in errors.
    ///
    /// # Errors
    /// [`Error::UnknownArchitecture`] for an architecture that is not supported; [`Error::BadFile`]
    /// if a field is missing, out of range, or requests an unsupported feature.
    pub fn parse(text: &[u8], path: impl AsRef<Path>) -> Result<Self> {
        config_json::parse(text, path.as_ref())
    }

    /// Checks the dimensions. Returns a description of the first problem.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (name, size) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_positions),
        ] {
            if !(1..=MAX_SIZE).contains(&size) {
                return Err(format!("{name} is {size}, expected 1 to {MAX_SIZE}"));
            }
        }
        let heads = self.heads;
        let kv_heads = self.kv_heads;
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "num_key_value_heads is {kv_heads}, expected a divisor of num_attention_heads \
                 {heads}"
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head_dim is {}, expected an even number", self.head_dim));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return Err(format!(
                "rms_norm_eps is {}, expected a finite number of at least 0",
                self.norm_eps
            ));
        }
        Ok(())
    }

    /// Returns the name and shape of every tensor of the model, in the order of the forward pass.
    pub fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> + '_ {
        let outer = |name: &str, shape: &[usize]| (name.to_owned(), shape.to_vec());
        let hidden = self.hidden_size;
        let vocab = self.vocab_size;
        let head = (!self.tied).then(|| outer(UNEMBEDDING, &[vocab, hidden]));
        std::iter::once(outer(EMBEDDING, &[vocab, hidden]))
            .chain((0..self.layers).flat_map(|layer| self.layer_tensors(layer)))
            .chain(std::iter::once(outer("model.norm.weight", &[hidden])))
            .chain(head)
    }

    /// Returns the name and shape of every tensor of one layer.
    fn layer_tensors(&self, layer: usize) -> Vec<(String, Vec<usize>)> {
        let hidden = self.hidden_size;
        let inner = self.intermediate_size;
        let q = self.heads * self.head_dim;
        let kv = self.kv_heads * self.head_dim;
        let mut all = Vec::with_capacity(16);
        let mut put = |name: &str, shape: &[usize]| {
            all.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        };
        put("input_layernorm.weight", &[hidden]);
        for (name, out, inputs, bias) in [
            ("self_attn.q_proj", q, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, q, self.o_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ] {
            put(&format!("{name}.weight"), &[out, inputs]);
            if bias {
                put(&format!("{name}.bias"), &[out]);
            }
        }
        if self.qk_norm {
            put("self_attn.q_norm.weight", &[self.head_dim]);
            put("self_attn.k_norm.weight", &[self.head_dim]);
        }
        put("post_attention_layernorm.weight", &[hidden]);
        all
    }
}
