//! Optimizers compared with `fixtures/semantics/optimizers.json`, and the effect of failed steps.

use proptest::prelude::*;
use serde_json::Value;
use tinkex_engine::Error;
use tinkex_engine::optim::{
    AdamParams, DimuonParams, Optimizer, OptimizerKind, Parameter, StepParams, StepReport,
};

use crate::fixtures::{assert_close, floats, number, numbers, semantics, shape, to_f64};

/// Tensors named `t0`, `t1`, …
struct NamedTensors {
    names: Vec<String>,
    shapes: Vec<Vec<usize>>,
    weights: Vec<Vec<f32>>,
}

impl NamedTensors {
    fn new(list: &Value) -> Self {
        let list = list.as_array().unwrap();
        let names = (0..list.len()).map(|i| format!("t{i}")).collect();
        let shapes = list.iter().map(shape).collect();
        Self { names, shapes, weights: list.iter().map(floats).collect() }
    }

    fn lengths(&self) -> Vec<usize> {
        self.weights.iter().map(Vec::len).collect()
    }

    /// Returns the names and shapes.
    fn described(&self) -> Vec<(&str, &[usize])> {
        self.names.iter().map(String::as_str).zip(self.shapes.iter().map(Vec::as_slice)).collect()
    }

    /// Takes a step with one gradient per tensor.
    fn step(
        &mut self,
        optimizer: &mut Optimizer,
        params: &StepParams,
        gradients: &[Vec<f32>],
    ) -> Result<StepReport, Error> {
        let mut all: Vec<Parameter<'_>> = self
            .weights
            .iter_mut()
            .zip(gradients)
            .enumerate()
            .map(|(i, (weights, gradient))| Parameter {
                name: &self.names[i],
                rows: self.shapes[i][0],
                columns: self.shapes[i].get(1).copied().unwrap_or(1),
                weights,
                gradient,
            })
            .collect();
        optimizer.step(params, &mut all)
    }
}

/// Returns the parameters of a recorded step.
fn params_of(step: &Value) -> StepParams {
    let get = |from: &Value, key: &str| number(&from[key]);
    match step.get("adam_params") {
        Some(adam) => StepParams::Adam(AdamParams {
            learning_rate: get(adam, "learning_rate"),
            beta1: get(adam, "beta1"),
            beta2: get(adam, "beta2"),
            eps: get(adam, "eps"),
            weight_decay: get(adam, "weight_decay"),
            grad_clip_norm: get(adam, "grad_clip_norm"),
        }),
        None => {
            let dimuon = &step["optimizer_params"];
            StepParams::Dimuon(DimuonParams {
                learning_rate: get(dimuon, "learning_rate"),
                beta1: get(dimuon, "beta1"),
                grad_clip_norm: get(dimuon, "grad_clip_norm"),
            })
        }
    }
}

/// Returns the sum of the gradients of several calls.
fn accumulated(calls: &Value, tensors: &NamedTensors) -> Vec<Vec<f32>> {
    let mut all: Vec<Vec<f32>> = tensors.lengths().into_iter().map(|n| vec![0.0; n]).collect();
    for call in calls.as_array().unwrap() {
        for (sum, gradient) in all.iter_mut().zip(call.as_array().unwrap()) {
            for (sum, gradient) in sum.iter_mut().zip(floats(gradient)) {
                *sum += gradient;
            }
        }
    }
    all
}

#[test]
fn every_recorded_trajectory_is_reproduced() {
    let fixture = semantics("optimizers.json");
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 19);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let kind = match case["optimizer"].as_str().unwrap() {
            "adamw" => OptimizerKind::Adam,
            _ => {
                let rank = usize::try_from(case["rank"].as_u64().unwrap()).unwrap();
                OptimizerKind::Dimuon { rank }
            }
        };
        let mut tensors = NamedTensors::new(&case["params0"]);
        let mut optimizer = Optimizer::new(kind, &tensors.lengths());
        let steps = case["steps"].as_array().unwrap();
        for (step, want) in steps.iter().zip(case["trajectory"].as_array().unwrap()) {
            let gradients = accumulated(&step["grads_by_call"], &tensors);
            let report = tensors.step(&mut optimizer, &params_of(step), &gradients).unwrap();
            let what = format!("{name} step {}", want["step"]);
            let norm = number(&want["grad_norm_before_clip"]);
            assert_close(&what, &[report.grad_norm], &[norm], 1e-5, 1e-7);
            assert_close(&what, &[report.clip_scale], &[number(&want["clip_scale"])], 1e-5, 1e-7);
            let got: Vec<f64> = tensors.weights.iter().flat_map(|w| to_f64(w)).collect();
            assert_close(&what, &got, &numbers(&want["params"]), 1e-5, 1e-7);
        }
        assert_eq!(optimizer.steps(), steps.len() as u64);
    }
}

fn two_tensors() -> (NamedTensors, Vec<Vec<f32>>) {
    let tensors = NamedTensors::new(&serde_json::json!([[[0.1, -0.2, 0.3]], [[0.5], [0.25]]]));
    (tensors, vec![vec![1.0, -2.0, 0.5], vec![-0.25, 3.0]])
}

fn adam(learning_rate: f64) -> StepParams {
    StepParams::Adam(AdamParams { learning_rate, ..AdamParams::default() })
}

/// Bug: the error advised a lower learning rate, which does not help.
#[test]
fn a_gradient_whose_square_overflows_can_be_clipped() {
    let (mut tensors, mut gradients) = two_tensors();
    gradients[1][1] = 1e20;
    let mut optimizer = Optimizer::new(OptimizerKind::Adam, &tensors.lengths());
    let error = tensors.step(&mut optimizer, &adam(0.1), &gradients).unwrap_err().to_string();
    assert!(error.contains("the squared gradient of"), "{error}");
    assert!(error.contains("discard the gradient, or repeat the step with grad_clip_norm"));
    let clipped = StepParams::Adam(AdamParams { grad_clip_norm: 1.0, ..AdamParams::default() });
    tensors.step(&mut optimizer, &clipped, &gradients).unwrap();
}

#[test]
fn a_failed_step_changes_nothing() {
    let dimuon = OptimizerKind::Dimuon { rank: 2 };
    let with = |change: fn(&mut AdamParams)| {
        let mut params = AdamParams::default();
        change(&mut params);
        StepParams::Adam(params)
    };
    for (kind, params, bad_value) in [
        (OptimizerKind::Adam, adam(0.1), Some(f32::NAN)),
        (OptimizerKind::Adam, adam(0.1), Some(f32::INFINITY)),
        (OptimizerKind::Adam, adam(0.1), Some(f32::MAX)),
        (OptimizerKind::Adam, adam(f64::NAN), None),
        (OptimizerKind::Adam, adam(-1.0), None),
        (OptimizerKind::Adam, adam(f64::MAX), None),
        (OptimizerKind::Adam, with(|p| p.beta1 = 1.0), None),
        (OptimizerKind::Adam, with(|p| p.beta2 = -0.1), None),
        (OptimizerKind::Adam, with(|p| p.eps = f64::INFINITY), None),
        (OptimizerKind::Adam, with(|p| p.weight_decay = f64::NAN), None),
        (OptimizerKind::Adam, with(|p| p.grad_clip_norm = f64::NAN), None),
        // 0 / 0 where the gradient was always zero.
        (OptimizerKind::Adam, with(|p| p.eps = 0.0), Some(0.0)),
        (OptimizerKind::Adam, StepParams::Dimuon(DimuonParams::new(0.1)), None),
        (dimuon, adam(0.1), None),
        (dimuon, StepParams::Dimuon(DimuonParams::new(0.1)), Some(f32::NAN)),
        (dimuon, StepParams::Dimuon(DimuonParams::new(3e38)), None),
    ] {
        let (mut tensors, mut gradients) = two_tensors();
        let mut optimizer = Optimizer::new(kind, &tensors.lengths());
        let good = match kind {
            OptimizerKind::Adam => adam(0.01),
            _ => StepParams::Dimuon(DimuonParams::new(0.01)),
        };
        if bad_value != Some(0.0) {
            tensors.step(&mut optimizer, &good, &gradients).unwrap();
        }
        let before = (tensors.weights.clone(), optimizer.clone());
        if let Some(bad_value) = bad_value {
            gradients[1][1] = bad_value;
        }
        let error = tensors.step(&mut optimizer, &params, &gradients).unwrap_err();
        assert_eq!((tensors.weights, optimizer), before, "{params:?} with {bad_value:?}: {error}");
    }
}

#[test]
fn tensors_of_other_lengths_or_shapes_are_refused() {
    let (mut tensors, mut gradients) = two_tensors();
    let mut optimizer = Optimizer::new(OptimizerKind::Adam, &[3]);
    let error = tensors.step(&mut optimizer, &adam(0.1), &gradients).unwrap_err();
    assert!(matches!(error, Error::Length { expected: 1, got: 2, .. }), "{error}");
    gradients[0].pop();
    let mut optimizer = Optimizer::new(OptimizerKind::Adam, &tensors.lengths());
    let error = tensors.step(&mut optimizer, &adam(0.1), &gradients).unwrap_err();
    assert!(error.to_string().contains("the gradient of t0"), "{error}");
    let (mut tensors, gradients) = two_tensors();
    tensors.shapes[0] = vec![2, 2];
    let error = tensors.step(&mut optimizer, &adam(0.1), &gradients).unwrap_err();
    assert!(matches!(error, Error::Shape { .. }), "{error}");
}

#[test]
fn a_restored_optimizer_continues_with_the_same_bits() {
    for (kind, params) in [
        (OptimizerKind::Adam, adam(0.01)),
        (OptimizerKind::Dimuon { rank: 2 }, StepParams::Dimuon(DimuonParams::new(0.01))),
    ] {
        let (mut tensors, gradients) = two_tensors();
        let mut optimizer = Optimizer::new(kind, &tensors.lengths());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("optimizer.safetensors");
        for _ in 0..3 {
            tensors.step(&mut optimizer, &params, &gradients).unwrap();
        }
        optimizer.save(&path, &tensors.described()).unwrap();
        let mut again = Optimizer::load(&path, kind, &tensors.described()).unwrap();
        assert_eq!(again, optimizer);
        let (mut other, _) = two_tensors();
        other.weights.clone_from(&tensors.weights);
        for _ in 0..3 {
            tensors.step(&mut optimizer, &params, &gradients).unwrap();
            other.step(&mut again, &params, &gradients).unwrap();
        }
        assert_eq!(tensors.weights, other.weights);
        assert_eq!(again.steps(), 6);

        let wrong = match kind {
            OptimizerKind::Adam => OptimizerKind::Dimuon { rank: 2 },
            _ => OptimizerKind::Adam,
        };
        let error = Optimizer::load(&path, wrong, &tensors.described()).unwrap_err();
        assert!(error.to_string().contains("contains the state of"), "{error}");
        let error = Optimizer::load(&path, kind, &[("other", &[3])]).unwrap_err();
        assert!(
            matches!(error, Error::File(tinkex_weights::Error::MissingTensor { .. })),
            "{error}"
        );
        let error = Optimizer::load(&path, kind, &[("t0", &[4, 1])]).unwrap_err();
        assert!(matches!(error, Error::File(tinkex_weights::Error::BadFile { .. })), "{error}");
    }
}

#[test]
fn dimuon_does_not_change_weights_without_momentum() {
    let (mut tensors, _) = two_tensors();
    let before = tensors.weights.clone();
    let mut optimizer = Optimizer::new(OptimizerKind::Dimuon { rank: 2 }, &tensors.lengths());
    let params = StepParams::Dimuon(DimuonParams::new(0.1));
    tensors.step(&mut optimizer, &params, &[vec![0.0; 3], vec![0.0; 2]]).unwrap();
    assert_eq!(tensors.weights, before);
}

proptest! {
    /// A Dimuon step has the norm `learning_rate · √rank` for every gradient, and the step of a
    /// transposed matrix is the transposed step.
    #[test]
    fn dimuon_steps_have_a_fixed_norm(
        rows in 1_usize..7,
        columns in 1_usize..7,
        seed in prop::collection::vec(-1.0_f32..1.0, 36),
        scale in -20_i32..20,
    ) {
        let gradient: Vec<f32> =
            seed[..rows * columns].iter().map(|g| g * 2.0_f32.powi(scale)).collect();
        prop_assume!(gradient.iter().any(|g| g.abs() > 1e-3 * 2.0_f32.powi(scale)));
        let transposed: Vec<f32> =
            (0..columns * rows).map(|i| gradient[i % rows * columns + i / rows]).collect();
        let step = |rows, columns, gradient: &[f32]| {
            let mut weights = vec![0.0; rows * columns];
            let kind = OptimizerKind::Dimuon { rank: 4 };
            let mut optimizer = Optimizer::new(kind, &[rows * columns]);
            let tensor = Parameter { name: "w", rows, columns, weights: &mut weights, gradient };
            let params = StepParams::Dimuon(DimuonParams::new(0.5));
            optimizer.step(&params, &mut [tensor]).unwrap();
            weights
        };
        let a = step(rows, columns, &gradient);
        let b = step(columns, rows, &transposed);
        let norm = a.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>().sqrt();
        prop_assert!((norm - 1.0).abs() < 1e-5, "norm {norm}");
        for i in 0..a.len() {
            let other = b[i % columns * rows + i / columns];
            prop_assert!((a[i] - other).abs() < 1e-4, "{a:?} {b:?}");
        }
    }
}
