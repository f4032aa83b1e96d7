//! The gradients of every loss with respect to every tensor of an adapter, compared with torch.

use serde_json::Value;
use tinkex_autodiff::{GraphInput, LossGraph, LossProgram, TensorView};
use tinkex_engine::loss::{Loss, LossInputs, UnverifiedLosses};
use tinkex_engine::optim::{AdamParams, OptimizerKind, StepParams};
use tinkex_engine::train::{Datum, TrainingObjective};
use tinkex_engine::{Engine, EngineOptions, Trainer};
use tinkex_weights::TensorFile;

use crate::fixtures::{assert_close, floats, number, numbers};
use crate::golden::{MODELS, folder};

/// One recorded sequence and the inputs of all losses.
struct RecordedDatum {
    tokens: Vec<u32>,
    target: Vec<u32>,
    /// Three targets per position.
    targets2: Vec<u32>,
    weights: Vec<f32>,
    /// Weights of `targets2`.
    weights2: Vec<f32>,
    /// Weights with which `cross_entropy` is the surrogate of a loss that the client computes.
    surrogate: Vec<f32>,
    logprobs: Vec<f32>,
    advantages: Vec<f32>,
    mask: Vec<f32>,
    shape: [usize; 1],
    shape2: [usize; 2],
}

impl RecordedDatum {
    fn new(datum: &Value) -> Self {
        let tokens = |field: &str| -> Vec<u32> {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "tokens are small whole numbers"
            )]
            numbers(&datum[field]).iter().map(|token| *token as u32).collect()
        };
        let len = tokens("input").len();
        Self {
            tokens: tokens("input"),
            target: tokens("target"),
            targets2: tokens("targets2"),
            weights: floats(&datum["weights"]),
            weights2: floats(&datum["weights2"]),
            surrogate: floats(&datum["slope"]).iter().map(|slope| -slope).collect(),
            logprobs: floats(&datum["logprobs"]),
            advantages: floats(&datum["advantages"]),
            mask: floats(&datum["mask"]),
            shape: [len],
            shape2: [len, 3],
        }
    }

    /// Returns the inputs of a custom loss.
    fn tensors(&self, loss: &str) -> Vec<TensorView<'_>> {
        let tensor = |values| TensorView::f32(&self.shape, values);
        match loss {
            "custom" => vec![tensor(&self.logprobs), tensor(&self.advantages)],
            "custom_targets" => {
                vec![TensorView::f32(&self.shape2, &self.weights2)]
            }
            _ => Vec::new(),
        }
    }

    fn datum<'a>(&'a self, loss: &str, graph_inputs: &'a [TensorView<'a>]) -> Datum<'a> {
        let one = Datum { tokens: &self.tokens, targets: &self.target, ..Datum::default() };
        let two = Datum { targets: &self.targets2, columns: Some(3), ..one };
        let weighted = |weights| LossInputs { weights: Some(weights), ..LossInputs::default() };
        match loss {
            "cross_entropy" => Datum { inputs: weighted(&self.weights), ..one },
            "cross_entropy_targets" => Datum { inputs: weighted(&self.weights2), ..two },
            "surrogate" => Datum { inputs: weighted(&self.surrogate), ..one },
            "custom" => Datum { graph_inputs, ..one },
            "custom_targets" => Datum { graph_inputs, ..two },
            _ => {
                let inputs = LossInputs {
                    logprobs: Some(&self.logprobs),
                    advantages: Some(&self.advantages),
                    sequence_ratio_mask: Some(&self.mask),
                    ..LossInputs::default()
                };
                Datum { inputs, ..one }
            }
        }
    }
}

/// Returns the program of a custom loss, or `None` for a built-in one.
fn graph(loss: &str, about: &Value) -> Option<LossProgram> {
    let inputs: &[(&str, u8)] = match loss {
        "custom" => &[("logprobs", 1), ("q", 1), ("a", 1)],
        "custom_targets" => &[("logprobs", 2), ("w", 2)],
        _ => return None,
    };
    let input = |&(name, rank): &(&str, u8)| GraphInput::new(name, rank);
    let nodes = serde_json::from_value(about["nodes"].clone()).unwrap();
    let graph = LossGraph::new(nodes);
    Some(LossProgram::new(inputs.iter().map(input).collect(), graph).unwrap())
}

/// Returns the built-in loss of a recorded case, with its recorded settings.
fn built_in(loss: &str, about: &Value) -> Loss {
    let name = match loss {
        "cross_entropy_targets" | "surrogate" => "cross_entropy",
        other => other,
    };
    let settings = about["config"].as_object().unwrap();
    let settings: Vec<(&str, f64)> =
        settings.iter().map(|(key, value)| (key.as_str(), number(value))).collect();
    Loss::parse(name, &settings, UnverifiedLosses::Reject).unwrap()
}

/// Returns the accumulated gradients of a trainer as the file that a save of its optimizer writes:
/// with beta1 = 0 they are Adam's first moments. The file is in the returned folder.
fn gradients(mut trainer: Trainer) -> (tempfile::TempDir, TensorFile) {
    let params = AdamParams { beta1: 0.0, learning_rate: 0.0, ..AdamParams::default() };
    trainer.optim_step(&StepParams::Adam(params)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter");
    trainer.save_with_optimizer(&path).unwrap();
    let file = TensorFile::open(path.join("optimizer.safetensors")).unwrap();
    (folder, file)
}

#[test]
fn gradients_of_every_loss_match_torch_on_every_tensor() {
    for name in MODELS {
        let text = std::fs::read(folder(name).join("expected.json")).unwrap();
        let recorded: Value = serde_json::from_slice(&text).unwrap();
        let expected = TensorFile::open(folder(name).join("expected.safetensors")).unwrap();
        let engine = Engine::open(folder(name), EngineOptions::default()).unwrap();
        let recorded_data: Vec<RecordedDatum> =
            recorded["data"].as_array().unwrap().iter().map(RecordedDatum::new).collect();
        let losses = recorded["losses"].as_object().unwrap();
        assert_eq!(losses.len(), 10);
        for (loss, about) in losses {
            let tensors: Vec<Vec<TensorView<'_>>> =
                recorded_data.iter().map(|datum| datum.tensors(loss)).collect();
            let data: Vec<Datum<'_>> = recorded_data
                .iter()
                .zip(&tensors)
                .map(|(datum, inputs)| datum.datum(loss, inputs))
                .collect();
            let graph = graph(loss, about);
            let objective = match &graph {
                Some(graph) => TrainingObjective::Graph(graph),
                None => TrainingObjective::Loss(built_in(loss, about)),
            };
            let adapter = folder(name).join("adapter");
            let mut trainer = engine.load_trainer(adapter, OptimizerKind::Adam).unwrap();
            let out = trainer.forward_backward(&objective, &data).unwrap();
            let what = format!("{name} {loss}");
            assert_close(&what, &[out.metrics[0].1], &[number(&about["sum"])], 2e-5, 2e-5);

            let (_folder, found) = gradients(trainer);
            let prefix = format!("grad.{loss}.base_model.model.");
            let mut compared = 0;
            for want in expected.tensors() {
                let Some(tensor) = want.name().strip_prefix(&prefix) else { continue };
                compared += 1;
                let got = found.tensor(&format!("m.{tensor}")).unwrap();
                assert_eq!(got.shape(), want.shape(), "{what} {tensor}");
                let got = got.to_f32().unwrap();
                let want = want.to_f32().unwrap();
                let square = |x: f32| f64::from(x) * f64::from(x);
                let norm = want.iter().map(|x| square(*x)).sum::<f64>().sqrt();
                let squared_error =
                    got.iter().zip(want.iter()).map(|(x, y)| square(x - y)).sum::<f64>();
                assert!(norm > 0.0, "{what} {tensor} has a gradient");
                assert!(
                    squared_error.sqrt() < 1e-4 * norm,
                    "{what} {tensor}: off by {} of {norm}",
                    squared_error.sqrt()
                );
            }
            assert_eq!(compared, 2 * (2 * 7 + 1), "{what}: A and B of every module");
        }
    }
}
