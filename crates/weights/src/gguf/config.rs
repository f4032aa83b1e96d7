//! Derives a [`ModelConfig`] from the metadata of a GGUF file.

use super::names::{GGUF_EMBEDDING, ROPE_FACTORS, gguf_tensor_name};
use super::read::GgufFile;
use super::token_type;
use super::value::{GgufArray, GgufValue};
use crate::config::UNEMBEDDING;
use crate::{Architecture, Error, ModelConfig, Result, Rope, RopeScaling};

/// Architectures that can be read, for errors.
const KNOWN: &str = "llama, qwen2 and qwen3";
/// Texts of control tokens that end a turn or a document, besides the tokens that the metadata names.
const END_TOKENS: [&str; 5] =
    ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"];

/// Returns the configuration of the model in `file`, and warnings about metadata that is ignored.
pub(super) fn model_config(file: &GgufFile) -> Result<(ModelConfig, Vec<String>)> {
    let name = file
        .get("general.architecture")
        .and_then(GgufValue::as_str)
        .ok_or_else(|| Error::bad_file(file.path(), "metadata general.architecture is missing"))?;
    let Some(architecture) = Architecture::from_model_type(name) else {
        let path = file.path().to_owned();
        let name = name.to_owned();
        return Err(Error::UnknownArchitecture { path, name, known: KNOWN });
    };
    let metadata = Metadata { file, prefix: name };
    let mut warnings = Vec::new();
    let config = metadata.config(architecture, &mut warnings);
    let config = config.and_then(|config| config.check().map(|()| config));
    let config = config.map_err(|reason| Error::bad_file(file.path(), reason))?;
    Ok((config, warnings))
}

/// The metadata of one architecture.
struct Metadata<'a> {
    file: &'a GgufFile,
    /// Name of the architecture, the prefix of its keys.
    prefix: &'a str,
}

impl Metadata<'_> {
    fn get(&self, key: &str) -> Option<&GgufValue> {
        self.file.get(&format!("{}.{key}", self.prefix))
    }

    fn invalid(&self, key: &str, expected: &str) -> String {
        let prefix = self.prefix;
        match self.get(key) {
            None => format!("metadata {prefix}.{key} is missing"),
            Some(value) => {
                format!("metadata {prefix}.{key} is {}, expected {expected}", value.shown())
            }
        }
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().and_then(|value| usize::try_from(value).ok());
        size.map(Some).ok_or_else(|| self.invalid(key, "an integer"))
    }

    fn size(&self, key: &str) -> Result<usize, String> {
        self.optional_size(key)?.ok_or_else(|| self.invalid(key, "an integer"))
    }

    /// Returns a number that is positive and finite.
    fn positive(&self, key: &str) -> Result<Option<f64>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(value) if value.is_finite() && value > 0.0 => Ok(Some(value)),
            _ => Err(self.invalid(key, "a positive number")),
        }
    }

    fn config(
        &self,
        architecture: Architecture,
        warnings: &mut Vec<String>,
    ) -> Result<ModelConfig, String> {
        if let Some(parts) = self.file.get("split.count").and_then(GgufValue::as_u64)
            && parts > 1
        {
            return Err(format!(
                "the file is one of {parts} parts of a model; merge them with llama-gguf-split \
                 --merge"
            ));
        }
        if self.optional_size("expert_count")?.is_some_and(|count| count > 0) {
            return Err("mixture-of-experts models are not supported".to_owned());
        }
        if self.get("attention.causal").is_some_and(|causal| causal.as_bool() != Some(true)) {
            return Err(self.invalid("attention.causal", "true"));
        }
        let heads = self.size("attention.head_count")?;
        let hidden_size = self.size("embedding_length")?;
        let head_dim = match self.optional_size("attention.key_length")? {
            Some(width) => width,
            None if heads > 0 && hidden_size.is_multiple_of(heads) => hidden_size / heads,
            None => {
                return Err(format!(
                    "metadata {0}.embedding_length is {hidden_size}, expected a multiple of \
                     {0}.attention.head_count, which is {heads}",
                    self.prefix
                ));
            }
        };
        for key in ["attention.value_length", "rope.dimension_count"] {
            if self.optional_size(key)?.is_some_and(|width| width != head_dim) {
                return Err(self.invalid(key, &format!("the head dimension {head_dim}")));
            }
        }
        let max_positions = self.size("context_length")?;
        let embedding = self.file.tensor(GGUF_EMBEDDING).map_err(|error| match error {
            Error::BadFile { reason, .. } => reason,
            _ => format!("tensor {GGUF_EMBEDDING} is missing"),
        })?;
        let vocab_size = embedding.shape().first().copied().unwrap_or(0);
        let has = |name: &str| gguf_tensor_name(name).is_some_and(|name| self.file.contains(&name));
        #[expect(clippy::cast_possible_truncation, reason = "activations are f32")]
        let norm_eps = self
            .positive("attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| self.invalid("attention.layer_norm_rms_epsilon", "a number"))?
            as f32;
        Ok(ModelConfig {
            architecture,
            vocab_size,
            hidden_size,
            intermediate_size: self.size("feed_forward_length")?,
            layers: self.size("block_count")?,
            heads,
            kv_heads: self.optional_size("attention.head_count_kv")?.unwrap_or(heads),
            head_dim,
            norm_eps,
            rope: self.rope(head_dim, max_positions)?,
            max_positions,
            tied: !has(UNEMBEDDING),
            qk_norm: architecture == Architecture::Qwen3,
            qkv_bias: architecture == Architecture::Qwen2
                || has("model.layers.0.self_attn.q_proj.bias"),
            o_bias: has("model.layers.0.self_attn.o_proj.bias"),
            mlp_bias: has("model.layers.0.mlp.gate_proj.bias"),
            eos: self.end_tokens(vocab_size, warnings)?,
            bos: self.token_id("bos", vocab_size, warnings)?,
        })
    }

    /// Returns the token that `tokenizer.ggml.NAME_token_id` names. Ignores a token that the model
    /// does not have, with a warning.
    fn token_id(
        &self,
        name: &str,
        vocab_size: usize,
        warnings: &mut Vec<String>,
    ) -> Result<Option<u32>, String> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(value) = self.file.get(&key) else { return Ok(None) };
        match value.as_u64() {
            Some(id) if id < vocab_size as u64 => Ok(u32::try_from(id).ok()),
            Some(id) => {
                warnings.push(format!(
                    "{} has the {key} {id}, but the model has {vocab_size} tokens; it is ignored",
                    self.file.path().display()
                ));
                Ok(None)
            }
            // Negative ids stand for no token, as in `config.json`.
            None if value.is_integer() => Ok(None),
            None => Err(format!("metadata {key} is {}, expected a token id", value.shown())),
        }
    }

    fn end_tokens(
        &self,
        vocab_size: usize,
        warnings: &mut Vec<String>,
    ) -> Result<Vec<u32>, String> {
        let mut ids = Vec::new();
        for name in ["eos", "eot", "eom"] {
            ids.extend(self.token_id(name, vocab_size, warnings)?);
        }
        let types = match self.file.get("tokenizer.ggml.token_type") {
            Some(GgufValue::Array(GgufArray::I32(types))) => types.as_slice(),
            _ => &[],
        };
        let texts = self.file.get("tokenizer.ggml.tokens").and_then(GgufValue::as_strings);
        let tokens = texts.unwrap_or_default().iter().zip(types).zip(0_u32..).take(vocab_size);
        for ((text, kind), id) in tokens {
            if *kind == token_type::CONTROL && END_TOKENS.contains(&text.as_str()) {
                ids.push(id);
            }
        }
        let mut unique = Vec::new();
        for id in ids {
            if !unique.contains(&id) {
                unique.push(id);
            }
        }
        Ok(unique)
    }

    fn rope(&self, head_dim: usize, max_positions: usize) -> Result<Rope, String> {
        let theta = self.positive("rope.freq_base")?.unwrap_or(10_000.0);
        if theta <= 1.0 {
            return Err(self.invalid("rope.freq_base", "more than 1"));
        }
        let factor = match self.positive("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.positive("rope.scale_linear")?,
        };
        let kind = match self.get("rope.scaling.type") {
            None if factor.is_some_and(|factor| factor != 1.0) => "linear",
            None => "none",
            Some(kind) => kind.as_str().ok_or_else(|| self.invalid("rope.scaling.type", "text"))?,
        };
        if kind != "yarn" && self.positive("rope.scaling.attn_factor")?.unwrap_or(1.0) != 1.0 {
            return Err(self.invalid("rope.scaling.attn_factor", "1 without yarn scaling"));
        }
        if self.file.contains(ROPE_FACTORS) {
            let scales = factor.is_some_and(|factor| factor != 1.0);
            if kind == "yarn" || (kind == "linear" && scales) {
                return Err(format!(
                    "tensor {ROPE_FACTORS} and {kind} scaling of positions cannot be combined"
                ));
            }
            let factors = self.rope_factors(head_dim)?;
            return Ok(Rope { theta, scaling: RopeScaling::Factors(factors) });
        }
        let factor = || factor.ok_or_else(|| self.invalid("rope.scaling.factor", "a number"));
        let scaling = match kind {
            "none" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: factor()? },
            "yarn" => {
                let factor = factor()?;
                let length = self.optional_size("rope.scaling.original_context_length")?;
                let magnitude = self.positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
                RopeScaling::Yarn {
                    factor,
                    beta_fast: self.positive("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: self.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                    original: length.unwrap_or(max_positions) as f64,
                    attention_factor: magnitude * (0.1 * factor.max(1.0).ln() + 1.0),
                    truncate: true,
                }
            }
            _ => return Err(self.invalid("rope.scaling.type", "none, linear or yarn")),
        };
        Ok(Rope { theta, scaling })
    }

    /// Reads the factors of the rotary frequencies, one per pair of dimensions.
    fn rope_factors(&self, head_dim: usize) -> Result<Vec<f64>, String> {
        let factors = self
            .file
            .tensor(ROPE_FACTORS)
            .and_then(|tensor| tensor.with_shape(&[head_dim / 2])?.to_f32())
            .map_err(|error| match error {
                Error::BadFile { reason, .. } => reason,
                other => other.to_string(),
            })?;
        if factors.iter().all(|factor| factor.is_finite() && *factor > 0.0) {
            Ok(factors.into_iter().map(f64::from).collect())
        } else {
            Err(format!("tensor {ROPE_FACTORS} has a factor that is not positive and finite"))
        }
    }
}
