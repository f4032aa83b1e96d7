//! Quantized base models: GGUF files, and quantization while loading.

use std::path::{Path, PathBuf};

use serde_json::json;
use tinkex_engine::loss::Loss;
use tinkex_engine::optim::{AdamParams, OptimizerKind, StepParams};
use tinkex_engine::sample::SampleRequest;
use tinkex_engine::train::{Datum, TrainingObjective};
use tinkex_engine::{Engine, EngineOptions, LoraConfig, Quantization, Trainer};
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

const CROSS_ENTROPY: TrainingObjective<'static> = TrainingObjective::Loss(Loss::CrossEntropy);

/// A random model: a GGUF file in mixed formats, and a folder with the dequantized weights.
struct Models {
    folder: tempfile::TempDir,
}

impl Models {
    fn new(architecture: &str) -> Self {
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
        let tensors: Vec<NamedTensor<'_>> = decoded
            .iter()
            .map(|(name, shape, values)| NamedTensor {
                name,
                shape,
                values: TensorSlice::F32(values),
            })
            .collect();
        write_tensors(folder.path().join("model.safetensors"), &tensors, &[]).unwrap();
        Self { folder }
    }

    fn gguf(&self) -> PathBuf {
        self.folder.path().join("model.gguf")
    }
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

fn tokens() -> Vec<u32> {
    (0_u32..40).map(|i| (i * i + 31 * i + 7) % 100).collect()
}

fn datum(tokens: &[u32]) -> Datum<'_> {
    Datum { tokens: &tokens[..tokens.len() - 1], targets: &tokens[1..], ..Datum::default() }
}

/// Returns a trainer whose adapter has been trained for one step, so that all its matrices have
/// gradients.
fn trainer(engine: &Engine) -> Trainer {
    let config = LoraConfig { rank: 4, ..LoraConfig::default() };
    let mut trainer = engine.create_trainer(config, OptimizerKind::Adam).unwrap();
    let tokens = tokens();
    trainer.forward_backward(&CROSS_ENTROPY, &[datum(&tokens)]).unwrap();
    let params = AdamParams { learning_rate: 1e-2, ..AdamParams::default() };
    trainer.optim_step(&StepParams::Adam(params)).unwrap();
    trainer
}

/// Returns the gradients of one batch, which a step without momentum leaves in the optimizer.
fn gradients(engine: &Engine, adapter: &Path) -> TensorFile {
    let mut trainer = engine.load_trainer(adapter, OptimizerKind::Adam).unwrap();
    let tokens = tokens();
    trainer.forward_backward(&CROSS_ENTROPY, &[datum(&tokens)]).unwrap();
    let params = AdamParams { beta1: 0.0, learning_rate: 0.0, ..AdamParams::default() };
    trainer.optim_step(&StepParams::Adam(params)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    trainer.save_with_optimizer(&folder.path().join("adapter")).unwrap();
    TensorFile::open(folder.path().join("adapter/optimizer.safetensors")).unwrap()
}

#[test]
fn gradients_are_those_of_the_dequantized_weights() {
    for architecture in ["llama", "qwen2", "qwen3"] {
        let models = Models::new(architecture);
        let quantized = Engine::open(models.gguf(), EngineOptions::default()).unwrap();
        let plain = Engine::open(models.folder.path(), EngineOptions::default()).unwrap();
        assert!(quantized.weight_bytes() < plain.weight_bytes() / 2);
        let folder = tempfile::tempdir().unwrap();
        let adapter = folder.path().join("adapter");
        trainer(&quantized).save(&adapter).unwrap();
        let (got, want) = (gradients(&quantized, &adapter), gradients(&plain, &adapter));
        let mut compared = 0;
        for expected in want.tensors().filter(|tensor| tensor.name().contains("lora")) {
            let found = got.tensor(expected.name()).unwrap().to_f32().unwrap();
            let expected_values = expected.to_f32().unwrap();
            let norm = |values: &mut dyn Iterator<Item = f32>| {
                values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
            };
            let size = norm(&mut expected_values.iter().copied());
            let error = norm(&mut expected_values.iter().zip(&found).map(|(a, b)| a - b));
            assert!(error <= 1e-4 * size, "{architecture} {}: {error} of {size}", expected.name());
            compared += usize::from(size > 0.0);
        }
        assert!(compared > 20, "{compared} gradients");
    }
}

#[test]
fn sampling_and_training_on_quantized_weights_report_the_same_bits() {
    let models = Models::new("qwen3");
    let folder = models.folder.path();
    let cases = [
        (models.gguf(), None),
        (folder.to_owned(), Some(Quantization::Q8)),
        (folder.to_owned(), Some(Quantization::Q4)),
    ];
    for (path, quantization) in cases {
        let options = EngineOptions { quantization, ..EngineOptions::default() };
        let engine = Engine::open(path, options).unwrap();
        let trainer = trainer(&engine);
        let mut sampler = engine.sampler().unwrap();
        let mut request = SampleRequest::new(tokens(), 20);
        request.decoding.temperature = 1.0;
        sampler.add(&engine.snapshot(&trainer), request).unwrap();
        let mut outputs = Vec::new();
        while !sampler.is_idle() {
            outputs.extend(sampler.step());
        }
        let output = outputs.pop().unwrap().1.unwrap();
        let sample = &output.samples[0];
        let all = [tokens(), sample.tokens.clone()].concat();
        let forward = trainer.forward(&CROSS_ENTROPY, &[datum(&all)]).unwrap();
        let start = all.len() - 1 - sample.tokens.len();
        assert_eq!(forward.logprobs[0][start..], sample.logprobs[..], "{quantization:?}");
    }
}

#[test]
fn quantization_reduces_memory_and_keeps_log_probabilities_close() {
    let models = Models::new("llama");
    let open = |quantization| {
        let options = EngineOptions { quantization, ..EngineOptions::default() };
        Engine::open(models.folder.path(), options).unwrap()
    };
    let tokens = tokens();
    let logprobs = |engine: &Engine| {
        let config = LoraConfig { rank: 1, ..LoraConfig::default() };
        let trainer = engine.create_trainer(config, OptimizerKind::Adam).unwrap();
        trainer.forward(&CROSS_ENTROPY, &[datum(&tokens)]).unwrap().logprobs[0].clone()
    };
    let plain = open(None);
    let expected = logprobs(&plain);
    for (quantization, bits, bound) in [(Quantization::Q8, 9.0, 0.1), (Quantization::Q4, 6.0, 1.0)]
    {
        let engine = open(Some(quantization));
        let ratio = engine.weight_bytes() as f64 / plain.weight_bytes() as f64;
        assert!(ratio < bits / 32.0, "{quantization:?}: {ratio}");
        for (got, want) in logprobs(&engine).iter().zip(&expected) {
            assert!((got - want).abs() < bound, "{quantization:?}: {got}, {want}");
        }
    }
}

#[test]
fn weights_that_are_too_large_to_quantize_are_refused_by_name() {
    let models = Models::new("qwen3");
    let path = models.folder.path().join("model.safetensors");
    let file = TensorFile::open(&path).unwrap();
    let name = "model.layers.1.mlp.up_proj.weight";
    let mut tensors = Vec::new();
    for tensor in file.tensors() {
        let mut values = tensor.to_f32().unwrap();
        if tensor.name() == name {
            values[1000] = 1e7;
        }
        tensors.push((tensor.name().to_owned(), tensor.shape().to_owned(), values));
    }
    let changed: Vec<NamedTensor<'_>> = tensors
        .iter()
        .map(|(name, shape, values)| NamedTensor { name, shape, values: TensorSlice::F32(values) })
        .collect();
    write_tensors(&path, &changed, &[]).unwrap();
    let open = |quantization| {
        let options = EngineOptions { quantization, ..EngineOptions::default() };
        Engine::open(models.folder.path(), options)
    };
    open(None).unwrap();
    let error = open(Some(Quantization::Q8)).unwrap_err().to_string();
    assert!(error.contains(name) && error.contains("too large for Q8_0"), "{error}");
}
