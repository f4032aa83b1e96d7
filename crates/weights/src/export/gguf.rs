//! A GGUF file with merged weights, tokenizer and chat template.

use std::path::Path;

use serde_json::Value;

use super::ExportDType;
use super::card::CardDetails;
use super::gguf_tokenizer::GgufTokenizer;
use super::output::{Count, OutputFile};
use super::plan::{MergePlan, PlannedTensor};
use super::tensor_rows::TensorRows;
use crate::config::UNEMBEDDING;
use crate::gguf::{GGUF_EMBEDDING, GGUF_UNEMBEDDING, ROPE_FACTORS, has_interleaved_heads};
use crate::json_fields::read_small;
use crate::{
    Architecture, BlockFormat, DType, Error, FillError, GgufWriter, ModelConfig, Result,
    RopeScaling, StoredAdapter, gguf_tensor_name,
};

/// `beta_fast` and `beta_slow` with which llama.cpp computes YaRN. It ignores other values in a file.
const LLAMA_CPP_YARN_BETAS: [f64; 2] = [32.0, 1.0];

/// The content of a GGUF file.
#[derive(Debug)]
pub(super) struct GgufContent {
    writer: GgufWriter,
    /// Factors of the rotary frequencies, which are the first tensor if there are any.
    rope_factors: Vec<f32>,
    /// Element type of each tensor of the plan.
    dtypes: Vec<DType>,
}

/// Returns the files of the folder: the model and a card.
pub(super) fn files(plan: &MergePlan, card: &CardDetails) -> Result<Vec<OutputFile>> {
    let content = GgufContent::new(plan, &card.name)?;
    let name = format!("{}.gguf", card.name);
    Ok(vec![OutputFile::text("README.md", card.gguf(&name)), OutputFile::gguf(name, content)])
}

/// Returns the size of the GGUF file of a plan in bytes, after checking that the file can describe
/// the model and its tokenizer. `name` is the name of the model.
pub(super) fn size(plan: &MergePlan, name: &str) -> Result<u64> {
    Ok(GgufContent::new(plan, name)?.bytes())
}

impl GgufContent {
    fn new(plan: &MergePlan, name: &str) -> Result<Self> {
        let dtype = plan.dtype().unwrap_or(ExportDType::F16);
        let config = plan.config();
        let config_path = plan.folder().join("config.json");
        let mut writer = GgufWriter::new();
        describe(&mut writer, config, name, dtype)
            .map_err(|reason| Error::bad_file(&config_path, reason))?;
        GgufTokenizer::read(plan.folder(), config)?.describe(&mut writer);
        let rope_factors = rope_factors(config);
        if !rope_factors.is_empty() {
            writer.tensor(ROPE_FACTORS, DType::F32, &[rope_factors.len()])?;
        }
        let is_tied = !plan.tensors().iter().any(|tensor| tensor.name == UNEMBEDDING);
        let mut dtypes = Vec::with_capacity(plan.tensors().len());
        for PlannedTensor { name, shape, .. } in plan.tensors() {
            let Some(gguf_name) = gguf_tensor_name(name) else {
                return Err(Error::invalid_tensor(name, "GGUF has no such tensor"));
            };
            let stored = tensor_dtype(&gguf_name, shape, dtype, config.layers, is_tied);
            writer.tensor(&gguf_name, stored, shape)?;
            dtypes.push(stored);
        }
        Ok(Self { writer, rope_factors, dtypes })
    }

    /// Returns the size of the file in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.writer.file_bytes()
    }

    /// Writes the file, atomically and durably.
    pub(super) fn write(
        &self,
        path: &Path,
        plan: &MergePlan,
        adapter: &StoredAdapter,
        count: Count<'_>,
    ) -> Result<()> {
        let mut counted = 0;
        let mut count_more = |more: u64| {
            counted += more;
            count(more)
        };
        let first = usize::from(!self.rope_factors.is_empty());
        self.writer.write(path, |i, out| {
            let Some(i) = i.checked_sub(first) else {
                for factor in &self.rope_factors {
                    out.write_all(&factor.to_le_bytes())?;
                }
                return Ok(());
            };
            let tensor = &plan.tensors()[i];
            let name = &tensor.name;
            let config = plan.config();
            let interleaved = has_interleaved_heads(name, config.architecture);
            let rows = TensorRows {
                merged: plan.open(adapter, tensor)?,
                name,
                dtype: self.dtypes[i],
                interleaved_heads: interleaved.then_some(config.head_dim),
            };
            rows.write(|bytes| {
                out.write_all(bytes)?;
                Ok::<_, FillError>(count_more(bytes.len() as u64)?)
            })
        })?;
        // Count the header and the padding, which were written too.
        count(self.bytes().saturating_sub(counted))
    }
}

/// Returns the element type of a tensor: f32 for vectors, `Q8_0` or f16 for matrices whose rows are
/// not whole blocks, and the element type of the export for all others.
fn tensor_dtype(
    name: &str,
    shape: &[usize],
    dtype: ExportDType,
    layers: usize,
    is_tied: bool,
) -> DType {
    let [_, columns] = *shape else { return DType::F32 };
    let wanted = match dtype {
        ExportDType::F32 => DType::F32,
        ExportDType::F16 => DType::F16,
        ExportDType::Bf16 => DType::Bf16,
        ExportDType::Q8_0 => DType::Block(BlockFormat::Q8_0),
        ExportDType::Q4KM if needs_more_bits(name, layers, is_tied) => {
            DType::Block(BlockFormat::Q6K)
        }
        ExportDType::Q4KM => DType::Block(BlockFormat::Q4K),
    };
    let fits = |dtype: &DType| columns.is_multiple_of(dtype.block_len());
    [wanted, DType::Block(BlockFormat::Q8_0), DType::F16].into_iter().find(fits).unwrap_or(wanted)
}

/// Returns whether Q4_K_M stores a tensor as Q6_K, as llama.cpp does: the unembedding, and values
/// and down projections of the first and last eighth of the layers and of every third layer between.
fn needs_more_bits(name: &str, layers: usize, is_tied: bool) -> bool {
    let output = if is_tied { GGUF_EMBEDDING } else { GGUF_UNEMBEDDING };
    let Some((layer, part)) = name.strip_prefix("blk.").and_then(|name| name.split_once('.'))
    else {
        return name == output;
    };
    let Ok(layer) = layer.parse::<usize>() else { return false };
    let eighth = layers / 8;
    matches!(part, "attn_v.weight" | "ffn_down.weight")
        && (layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2)
}

/// Checks that a GGUF file can describe the model, and that llama.cpp's implementation of the
/// architecture has every tensor of the model: llama.cpp refuses files with unknown tensors. Returns
/// a description of the first problem.
pub(super) fn check_architecture(config: &ModelConfig) -> Result<(), String> {
    let name = config.architecture.model_type();
    if let &RopeScaling::Yarn { truncate, beta_fast, beta_slow, .. } = &config.rope.scaling {
        if !truncate {
            return Err(
                "GGUF cannot store rope_scaling with truncate false; choose format hf".to_owned()
            );
        }
        if [beta_fast, beta_slow] != LLAMA_CPP_YARN_BETAS {
            let [fast, slow] = LLAMA_CPP_YARN_BETAS;
            return Err(format!(
                "rope_scaling has beta_fast {beta_fast} and beta_slow {beta_slow}, but llama.cpp \
                 always computes with {fast} and {slow}; choose format hf"
            ));
        }
    }
    if config.norm_eps == 0.0 {
        return Err(
            "llama.cpp cannot load a model with rms_norm_eps 0; choose format hf".to_owned()
        );
    }
    let attention_width = config.heads * config.head_dim;
    if config.architecture == Architecture::Qwen2 && attention_width != config.hidden_size {
        return Err(format!(
            "the heads have {attention_width} dimensions together, but llama.cpp's {name} models \
             need hidden_size, which is {}; choose format hf",
            config.hidden_size
        ));
    }
    if config.architecture == Architecture::Llama {
        return Ok(());
    }
    if config.o_bias || config.mlp_bias {
        return Err(format!(
            "attention_bias is true, but llama.cpp's {name} models have no such biases; choose \
             format hf"
        ));
    }
    if needs_factors(&config.rope.scaling) {
        return Err(format!(
            "llama.cpp's {name} models cannot scale rotary frequencies as rope_type llama3 does; \
             choose format hf"
        ));
    }
    Ok(())
}

/// Adds architecture and dimensions to the metadata. Returns a description of the first problem.
fn describe(
    writer: &mut GgufWriter,
    config: &ModelConfig,
    name: &str,
    dtype: ExportDType,
) -> Result<(), String> {
    let architecture = config.architecture.model_type();
    // Values of llama.cpp's `enum llama_ftype`.
    let file_type: u32 = match dtype {
        ExportDType::F32 => 0,
        ExportDType::F16 => 1,
        ExportDType::Q8_0 => 7,
        ExportDType::Q4KM => 15,
        ExportDType::Bf16 => 32,
    };
    writer
        .metadata("general.architecture", architecture)
        .metadata("general.type", "model")
        .metadata("general.name", name)
        .metadata("general.file_type", file_type)
        .metadata("general.quantization_version", 2_u32);
    for (key, value) in [
        ("vocab_size", config.vocab_size),
        ("context_length", config.max_positions),
        ("embedding_length", config.hidden_size),
        ("block_count", config.layers),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.head_dim),
    ] {
        let value = u32::try_from(value).map_err(|_| format!("{key} is too large"))?;
        writer.metadata(format!("{architecture}.{key}"), value);
    }
    writer.metadata(format!("{architecture}.attention.layer_norm_rms_epsilon"), config.norm_eps);
    let mut float = |key: &str, value: f64| {
        #[expect(clippy::cast_possible_truncation, reason = "the format has f32 numbers here")]
        writer.metadata(format!("{architecture}.{key}"), value as f32);
    };
    float("rope.freq_base", config.rope.theta);
    match &config.rope.scaling {
        RopeScaling::Linear { factor } => {
            float("rope.scaling.factor", *factor);
            writer.metadata(format!("{architecture}.rope.scaling.type"), "linear");
        }
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original,
            attention_factor,
            truncate: _,
        } => {
            float("rope.scaling.factor", *factor);
            float("rope.scaling.yarn_beta_fast", *beta_fast);
            float("rope.scaling.yarn_beta_slow", *beta_slow);
            float(
                "rope.scaling.attn_factor",
                attention_factor / (0.1 * factor.max(1.0).ln() + 1.0),
            );
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a number of tokens"
            )]
            let original = *original as u32;
            let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
            writer.metadata(key("type"), "yarn");
            writer.metadata(key("original_context_length"), original);
        }
        // `rope_factors` stores the other extensions as a tensor.
        _ => {}
    }
    Ok(())
}

/// Returns whether GGUF stores a context extension as a tensor of factors instead of metadata.
fn needs_factors(scaling: &RopeScaling) -> bool {
    matches!(scaling, RopeScaling::Llama3 { .. } | RopeScaling::Factors(_))
}

/// Returns the factors of the rotary frequencies if GGUF has no metadata for the model's context
/// extension; otherwise none.
fn rope_factors(config: &ModelConfig) -> Vec<f32> {
    if !needs_factors(&config.rope.scaling) {
        return Vec::new();
    }
    let plain = crate::Rope { theta: config.rope.theta, scaling: RopeScaling::None };
    let frequencies = |rope: &crate::Rope| rope.frequencies(config.head_dim);
    #[expect(clippy::cast_possible_truncation, reason = "the tensor has f32 elements")]
    let factor = |(plain, scaled): (f64, f64)| (plain / scaled) as f32;
    frequencies(&plain).into_iter().zip(frequencies(&config.rope)).map(factor).collect()
}

/// Reads a JSON file.
pub(super) fn read_json(path: &Path) -> Result<Value> {
    serde_json::from_slice(&read_small(path)?)
        .map_err(|error| Error::bad_file(path, format!("not JSON: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_heads_are_refused_where_llama_cpp_has_none() {
        let config = |architecture: &str, head_dim: usize| {
            let text = serde_json::json!({
                "architectures": [format!("{architecture}ForCausalLM")], "vocab_size": 8,
                "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1,
                "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": head_dim,
            });
            ModelConfig::parse(text.to_string().as_bytes(), "config.json").unwrap()
        };
        check_architecture(&config("Qwen2", 8)).unwrap();
        check_architecture(&config("Qwen3", 16)).unwrap();
        let error = check_architecture(&config("Qwen2", 16)).unwrap_err();
        assert!(error.contains("64 dimensions together, but llama.cpp's qwen2"), "{error}");
    }

    #[test]
    fn element_types_are_those_of_llama_cpp() {
        let dtype =
            |name: &str, shape: &[usize], dtype| tensor_dtype(name, shape, dtype, 16, false);
        let q4 = BlockFormat::Q4K;
        let q6 = BlockFormat::Q6K;
        let q8 = BlockFormat::Q8_0;
        for (name, shape, wanted) in [
            ("blk.3.attn_q.weight", [512, 512], DType::Block(q4)),
            ("blk.0.attn_v.weight", [512, 512], DType::Block(q6)),
            ("blk.2.attn_v.weight", [512, 512], DType::Block(q4)),
            ("blk.4.ffn_down.weight", [512, 512], DType::Block(q6)),
            ("blk.15.ffn_down.weight", [512, 512], DType::Block(q6)),
            ("output.weight", [512, 512], DType::Block(q6)),
            ("token_embd.weight", [512, 512], DType::Block(q4)),
            ("output.weight", [512, 96], DType::Block(q8)),
            ("output.weight", [512, 40], DType::F16),
        ] {
            assert_eq!(dtype(name, &shape, ExportDType::Q4KM), wanted, "{name} {shape:?}");
        }
        assert_eq!(dtype("output_norm.weight", &[512], ExportDType::Q8_0), DType::F32);
        assert_eq!(dtype("output.weight", &[8, 40], ExportDType::Bf16), DType::Bf16);
        assert!(needs_more_bits("token_embd.weight", 16, true));
    }
}
