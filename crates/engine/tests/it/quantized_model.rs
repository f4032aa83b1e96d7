//! [`QuantizedModel`]: a random model as a GGUF file and as a folder.

use std::path::{Path, PathBuf};

use serde_json::json;
use tinkex_engine::Quantization;
use tinkex_weights::{
    Architecture, BlockFormat, DType, GgufWriter, ModelConfig, NamedTensor, TensorFile,
    TensorSlice, gguf_tensor_name, write_tensors,
};

/// Formats of the matrices of a file, in turn. Stacked matrices have different formats.
const FORMATS: [DType; 7] = [
    DType::Block(BlockFormat::Q4K),
    DType::Block(BlockFormat::Q6K),
    DType::Block(BlockFormat::Q8_0),
    DType::Block(BlockFormat::Q4_0),
    DType::F16,
    DType::Bf16,
    DType::F32,
];

/// A random model: a GGUF file in mixed formats, and a folder with the dequantized weights.
pub(crate) struct QuantizedModel {
    pub(crate) folder: tempfile::TempDir,
}

impl QuantizedModel {
    pub(crate) fn new(architecture: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let class = match architecture {
            "llama" => "LlamaForCausalLM",
            "qwen2" => "Qwen2ForCausalLM",
            _ => "Qwen3ForCausalLM",
        };
        let config = json!({
            "architectures": [class], "vocab_size": 100, "hidden_size": 256,
            "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 256, "tie_word_embeddings": architecture == "qwen3",
            "rope_theta": 10000.0,
        });
        let text = config.to_string();
        std::fs::write(folder.path().join("config.json"), &text).unwrap();
        let config = ModelConfig::parse(text.as_bytes(), "config.json").unwrap();
        let mut rng = fastrand::Rng::with_seed(14);
        let mut writer = GgufWriter::new();
        metadata(&mut writer, architecture, &config);
        let mut stored: Vec<Vec<u8>> = Vec::new();
        let mut decoded: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
        for (i, (name, shape)) in config.tensors().enumerate() {
            let count = shape.iter().product();
            let mut values: Vec<f32> = (0..count).map(|_| rng.f32() - 0.5).collect();
            let dtype = if shape.len() == 2 { FORMATS[i % FORMATS.len()] } else { DType::F32 };
            for value in &mut values {
                *value = if shape.len() == 2 { *value * 0.2 } else { 1.0 + *value * 0.2 };
            }
            let bytes = encode(dtype, &values);
            decode(dtype, &bytes, &mut values);
            if config.architecture == Architecture::Llama
                && (name.contains("q_proj") || name.contains("k_proj"))
            {
                values = uninterleave(&values, shape[1], config.head_dim);
            }
            writer.tensor(&gguf_tensor_name(&name).unwrap(), dtype, &shape).unwrap();
            stored.push(bytes);
            decoded.push((name, shape, values));
        }
        let file = folder.path().join("model.gguf");
        writer.write(file, |i, out| Ok(out.write_all(&stored[i])?)).unwrap();
        write_folder(folder.path(), &decoded);
        Self { folder }
    }

    /// Replaces the matrices in the folder by what they are after a quantization.
    pub(crate) fn dequantize(&self, quantization: Quantization) {
        self.change(|name, shape, values| {
            let format = match (quantization, name) {
                (Quantization::Q8, _) => BlockFormat::Q8_0,
                (_, "model.embed_tokens.weight" | "lm_head.weight") => BlockFormat::Q6K,
                _ => BlockFormat::Q4K,
            };
            if shape.len() == 2 {
                let bytes = encode(DType::Block(format), values);
                format.decode(&bytes, values);
            }
        });
    }

    /// Changes the tensors in the folder: `change` gets the name, shape and values of each.
    pub(crate) fn change(&self, change: impl Fn(&str, &[usize], &mut [f32])) {
        let path = self.folder.path().join("model.safetensors");
        let file = TensorFile::open(&path).unwrap();
        let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
        for tensor in file.tensors() {
            let mut values = tensor.to_f32().unwrap();
            change(tensor.name(), tensor.shape(), &mut values);
            tensors.push((tensor.name().to_owned(), tensor.shape().to_owned(), values));
        }
        write_folder(self.folder.path(), &tensors);
    }

    pub(crate) fn gguf(&self) -> PathBuf {
        self.folder.path().join("model.gguf")
    }
}

/// Writes tensors, given by name, shape and values, to the file of a model folder.
fn write_folder(folder: &Path, tensors: &[(String, Vec<usize>, Vec<f32>)]) {
    let tensors: Vec<NamedTensor<'_>> = tensors
        .iter()
        .map(|(name, shape, values)| NamedTensor { name, shape, values: TensorSlice::F32(values) })
        .collect();
    write_tensors(folder.join("model.safetensors"), &tensors, &[]).unwrap();
}

fn metadata(writer: &mut GgufWriter, architecture: &str, config: &ModelConfig) {
    writer.metadata("general.architecture", architecture);
    for (key, value) in [
        ("block_count", config.layers),
        ("context_length", config.max_positions),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
    ] {
        writer.metadata(format!("{architecture}.{key}"), u32::try_from(value).unwrap());
    }
    writer.metadata(format!("{architecture}.attention.layer_norm_rms_epsilon"), config.norm_eps);
    writer.metadata(format!("{architecture}.rope.freq_base"), 10_000.0_f32);
}

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; dtype.byte_len(values.len()).unwrap()];
    match dtype {
        DType::Block(format) => format.encode(values, &mut bytes),
        DType::F16 => {
            for (to, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                *to = half::f16::from_f32(*value).to_le_bytes();
            }
        }
        DType::Bf16 => {
            for (to, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                *to = half::bf16::from_f32(*value).to_le_bytes();
            }
        }
        _ => {
            for (to, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                *to = value.to_le_bytes();
            }
        }
    }
    bytes
}

fn decode(dtype: DType, bytes: &[u8], values: &mut [f32]) {
    match dtype {
        DType::Block(format) => format.decode(bytes, values),
        DType::F16 => {
            for (value, from) in values.iter_mut().zip(bytes.as_chunks().0) {
                *value = half::f16::from_le_bytes(*from).to_f32();
            }
        }
        DType::Bf16 => {
            for (value, from) in values.iter_mut().zip(bytes.as_chunks().0) {
                *value = half::bf16::from_le_bytes(*from).to_f32();
            }
        }
        _ => {}
    }
}

/// Restores the order of the rows that files of the llama architecture change.
fn uninterleave(values: &[f32], cols: usize, head_dim: usize) -> Vec<f32> {
    let rows: Vec<&[f32]> = values.chunks(cols).collect();
    rows.chunks(head_dim)
        .flat_map(|head| head.iter().step_by(2).chain(head.iter().skip(1).step_by(2)))
        .flat_map(|row| row.iter().copied())
        .collect()
}
