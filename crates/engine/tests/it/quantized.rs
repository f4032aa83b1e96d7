//! Quantized base models: GGUF files, and quantization while loading.

use std::path::{Path, PathBuf};

use tinkex_engine::loss::Loss;
use tinkex_engine::optim::{AdamParams, OptimizerKind, StepParams};
use tinkex_engine::sample::SampleRequest;
use tinkex_engine::train::{Datum, TrainingObjective};
use tinkex_engine::{Engine, EngineOptions, LoraConfig, Precision, Quantization, Trainer};
use tinkex_weights::TensorFile;

use crate::quantized_model::QuantizedModel;

const CROSS_ENTROPY: TrainingObjective<'static> = TrainingObjective::Loss(Loss::CrossEntropy);

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

/// Compares the gradients of a quantized model with the gradients of its dequantized weights.
fn assert_equal_gradients(what: &str, quantized: &Engine, plain: &Engine) {
    let folder = tempfile::tempdir().unwrap();
    let adapter = folder.path().join("adapter");
    trainer(quantized).save(&adapter).unwrap();
    let got = gradients(quantized, &adapter);
    let want = gradients(plain, &adapter);
    let mut compared = 0;
    for expected in want.tensors().filter(|tensor| tensor.name().contains("lora")) {
        let found = got.tensor(expected.name()).unwrap().to_f32().unwrap();
        let expected_values = expected.to_f32().unwrap();
        let norm = |values: &mut dyn Iterator<Item = f32>| {
            values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
        };
        let size = norm(&mut expected_values.iter().copied());
        let error = norm(&mut expected_values.iter().zip(&found).map(|(a, b)| a - b));
        assert!(error <= 1e-4 * size, "{what} {}: {error} of {size}", expected.name());
        compared += usize::from(size > 0.0);
    }
    assert!(compared > 20, "{what}: {compared} gradients");
}

#[test]
fn gradients_are_those_of_the_dequantized_weights() {
    for architecture in ["llama", "qwen2", "qwen3"] {
        let models = QuantizedModel::new(architecture);
        let quantized = Engine::open(models.gguf(), EngineOptions::default()).unwrap();
        let plain = Engine::open(models.folder.path(), EngineOptions::default()).unwrap();
        assert!(quantized.weight_bytes() < plain.weight_bytes() / 2);
        assert_equal_gradients(architecture, &quantized, &plain);
    }
}

#[test]
fn gradients_of_a_folder_that_is_quantized_are_those_of_the_dequantized_weights() {
    for (architecture, quantization) in [
        ("llama", Quantization::Q4),
        ("qwen2", Quantization::Q8),
        ("qwen3", Quantization::Q8),
        ("qwen3", Quantization::Q4),
    ] {
        let models = QuantizedModel::new(architecture);
        let options =
            EngineOptions { quantization: Some(quantization), ..EngineOptions::default() };
        let quantized = Engine::open(models.folder.path(), options).unwrap();
        models.dequantize(quantization);
        let plain = Engine::open(models.folder.path(), EngineOptions::default()).unwrap();
        assert!(quantized.weight_bytes() < plain.weight_bytes() / 2);
        let what = format!("{architecture} {quantization:?}");
        assert_equal_gradients(&what, &quantized, &plain);
    }
}

/// Returns the ways to store the frozen weights: folder or GGUF file, and options.
fn storages(models: &QuantizedModel) -> Vec<(PathBuf, EngineOptions)> {
    let folder = models.folder.path().to_owned();
    let plain = EngineOptions::default();
    vec![
        (folder.clone(), EngineOptions { precision: Precision::Bf16, ..plain.clone() }),
        (folder.clone(), EngineOptions { quantization: Some(Quantization::Q8), ..plain.clone() }),
        (folder, EngineOptions { quantization: Some(Quantization::Q4), ..plain.clone() }),
        (models.gguf(), plain),
    ]
}

#[test]
fn training_does_not_depend_on_the_batch_or_on_threads() {
    let models = QuantizedModel::new("qwen3");
    let rows: Vec<Vec<u32>> = (0_u32..24)
        .map(|i| (0..3 + i * 7 % 29).map(|at| (at * at + 31 * at + 5 * (i % 6)) % 100).collect())
        .collect();
    let all: Vec<Datum<'_>> = rows.iter().map(|row| datum(row)).collect();
    for (path, options) in storages(&models) {
        let run = |threads: usize| {
            let options = EngineOptions { threads, ..options.clone() };
            let mut trainer = trainer(&Engine::open(&path, options.clone()).unwrap());
            let together = trainer.forward(&CROSS_ENTROPY, &all).unwrap().logprobs;
            for i in (0..all.len()).step_by(5) {
                let alone = trainer.forward(&CROSS_ENTROPY, &all[i..=i]).unwrap().logprobs;
                assert_eq!(alone[0], together[i], "row {i}, {options:?}");
            }
            trainer.forward_backward(&CROSS_ENTROPY, &all).unwrap();
            let params = AdamParams { learning_rate: 1e-3, ..AdamParams::default() };
            let norm = trainer.optim_step(&StepParams::Adam(params)).unwrap().grad_norm;
            let weights: Vec<f32> =
                trainer.tensors().flat_map(|(_, a, b)| [a.to_vec(), b.to_vec()].concat()).collect();
            (together, norm, weights)
        };
        assert!(run(1) == run(3), "{options:?}");
    }
}

#[test]
fn samples_do_not_depend_on_the_batch_or_on_threads() {
    let models = QuantizedModel::new("llama");
    let requests = || {
        (0_u32..7).map(|i| {
            let prompt = (0..4 + 11 * (i % 3)).map(|at| (at * 31 + i / 3 * 17) % 100).collect();
            let mut request = SampleRequest::new(prompt, 12);
            request.seed = u64::from(i);
            request.samples = 1 + i as usize % 2;
            request.decoding.temperature = 0.8;
            request
        })
    };
    for (path, options) in storages(&models) {
        let open = |threads: usize| {
            let options = EngineOptions { threads, cache_memory: 16 << 20, ..options.clone() };
            Engine::open(&path, options).unwrap()
        };
        let run = |engine: &Engine, requests: &[SampleRequest]| {
            let mut sampler = engine.sampler().unwrap();
            for request in requests {
                sampler.add(&engine.base_weights(), request.clone()).unwrap();
            }
            let mut outputs = Vec::new();
            while !sampler.is_idle() {
                outputs.extend(sampler.step());
            }
            outputs.sort_by_key(|(id, _)| *id);
            outputs.into_iter().map(|(_, output)| output.unwrap().samples).collect::<Vec<_>>()
        };
        let engine = open(1);
        let alone: Vec<_> = requests().flat_map(|one| run(&engine, &[one])).collect();
        for threads in [1, 3] {
            let together = run(&open(threads), &requests().collect::<Vec<_>>());
            assert_eq!(together, alone, "{threads} threads, {options:?}");
        }
    }
}

#[test]
fn sampling_and_training_on_quantized_weights_report_the_same_bits() {
    let models = QuantizedModel::new("qwen3");
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
    let models = QuantizedModel::new("llama");
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
    let models = QuantizedModel::new("qwen3");
    let name = "model.layers.1.mlp.up_proj.weight";
    models.change(|tensor, _, values| {
        if tensor == name {
            values[1000] = 1e7;
        }
    });
    let open = |quantization| {
        let options = EngineOptions { quantization, ..EngineOptions::default() };
        Engine::open(models.folder.path(), options)
    };
    open(None).unwrap();
    let error = open(Some(Quantization::Q8)).unwrap_err().to_string();
    assert!(error.contains(name) && error.contains("too large for Q8_0"), "{error}");
}
