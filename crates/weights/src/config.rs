//! [`ModelConfig`]: the architecture and dimensions of a model, from its `config.json`.

use std::path::Path;

use serde::Deserialize;

use super::rope::{RawRope, Rope};
use crate::{Error, Result};

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

/// Names of the supported architectures, for errors.
const KNOWN: &str = "LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM";

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
        let path = path.as_ref();
        let raw: RawModelConfig = serde_json::from_slice(text)
            .map_err(|e| Error::bad_file(path, format!("not a model configuration: {e}")))?;
        let (architecture, name) = raw.architecture();
        let Some(architecture) = architecture else {
            return Err(Error::UnknownArchitecture { path: path.to_owned(), name, known: KNOWN });
        };
        raw.validate(architecture).map_err(|reason| Error::bad_file(path, reason))
    }

    /// Returns the name and shape of every tensor of the model, in the order of the forward pass.
    pub fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> + '_ {
        let outer = |name: &str, shape: &[usize]| (name.to_owned(), shape.to_vec());
        let (hidden, vocab) = (self.hidden_size, self.vocab_size);
        let head = (!self.tied).then(|| outer("lm_head.weight", &[vocab, hidden]));
        std::iter::once(outer("model.embed_tokens.weight", &[vocab, hidden]))
            .chain((0..self.layers).flat_map(|layer| self.layer_tensors(layer)))
            .chain(std::iter::once(outer("model.norm.weight", &[hidden])))
            .chain(head)
    }

    /// Returns the name and shape of every tensor of one layer.
    fn layer_tensors(&self, layer: usize) -> Vec<(String, Vec<usize>)> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
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

/// Reads a configuration file of at most 64 MiB.
pub(super) fn read_small(path: &Path) -> Result<Vec<u8>> {
    const MAX_BYTES: u64 = 64 << 20;
    let bytes = std::fs::metadata(path).map_err(Error::io("read", path))?.len();
    if bytes > MAX_BYTES {
        let reason = format!("the file has {bytes} bytes, the limit is {MAX_BYTES}");
        return Err(Error::bad_file(path, reason));
    }
    std::fs::read(path).map_err(Error::io("read", path))
}

/// The fields of a `config.json` that the engine reads.
#[derive(Deserialize)]
struct RawModelConfig {
    #[serde(default)]
    architectures: Vec<String>,
    model_type: Option<String>,
    vocab_size: u64,
    hidden_size: u64,
    intermediate_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    rms_norm_eps: Option<f64>,
    hidden_act: Option<String>,
    max_position_embeddings: Option<u64>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    partial_rotary_factor: Option<f64>,
    use_sliding_window: Option<bool>,
    #[serde(default)]
    layer_types: Option<Vec<String>>,
    quantization_config: Option<serde_json::Value>,
    eos_token_id: Option<OneOrMany>,
    bos_token_id: Option<OneOrMany>,
}

/// Token ids: a single one or a list, depending on the file.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl OneOrMany {
    /// Returns the ids as a list.
    pub(super) fn all(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

impl RawModelConfig {
    /// Returns the architecture, if it is supported, and its name in the file.
    fn architecture(&self) -> (Option<Architecture>, String) {
        let name = match (self.architectures.as_slice(), &self.model_type) {
            ([], Some(kind)) => kind.clone(),
            (names, _) => names.join(", "),
        };
        let found = match name.as_str() {
            "LlamaForCausalLM" | "llama" => Some(Architecture::Llama),
            "Qwen2ForCausalLM" | "qwen2" => Some(Architecture::Qwen2),
            "Qwen3ForCausalLM" | "qwen3" => Some(Architecture::Qwen3),
            _ => None,
        };
        (found, name)
    }

    /// Checks all fields and applies the defaults of `transformers`. Returns a description of the
    /// first problem.
    fn validate(self, architecture: Architecture) -> Result<ModelConfig, String> {
        if self.quantization_config.is_some() {
            return Err("quantized weights are not supported, expected f32, f16 or bf16".to_owned());
        }
        let windowed = |layer: &String| layer != "full_attention";
        if self.use_sliding_window == Some(true) || self.layer_types.iter().flatten().any(windowed)
        {
            return Err("sliding-window attention is not supported".to_owned());
        }
        match self.hidden_act.as_deref() {
            None | Some("silu" | "swish") => {}
            Some(other) => {
                return Err(format!("activation {other:?} is not supported, expected \"silu\""));
            }
        }
        if self.partial_rotary_factor.is_some_and(|part| part != 1.0) {
            return Err("partial_rotary_factor other than 1 is not supported".to_owned());
        }
        let heads = size("num_attention_heads", self.num_attention_heads)?;
        let kv_heads = match self.num_key_value_heads {
            Some(heads) => size("num_key_value_heads", heads)?,
            None => heads,
        };
        if heads % kv_heads != 0 {
            return Err(format!("{kv_heads} key-value heads do not divide {heads} query heads"));
        }
        let hidden_size = size("hidden_size", self.hidden_size)?;
        let head_dim = match (self.head_dim, architecture) {
            (Some(width), _) => size("head_dim", width)?,
            (None, Architecture::Qwen3) => 128,
            (None, _) if hidden_size % heads == 0 => hidden_size / heads,
            (None, _) => {
                return Err(format!("{heads} heads do not divide hidden_size {hidden_size}"));
            }
        };
        if head_dim % 2 != 0 {
            return Err(format!("head_dim is {head_dim}, expected an even number"));
        }
        let max_positions =
            size("max_position_embeddings", self.max_position_embeddings.unwrap_or(2048))?;
        let eps = self.rms_norm_eps.unwrap_or(1e-6);
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(format!("rms_norm_eps is {eps}, expected a finite number of at least 0"));
        }
        let rope = self.rope_parameters.or(self.rope_scaling).unwrap_or_default();
        let attention_bias = self.attention_bias.unwrap_or(false);
        Ok(ModelConfig {
            architecture,
            vocab_size: size("vocab_size", self.vocab_size)?,
            hidden_size,
            intermediate_size: size("intermediate_size", self.intermediate_size)?,
            layers: size("num_hidden_layers", self.num_hidden_layers)?,
            heads,
            kv_heads,
            head_dim,
            #[expect(clippy::cast_possible_truncation, reason = "activations are f32")]
            norm_eps: eps as f32,
            rope: rope.validate(self.rope_theta, max_positions)?,
            max_positions,
            tied: self.tie_word_embeddings.unwrap_or(false),
            qk_norm: architecture == Architecture::Qwen3,
            qkv_bias: attention_bias || architecture == Architecture::Qwen2,
            o_bias: attention_bias && architecture != Architecture::Qwen2,
            mlp_bias: self.mlp_bias.unwrap_or(false),
            eos: self.eos_token_id.map(OneOrMany::all).unwrap_or_default(),
            bos: self.bos_token_id.and_then(|ids| ids.all().first().copied()),
        })
    }
}

/// Checks a dimension: at least 1, and small enough that a product of two does not overflow.
fn size(name: &str, value: u64) -> Result<usize, String> {
    const MAX: u64 = 1 << 24;
    match usize::try_from(value) {
        Ok(size) if (1..=MAX).contains(&value) => Ok(size),
        _ => Err(format!("{name} is {value}, expected 1 to {MAX}")),
    }
}
