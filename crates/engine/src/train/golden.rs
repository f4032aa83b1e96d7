//! Forward and backward passes compared with recorded results of torch.

use std::path::PathBuf;

use serde_json::Value;

use super::forward_pass::{ForwardPass, TrainingSequence};
use crate::kernel::{Kernel, Precision};
use crate::lora::Adapter;
use crate::model::{AdapterGradients, DiscardGradients, Model};
use tinkex_weights::{AdapterFile, ModelFolder, TensorFile};

/// Names of the recorded models in `tests/golden`.
pub(crate) const MODELS: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// Returns the folder of a recorded model.
pub(crate) fn folder(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "golden", name].iter().collect()
}

pub(crate) fn model(name: &str, threads: usize) -> Model {
    let folder = ModelFolder::open(folder(name)).unwrap();
    let kernel = Kernel::new(threads).unwrap();
    Model::load(folder.config(), &folder, Precision::F32, kernel).unwrap()
}

pub(crate) fn adapter(name: &str, model: &Model) -> Adapter {
    let file = AdapterFile::load(folder(name).join("adapter")).unwrap();
    Adapter::from_file(&model.config, file, 0).unwrap()
}

/// A recorded sequence; `json` contains its loss inputs and results.
pub(crate) struct GoldenDatum {
    pub(crate) input: Vec<u32>,
    pub(crate) target: Vec<u32>,
    pub(crate) json: Value,
}

impl GoldenDatum {
    #[expect(clippy::cast_possible_truncation, reason = "recorded from f32")]
    pub(crate) fn floats(&self, field: &str) -> Vec<f32> {
        self.json[field].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
    }
}

/// Reads the recorded sequences of a model.
pub(crate) fn data(name: &str) -> Vec<GoldenDatum> {
    let text = std::fs::read(folder(name).join("expected.json")).unwrap();
    let json: Value = serde_json::from_slice(&text).unwrap();
    let tokens = |json: &Value| -> Vec<u32> {
        json.as_array()
            .unwrap()
            .iter()
            .map(|x| u32::try_from(x.as_u64().unwrap()).unwrap())
            .collect()
    };
    json["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|json| GoldenDatum {
            input: tokens(&json["input"]),
            target: tokens(&json["target"]),
            json: json.clone(),
        })
        .collect()
}

pub(crate) fn sequences(data: &[GoldenDatum]) -> Vec<TrainingSequence<'_>> {
    data.iter()
        .map(|datum| TrainingSequence { tokens: &datum.input, targets: &datum.target })
        .collect()
}

/// Asserts that the norm of the difference of two tensors is less than `tolerance` times the norm
/// of the expected one.
fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f64) {
    let norm = expected.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    let squares = expected.iter().zip(found).map(|(x, y)| f64::from(x - y).powi(2));
    let error = squares.sum::<f64>().sqrt();
    assert!(error < tolerance * norm, "{what}: off by {error} of {norm}");
}

#[test]
fn log_probabilities_match_torch() {
    for name in MODELS {
        let model = model(name, 2);
        let lora = adapter(name, &model).packed(&model.config);
        let data = data(name);
        for (lora, field) in [(None, "base_logprobs"), (Some(&lora), "adapter_logprobs")] {
            let pass = ForwardPass::forward(&model, lora, &sequences(&data), None, &|| false);
            let (_, found) = pass.unwrap().unwrap();
            for (found, datum) in found.iter().zip(&data) {
                for (found, expected) in found.iter().zip(datum.floats(field)) {
                    assert!((found - expected).abs() < 2e-5, "{name} {field}: {found} {expected}");
                }
            }
        }
    }
}

#[test]
fn gradients_match_torch_with_and_without_saved_activations() {
    for name in MODELS {
        let model = model(name, 2);
        let adapter = adapter(name, &model);
        let lora = adapter.packed(&model.config);
        let data = data(name);
        let expected = TensorFile::open(folder(name).join("expected.safetensors")).unwrap();
        let mut before: Option<Vec<[Vec<f32>; 2]>> = None;
        for memory in [0, usize::MAX] {
            let never = || false;
            let sequences = sequences(&data);
            let pass = ForwardPass::forward(&model, Some(&lora), &sequences, Some(memory), &never);
            let (pass, _) = pass.unwrap().unwrap();
            let logprob_grads: Vec<Vec<f32>> = data
                .iter()
                .map(|datum| datum.floats("weights").iter().map(|w| -w).collect())
                .collect();
            let mut grads = AdapterGradients::new(&model, Some(&lora));
            assert!(pass.backward(&logprob_grads, &mut grads, &mut DiscardGradients, &never));
            let mut sums = adapter.zero_gradients();
            adapter.add_gradients(&grads, &mut sums);
            for (pair, sums) in adapter.pairs.iter().zip(&sums) {
                for (matrix, sum) in ["A", "B"].into_iter().zip(sums) {
                    let module = format!("base_model.model.{}", pair.target.name());
                    let key = format!("grad.cross_entropy.{module}.lora_{matrix}.weight");
                    let expected = expected.tensor(&key).unwrap().to_f32().unwrap();
                    assert_close(&format!("{name} {key}"), sum, &expected, 1e-4);
                }
            }
            if let Some(before) = &before {
                assert_eq!(*before, sums, "recomputing must not change a bit");
            }
            before = Some(sums);
        }
    }
}

#[test]
fn ten_steps_of_each_optimizer_match_torch() {
    use crate::loss::{Loss, LossInputs};
    use crate::optim::{AdamParams, DimuonParams, OptimizerKind, StepParams};
    use crate::train::{Datum as Example, Trainer, TrainingObjective};
    for name in MODELS {
        let model = std::sync::Arc::new(model(name, 1));
        let text = std::fs::read(folder(name).join("expected.json")).unwrap();
        let json: Value = serde_json::from_slice(&text).unwrap();
        let data = data(name);
        let weights: Vec<Vec<f32>> = data.iter().map(|datum| datum.floats("weights")).collect();
        let examples: Vec<Example<'_>> = data
            .iter()
            .zip(&weights)
            .map(|(datum, weights)| Example {
                tokens: &datum.input,
                targets: &datum.target,
                inputs: LossInputs { weights: Some(weights), ..LossInputs::default() },
                ..Example::default()
            })
            .collect();
        let expected = TensorFile::open(folder(name).join("expected.safetensors")).unwrap();
        for kind in ["adam", "dimuon"] {
            let recorded_params = &json[kind]["params"];
            let get = |key: &str| recorded_params[key].as_f64().unwrap();
            let (optimizer, params) = match kind {
                "adam" => (
                    OptimizerKind::Adam,
                    StepParams::Adam(AdamParams {
                        learning_rate: get("learning_rate"),
                        beta1: get("beta1"),
                        beta2: get("beta2"),
                        eps: get("eps"),
                        weight_decay: get("weight_decay"),
                        grad_clip_norm: get("grad_clip_norm"),
                    }),
                ),
                _ => (
                    OptimizerKind::Dimuon { rank: 4 },
                    StepParams::Dimuon(DimuonParams {
                        grad_clip_norm: get("grad_clip_norm"),
                        beta1: get("beta1"),
                        ..DimuonParams::new(get("learning_rate"))
                    }),
                ),
            };
            let adapter = adapter(name, &model);
            let mut trainer =
                Trainer::new(model.clone(), name.into(), usize::MAX, adapter, optimizer);
            for step in json[kind]["steps"].as_array().unwrap() {
                let objective = TrainingObjective::Loss(Loss::CrossEntropy);
                let out = trainer.forward_backward(&objective, &examples).unwrap();
                let loss = step["loss"].as_f64().unwrap();
                assert!(
                    (out.metrics[0].1 - loss).abs() < 1e-3 * loss.abs().max(1.0),
                    "{kind} {name}"
                );
                let report = trainer.optim_step(&params).unwrap();
                let norm = step["grad_norm"].as_f64().unwrap();
                assert!((report.grad_norm - norm).abs() < 1e-3 * norm, "{kind} {name}");
            }
            for (module, a, b) in trainer.tensors() {
                for (matrix, found) in [("A", a), ("B", b)] {
                    let key = format!("{kind}.base_model.model.{module}.lora_{matrix}.weight");
                    let expected = expected.tensor(&key).unwrap().to_f32().unwrap();
                    assert_close(&format!("{name} {key}"), found, &expected, 1e-3);
                }
            }
        }
    }
}
