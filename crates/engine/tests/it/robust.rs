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
    let (good, other) = (row(12, 0), row(12, 5));
    trainer.forward_backward(&CROSS_ENTROPY, &[datum(&good)]).unwrap();
    trainer.optim_step(&step(1e-3)).unwrap();
    trainer.forward_backward(&CROSS_ENTROPY, &[datum(&good)]).unwrap();
    let before = state(&trainer);

    let (q, far, a) = ([-1.0; 12], [-1000.0; 12], [1.0; 12]);
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
    request.max_tokens = None;
    let error = sampler.add(&engine.base_weights(), request.clone()).unwrap_err();
    assert!(matches!(error, Error::Memory { .. }), "{error}");
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

#[test]
fn a_base_model_with_nan_weights_is_a_numeric_error() {
    let copy = copy_of("qwen3");
    let path = copy.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let file = tinkex_weights::TensorFile::open(&path).unwrap();
    assert_eq!(file.tensor("model.norm.weight").unwrap().dtype(), DType::F32);
    let norm = file.tensor("model.norm.weight").unwrap().bytes().unwrap();
    drop(file);
    let at = bytes.windows(norm.len()).position(|window| window == norm).unwrap();
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, bytes).unwrap();
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
    assert_eq!(outputs[0].1.as_ref().unwrap_err().kind(), ErrorKind::Numeric);
    assert!(sampler.is_idle());
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
