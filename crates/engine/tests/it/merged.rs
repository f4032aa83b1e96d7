//! A model with a merged adapter computes what base model and adapter compute together.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Value, json};
use tinkex_engine::loss::Loss;
use tinkex_engine::optim::OptimizerKind;
use tinkex_engine::train::{Datum, TrainingObjective};
use tinkex_engine::{Engine, EngineOptions, LoraConfig};
use tinkex_weights::{
    AdapterExport, ExportDType, ModelFolder, NamedTensor, TensorSlice, write_tensors,
};

use crate::golden::{MODELS, copy_of, folder};

/// Returns the log-probabilities of a few sequences, with the adapter in a folder or without one.
fn logprobs(model: &Path, adapter: Option<&Path>) -> Vec<f32> {
    let engine = Engine::open(model, EngineOptions::default()).unwrap();
    let trainer = match adapter {
        Some(adapter) => engine.load_trainer(adapter, OptimizerKind::Adam),
        // A new adapter does not change the output.
        None => engine
            .create_trainer(LoraConfig { rank: 1, ..LoraConfig::default() }, OptimizerKind::Adam),
    }
    .unwrap();
    let rows: Vec<Vec<u32>> = (1..9_u32)
        .map(|salt| (0..40).map(|i| (i * i + i * 31 + salt * 17) % 97).collect())
        .collect();
    let data: Vec<Datum<'_>> = rows
        .iter()
        .map(|row| Datum { tokens: &row[..row.len() - 1], targets: &row[1..], ..Datum::default() })
        .collect();
    let output = trainer.forward(&TrainingObjective::Loss(Loss::CrossEntropy), &data).unwrap();
    output.logprobs.concat()
}

/// Returns a copy of a recorded model without an unembedding of its own.
fn tied(name: &str) -> tempfile::TempDir {
    let copy = copy_of(name);
    let model = ModelFolder::open(copy.path()).unwrap();
    let tensors: Vec<(String, Vec<usize>, Vec<f32>)> = model
        .config()
        .tensors()
        .filter(|(name, _)| name != "lm_head.weight")
        .map(|(name, shape)| {
            let values = model.tensor(&name).unwrap().to_f32().unwrap();
            (name, shape, values)
        })
        .collect();
    let tensors: Vec<NamedTensor<'_>> = tensors
        .iter()
        .map(|(name, shape, values)| NamedTensor { name, shape, values: TensorSlice::F32(values) })
        .collect();
    write_tensors(copy.path().join("model.safetensors"), &tensors, &[("format", "pt")]).unwrap();
    let path = copy.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["tie_word_embeddings"] = json!(true);
    fs::write(&path, config.to_string()).unwrap();
    copy
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn compare(base: &Path, adapter: &Path, dtype: ExportDType, bound: f32) {
    let out = tempfile::tempdir().unwrap();
    let merged = out.path().join("merged");
    let export = AdapterExport::new(adapter, &merged).base(base).dtype(dtype).prepare().unwrap();
    export.write(|_| ControlFlow::Continue(())).unwrap();
    let expected = logprobs(base, Some(adapter));
    let difference = largest_difference(&expected, &logprobs(&merged, None));
    assert!(difference <= bound, "{}: {dtype} differs by {difference}", base.display());
    // The adapter must matter, or the comparison proves nothing.
    assert!(largest_difference(&expected, &logprobs(base, None)) > 0.1);
}

#[test]
fn merged_models_agree_with_base_model_and_adapter() {
    for name in MODELS {
        let base = folder(name);
        let adapter = folder(name).join("adapter");
        compare(&base, &adapter, ExportDType::F32, 2e-5);
        compare(&base, &adapter, ExportDType::Bf16, 0.5);
        compare(tied(name).path(), &adapter, ExportDType::F32, 2e-5);
    }
}
