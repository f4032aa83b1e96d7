//! Extreme and invalid inputs: the result is correct, or a typed error that leaves the adapter
//! unchanged.

use std::fs;
use std::path::Path;

use tinkex_engine::loss::{Loss, LossInputs};
use tinkex_engine::optim::{AdamParams, OptimizerKind, StepParams};
use tinkex_engine::sample::SampleRequest;
use tinkex_engine::train::{Datum, TrainingObjective, TrainingOutput};
use tinkex_engine::{Engine, EngineOptions, Error, ErrorKind, LoraConfig, Trainer};
use tinkex_weights::DType;

use crate::golden::{MODELS, copy_of, folder};

const CROSS_ENTROPY: TrainingObjective<'static> = TrainingObjective::Loss(Loss::CrossEntropy);

fn engine(memory: usize) -> Engine {
    let options = EngineOptions { training_memory: memory, ..EngineOptions::default() };
    Engine::open(folder("qwen3"), options).unwrap()
}

fn trainer(engine: &Engine) -> Trainer {
    engine.load_trainer(folder("qwen3").join("adapter"), OptimizerKind::Adam).unwrap()
}

/// Returns `len + 1` tokens, so that a datum of them has `len` positions.
fn row(len: usize, salt: usize) -> Vec<u32> {
    (0..=len).map(|i| u32::try_from((i * i + i * 31 + salt * 17) % 113).unwrap()).collect()
}

fn datum(row: &[u32]) -> Datum<'_> {
    Datum { tokens: &row[..row.len() - 1], targets: &row[1..], ..Datum::default() }
}

fn step(learning_rate: f64) -> StepParams {
    StepParams::Adam(AdamParams { learning_rate, ..AdamParams::default() })
}

/// Returns the saved adapter and optimizer state as bytes.
fn state(trainer: &Trainer) -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter");
    trainer.save_with_optimizer(&path).unwrap();
    ["adapter_model.safetensors", "optimizer.safetensors"]
        .map(|file| fs::read(path.join(file)).unwrap())
        .to_vec()
}

/// 500 sequences of different lengths, many with a common prefix, in one pass and in many
/// micro-batches.
#[test]
fn the_memory_limit_does_not_change_a_bit() {
    let rows: Vec<Vec<u32>> = (0..500)
        .map(|i| {
            if i % 5 == 0 {
                row(1 + i % 40, i)
            } else {
                [row(20 + i % 3, 7), row(1 + (i * 13) % 29, i)].concat()
            }
        })
        .collect();
    let data: Vec<Datum<'_>> = rows.iter().map(|row| datum(row)).collect();
    let run = |memory: usize| -> (TrainingOutput, Vec<Vec<u8>>) {
        let mut trainer = trainer(&engine(memory));
        let out = trainer.forward_backward(&CROSS_ENTROPY, &data).unwrap();
        assert_eq!(trainer.forward(&CROSS_ENTROPY, &data).unwrap(), out);
        trainer.optim_step(&step(1e-3)).unwrap();
        (out, state(&trainer))
    };
    let whole = run(usize::MAX);
    for memory in [0, 3 << 20] {
        assert!(whole == run(memory), "with {memory} bytes");
    }
}

#[test]
fn a_single_token_and_the_maximum_context_are_accepted() {
    let mut trainer = trainer(&engine(1 << 30));
    for len in [1, 256] {
        let out = trainer.forward_backward(&CROSS_ENTROPY, &[datum(&row(len, 1))]).unwrap();
        assert_eq!(out.logprobs[0].len(), len);
    }
    let report = trainer.optim_step(&step(1e-3)).unwrap();
    assert!(report.grad_norm > 0.0);
}

#[test]
fn zero_weights_give_a_zero_gradient() {
    let mut trainer = trainer(&engine(1 << 30));
    let rows = row(20, 3);
    let zeros = [0.0; 20];
    let inputs = LossInputs { weights: Some(&zeros), ..LossInputs::default() };
    let out =
        trainer.forward_backward(&CROSS_ENTROPY, &[Datum { inputs, ..datum(&rows) }]).unwrap();
    assert_eq!(out.metrics[0], ("loss:sum".to_owned(), 0.0));
    assert!(out.logprobs[0].iter().all(|p| p.is_finite() && *p < 0.0));
    let before: Vec<f32> = trainer.tensors().flat_map(|(_, a, b)| [a, b].concat()).collect();
    assert_eq!(trainer.optim_step(&step(0.5)).unwrap().grad_norm, 0.0);
    let after: Vec<f32> = trainer.tensors().flat_map(|(_, a, b)| [a, b].concat()).collect();
    assert_eq!(before, after);
}

#[test]
fn a_failed_batch_or_step_changes_nothing() {
    // With no memory every datum is a micro-batch of its own: the first has already been computed
    // when the second fails.
    let mut trainer = trainer(&engine(0));
    let good = row(12, 0);
    let other = row(12, 5);
    trainer.forward_backward(&CROSS_ENTROPY, &[datum(&good)]).unwrap();
    trainer.optim_step(&step(1e-3)).unwrap();
    trainer.forward_backward(&CROSS_ENTROPY, &[datum(&good)]).unwrap();
    let before = state(&trainer);

    let q = [-1.0; 12];
    let far = [-1000.0; 12];
    let a = [1.0; 12];
    let with = |row, logprobs, advantages| Datum {
        inputs: LossInputs { logprobs, advantages, ..LossInputs::default() },
        ..datum(row)
    };
    let objective = TrainingObjective::Loss(Loss::ImportanceSampling);
    for (logprobs, kind) in [
        (&far[..], ErrorKind::Numeric),
        (&[f32::INFINITY; 12], ErrorKind::Input),
        (&[f32::NAN; 12], ErrorKind::Input),
        (&q[..4], ErrorKind::Input),
    ] {
        let data = [with(&good, Some(&q), Some(&a)), with(&other, Some(logprobs), Some(&a))];
        let error = trainer.forward_backward(&objective, &data).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(matches!(error, Error::Datum { index: 1, .. }), "{error}");
    }
    for rate in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
        trainer.optim_step(&step(rate)).unwrap_err();
    }
    assert!(before == state(&trainer));
    // The gradient of the one successful batch is still accumulated, once.
    let norm = trainer.optim_step(&step(1e-3)).unwrap().grad_norm;
    let mut reference = self::trainer(&engine(0));
    for _ in 0..2 {
        reference.forward_backward(&CROSS_ENTROPY, &[datum(&good)]).unwrap();
        assert!(reference.optim_step(&step(1e-3)).unwrap().grad_norm > 0.0);
    }
    let last = state(&trainer);
    assert!(norm > 0.0 && last == state(&reference));
}

fn open(path: &Path) -> Result<Engine, Error> {
    Engine::open(path, EngineOptions::default())
}

#[test]
fn a_truncated_model_is_refused_at_every_length() {
    let copy = copy_of("qwen3");
    let path = copy.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    for keep in [0, 7, 8, 100, 4000, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..keep]).unwrap();
        let error = open(copy.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::File, "{keep} bytes: {error}");
    }
    fs::write(&path, &whole).unwrap();
    open(copy.path()).unwrap();
}

/// The dimensions do not match the files, and no memory is allocated for them.
#[test]
fn a_configuration_with_huge_dimensions_is_refused() {
    for (field, value) in [
        ("hidden_size", 1_u64 << 24),
        ("vocab_size", 1 << 24),
        ("intermediate_size", 1 << 24),
        ("num_hidden_layers", 1 << 24),
        ("num_hidden_layers", u64::MAX),
        ("head_dim", 1 << 24),
        ("num_attention_heads", 1 << 24),
    ] {
        let copy = copy_of("qwen3");
        let path = copy.path().join("config.json");
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[field] = value.into();
        fs::write(&path, config.to_string()).unwrap();
        let error = open(copy.path()).unwrap_err();
        let typed = matches!(error.kind(), ErrorKind::File | ErrorKind::Input);
        assert!(typed, "{field}: {error}");
    }
}

#[test]
fn a_huge_context_is_refused_when_a_request_needs_it() {
    let copy = copy_of("qwen3");
    let path = copy.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = (1_u64 << 24).into();
    fs::write(&path, config.to_string()).unwrap();
    let engine = open(copy.path()).unwrap();
    let mut sampler = engine.sampler().unwrap();
    let mut request = SampleRequest::new(vec![1, 2, 3], 1);
    request.max_tokens = Some((1 << 24) - 3);
    let error = sampler.add(&engine.base_weights(), request.clone()).unwrap_err();
    assert!(matches!(error, Error::Memory { .. }), "{error}");
    request.max_tokens = None;
    let limited = sampler.add(&engine.base_weights(), request.clone()).unwrap();
    assert!(sampler.cancel(limited).is_some());
    request.max_tokens = Some(1);
    request.samples = usize::MAX;
    let error = sampler.add(&engine.base_weights(), request).unwrap_err();
    assert!(error.to_string().contains("num_samples"), "{error}");
    assert!(sampler.is_idle());
}

#[test]
fn a_cache_larger_than_memory_is_an_error() {
    let options = EngineOptions { cache_memory: 1 << 60, ..EngineOptions::default() };
    let error = Engine::open(folder("qwen3"), options).unwrap().sampler().unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::System);
}

/// Replaces the first `count` elements of a tensor of a model with one f32 file.
fn overwrite(model: &Path, name: &str, count: usize, value: f32) {
    let path = model.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let file = tinkex_weights::TensorFile::open(&path).unwrap();
    assert_eq!(file.tensor(name).unwrap().dtype(), DType::F32);
    let values = file.tensor(name).unwrap().bytes().unwrap();
    drop(file);
    let at = bytes.windows(values.len()).position(|window| window == values).unwrap();
    bytes[at..at + 4 * count].copy_from_slice(&value.to_le_bytes().repeat(count));
    fs::write(&path, bytes).unwrap();
}

#[test]
fn base_weights_that_are_not_finite_are_refused_with_the_name_of_the_tensor() {
    for name in [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.norm.weight",
    ] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let copy = copy_of("qwen3");
            overwrite(copy.path(), name, 1, value);
            let error = open(copy.path()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::File, "{error}");
            let want = format!(
                "model.safetensors: tensor {name} is {value} at index 0, expected finite weights"
            );
            assert!(error.to_string().ends_with(&want), "{error}");
        }
    }
}

#[test]
fn base_weights_that_are_too_large_are_a_numeric_error() {
    let copy = copy_of("qwen3");
    overwrite(copy.path(), "model.norm.weight", 36, f32::MAX);
    let engine = open(copy.path()).unwrap();
    let lora = LoraConfig { rank: 4, ..LoraConfig::default() };
    let mut trainer = engine.create_trainer(lora, OptimizerKind::Adam).unwrap();
    let before = state(&trainer);
    let error = trainer.forward_backward(&CROSS_ENTROPY, &[datum(&row(9, 1))]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Numeric, "{error}");
    assert!(before == state(&trainer));
    let mut sampler = engine.sampler().unwrap();
    sampler.add(&engine.base_weights(), SampleRequest::new(row(5, 1), 4)).unwrap();
    let outputs = sampler.step();
    let error = outputs[0].1.as_ref().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Numeric);
    assert!(
        error.to_string().ends_with("the weights of the base model are too large; check its files")
    );
    sampler.add(&engine.snapshot(&trainer), SampleRequest::new(row(5, 1), 4)).unwrap();
    let error = sampler.step().remove(0).1.unwrap_err().to_string();
    assert!(error.ends_with("the weights are too large; load an earlier checkpoint"), "{error}");
    assert!(sampler.is_idle());
}

/// The untied model determines the log-probabilities, as in `transformers`.
#[test]
fn a_tied_configuration_with_an_unembedding_of_its_own_uses_both() {
    let copy = copy_of("llama");
    let path = copy.path().join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    let tied = text.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    assert_ne!(tied, text);
    fs::write(&path, tied).unwrap();
    let engine = open(copy.path()).unwrap();
    assert!(!engine.config().tied);
    assert!(engine.warnings()[0].contains("lm_head.weight differs"), "{:?}", engine.warnings());
    let row = row(30, 1);
    let lora = LoraConfig { rank: 4, ..LoraConfig::default() };
    let logprobs = |engine: &Engine| {
        let trainer = engine.create_trainer(lora.clone(), OptimizerKind::Adam).unwrap();
        trainer.forward(&CROSS_ENTROPY, &[datum(&row)]).unwrap().logprobs
    };
    let untied = open(&folder("llama")).unwrap();
    assert!(untied.warnings().is_empty());
    assert_eq!(logprobs(&engine), logprobs(&untied));
}

#[test]
fn recorded_models_open() {
    for name in MODELS {
        let options = EngineOptions { threads: 1, ..EngineOptions::default() };
        let engine = Engine::open(folder(name), options).unwrap();
        let config = engine.config();
        assert_eq!((config.layers, config.heads, config.kv_heads), (2, 4, 2));
        assert_eq!(config.eos, [2]);
        let matrices = config.tensors().filter(|(_, shape)| shape.len() == 2);
        let least = matrices.map(|(_, shape)| 4 * shape.iter().product::<usize>()).sum::<usize>();
        assert!(engine.weight_bytes() >= least, "{name}");
    }
}
