//! Built-in losses compared with `fixtures/semantics/losses.json` and with finite differences.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::Value;
use tinkex_engine::loss::{Loss, LossInputs, LossMetrics, UnverifiedLosses};
use tinkex_engine::optim::{AdamParams, OptimizerKind, StepParams};
use tinkex_engine::train::Datum;
use tinkex_engine::{Engine, EngineOptions, Error, ErrorKind, LoraConfig};

use crate::fixtures::{assert_close, floats, number, numbers, semantics, shape, to_f64};
use crate::golden::folder;

/// Relative and absolute tolerance.
const TOLERANCE: f64 = 2e-6;

/// Names of all built-in losses.
const LOSSES: [&str; 7] =
    ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"];

/// Loss inputs of a recorded case.
struct CaseInputs {
    lists: BTreeMap<String, Vec<f32>>,
    /// Shape of the targets.
    shape: Vec<usize>,
}

impl CaseInputs {
    fn new(inputs: &Value) -> Self {
        let lists = inputs.as_object().unwrap().iter();
        let lists = lists.map(|(key, value)| (key.clone(), floats(value))).collect();
        Self { lists, shape: shape(&inputs["target_logprobs"]) }
    }

    fn get(&self, key: &str) -> Option<&[f32]> {
        self.lists.get(key).map(Vec::as_slice)
    }

    fn inputs(&self) -> LossInputs<'_> {
        LossInputs {
            weights: self.get("weights"),
            logprobs: self.get("logprobs").or(self.get("recorded_logprobs")),
            advantages: self.get("advantages"),
            clip_low: self.get("clip_low_threshold"),
            clip_high: self.get("clip_high_threshold"),
            sequence_ratio_mask: self.get("sequence_ratio_mask"),
            sampled_mask: self.get("sampled_mask"),
        }
    }
}

/// Returns the loss of a recorded case, with its recorded settings.
fn loss_of(case: &Value) -> Result<Loss, Error> {
    let none = serde_json::Map::new();
    let config = case["loss_fn_config"].as_object().unwrap_or(&none);
    let config: Vec<(&str, f64)> =
        config.iter().map(|(key, value)| (key.as_str(), number(value))).collect();
    Loss::parse(case["loss_fn"].as_str().unwrap(), &config, UnverifiedLosses::Allow)
}

#[test]
fn every_case_has_its_recorded_loss_and_gradient() {
    let fixture = semantics("losses.json");
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 66);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let loss = loss_of(case).unwrap();
        let recorded = CaseInputs::new(&case["inputs"]);
        let inputs = recorded.inputs();
        let p = recorded.get("target_logprobs").unwrap();
        loss.check(&recorded.shape, &inputs).unwrap();
        let mut slope = vec![f32::NAN; p.len()];
        let out = loss.evaluate(&inputs, p, &mut slope).unwrap();
        let expect = &case["expect"];
        assert_close(name, &[out.loss], &[number(&expect["loss_sum"])], TOLERANCE, TOLERANCE);
        assert_close(
            name,
            &to_f64(&slope),
            &numbers(&expect["grad_target_logprobs"]),
            TOLERANCE,
            TOLERANCE,
        );

        // A weight of 0 for all other tokens isolates the term of one token.
        let terms = numbers(&expect["elementwise_loss"]);
        for (at, want) in terms.iter().enumerate() {
            let mut one = vec![0.0; p.len()];
            one[at] = inputs.weights.map_or(1.0, |weights| weights[at]);
            let inputs = LossInputs { weights: Some(&one), ..inputs };
            let out = loss.evaluate(&inputs, p, &mut slope).unwrap();
            assert_close(
                &format!("{name} token {at}"),
                &[out.loss],
                &[*want],
                TOLERANCE,
                TOLERANCE,
            );
        }
    }
}

#[test]
fn batch_metrics_are_sums_over_data() {
    for case in semantics("losses.json")["batches"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let loss = loss_of(case).unwrap();
        let mut metrics = LossMetrics::default();
        for (i, datum) in case["data"].as_array().unwrap().iter().enumerate() {
            let recorded = CaseInputs::new(datum);
            let p = recorded.get("target_logprobs").unwrap();
            let mut slope = vec![0.0; p.len()];
            let out = loss.evaluate(&recorded.inputs(), p, &mut slope).unwrap();
            metrics.add(p.len(), &out);
            let want = &case["expect"]["per_datum"][i]["grad_target_logprobs"];
            assert_close(name, &to_f64(&slope), &numbers(want), TOLERANCE, TOLERANCE);
        }
        let named: BTreeMap<String, f64> = metrics.named().into_iter().collect();
        for (key, want) in case["expect"]["metrics"].as_object().unwrap() {
            assert_close(name, &[named[key]], &[number(want)], TOLERANCE, TOLERANCE);
        }
        assert_eq!(metrics.loss(), named["loss:sum"]);
    }
}

/// Applies the chain rule through log-softmax, which the engine's fused kernels compute in one
/// pass.
#[test]
fn gradients_with_respect_to_logits_follow_from_the_loss() {
    for case in semantics("losses.json")["logits_cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let loss = loss_of(case).unwrap();
        let rows: Vec<Vec<f64>> = case["logits"].as_array().unwrap().iter().map(numbers).collect();
        let targets = case["target_tokens"].as_array().unwrap();
        let logs: Vec<Vec<f64>> = rows.iter().map(|row| log_softmax(row)).collect();
        #[expect(clippy::cast_possible_truncation, reason = "models report f32")]
        #[expect(clippy::cast_sign_loss, reason = "tokens are not negative")]
        let picked: Vec<Vec<(usize, f32)>> = targets
            .iter()
            .zip(&logs)
            .map(|(tokens, row)| {
                let tokens = numbers(tokens).into_iter().map(|token| token as usize);
                tokens.map(|token| (token, row[token] as f32)).collect()
            })
            .collect();
        let p: Vec<f32> = picked.iter().flatten().map(|(_, p)| *p).collect();
        assert_close(
            name,
            &to_f64(&p),
            &numbers(&case["expect"]["logprobs"]),
            TOLERANCE,
            TOLERANCE,
        );
        let mut recorded = CaseInputs::new(&case["inputs"]);
        recorded.shape = shape(&case["target_tokens"]);
        loss.check(&recorded.shape, &recorded.inputs()).unwrap();
        let mut slope = vec![0.0; p.len()];
        let out = loss.evaluate(&recorded.inputs(), &p, &mut slope).unwrap();
        assert_close(
            name,
            &[out.loss],
            &[number(&case["expect"]["loss_sum"])],
            TOLERANCE,
            TOLERANCE,
        );
        let mut slopes = slope.iter();
        let by_logits: Vec<f64> = picked
            .iter()
            .zip(&logs)
            .flat_map(|(picked, row)| {
                let mut grad = vec![0.0; row.len()];
                for (token, _) in picked {
                    let slope = f64::from(*slopes.next().unwrap());
                    for (i, log) in row.iter().enumerate() {
                        grad[i] += slope * (f64::from(u8::from(i == *token)) - log.exp());
                    }
                }
                grad
            })
            .collect();
        assert_close(
            name,
            &by_logits,
            &numbers(&case["expect"]["grad_logits"]),
            TOLERANCE,
            TOLERANCE,
        );
    }
}

fn log_softmax(row: &[f64]) -> Vec<f64> {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total = row.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max;
    row.iter().map(|x| x - total).collect()
}

/// Runs every error case through the trainer, whose gradient must stay zero.
#[test]
fn invalid_requests_are_rejected_and_change_nothing() {
    let engine = Engine::open(folder("qwen2"), EngineOptions::default()).unwrap();
    let vocab = engine.config().vocab_size;
    let lora = LoraConfig { rank: 4, ..LoraConfig::default() };
    let mut trainer = engine.create_trainer(lora, OptimizerKind::Adam).unwrap();
    let fixture = semantics("losses.json");
    let cases = fixture["error_cases"].as_array().unwrap();
    assert_eq!(cases.len(), 13);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let len = usize::try_from(case["model_input_len"].as_u64().unwrap()).unwrap();
        let tokens = vec![1_u32; len];
        let mut targets = vec![1_u32; len];
        let mut shape = vec![len];
        let mut lists = BTreeMap::new();
        if name == "missing_target_tokens" {
            targets.clear();
        }
        for (key, about) in case["inputs"].as_object().unwrap() {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small")]
            let sides: Vec<usize> = match about.get("shape") {
                Some(sides) => numbers(sides).into_iter().map(|side| side as usize).collect(),
                None => vec![1],
            };
            if key == "target_tokens" {
                if about["dtype"] == "float32" {
                    // The engine's targets are integers by type; the server rejects float targets.
                    assert_eq!(name, "wrong_dtype_targets");
                    targets.clear();
                    continue;
                }
                let token = if about.get("value").is_some() { vocab } else { 1 };
                targets = vec![u32::try_from(token).unwrap(); sides.iter().product()];
                shape = sides;
            } else {
                let values = about.get("value").map_or(vec![0.5; sides.iter().product()], floats);
                lists.insert(key.clone(), values);
            }
        }
        // Inputs that the case does not list are valid, unless their absence is the error.
        for key in ["logprobs", "advantages"] {
            if name != format!("missing_{key}") {
                lists.entry(key.to_owned()).or_insert_with(|| vec![0.0; targets.len()]);
            }
        }
        let columns = shape.get(1).copied();
        let recorded = CaseInputs { lists, shape };
        let inputs = recorded.inputs();
        let datum =
            Datum { tokens: &tokens, targets: &targets, columns, inputs, graph_inputs: &[] };
        let outcome =
            loss_of(case).and_then(|loss| trainer.forward_backward(&loss.into(), &[datum]));
        let error = outcome.expect_err(name);
        assert_eq!(error.kind(), ErrorKind::Input, "{name}: {error}");
        if name == "nan_advantage" {
            let message = error.to_string();
            assert!(message.starts_with("data[0]: NonFiniteInTensor"), "{message}");
        }
    }
    let report = trainer.optim_step(&StepParams::Adam(AdamParams::default())).unwrap();
    assert_eq!(report.grad_norm, 0.0, "no gradient was accumulated");
}

#[test]
fn an_unverified_loss_must_be_allowed() {
    let error = Loss::parse("stable_reinforce", &[], UnverifiedLosses::Reject).unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(Loss::parse("stable_reinforce", &[("kl_coeff", 0.1)], UnverifiedLosses::Allow).is_ok());
}

#[test]
fn settings_outside_their_range_are_rejected() {
    for (name, key, value) in [
        ("ppo", "clip_low_threshold", -0.1),
        ("ppo", "clip_high_threshold", f64::NAN),
        ("cispo", "clip_high_threshold", f64::INFINITY),
        ("dro", "beta", -1.0),
        ("dro", "clip_low_threshold", 0.5),
        ("cross_entropy", "beta", 0.5),
    ] {
        let error = Loss::parse(name, &[(key, value)], UnverifiedLosses::Reject).unwrap_err();
        assert!(error.to_string().contains(key), "{error}");
    }
}

#[test]
fn a_token_without_advantage_may_have_an_infinite_logprob() {
    let loss = Loss::parse("ppo", &[], UnverifiedLosses::Reject).unwrap();
    let q = [f32::NEG_INFINITY, -1.0];
    let with_advantages =
        |advantages| LossInputs { logprobs: Some(&q), advantages, ..LossInputs::default() };
    let ignored = with_advantages(Some(&[0.0, 1.0]));
    loss.check(&[2], &ignored).unwrap();
    let mut slope = [0.0; 2];
    let out = loss.evaluate(&ignored, &[-1.0, -1.0], &mut slope).unwrap();
    assert_eq!((out.loss, slope), (-1.0, [0.0, -1.0]));
    let error = loss.check(&[2], &with_advantages(Some(&[1.0, 1.0]))).unwrap_err();
    assert!(matches!(error, Error::NonFiniteInput { index: 0, .. }), "{error}");
}

/// Bug: the infinite difference of the first token made the ratio of the sequence infinite, and all
/// other tokens were clipped.
#[test]
fn an_infinite_logprob_of_a_token_without_advantage_is_no_part_of_the_sequence_ratio() {
    let loss = Loss::parse("gspo", &[], UnverifiedLosses::Reject).unwrap();
    let inputs = LossInputs {
        logprobs: Some(&[f32::NEG_INFINITY, -1.0]),
        advantages: Some(&[0.0, 1.0]),
        sequence_ratio_mask: Some(&[1.0, 1.0]),
        ..LossInputs::default()
    };
    loss.check(&[2], &inputs).unwrap();
    let mut slope = [0.0; 2];
    let out = loss.evaluate(&inputs, &[-1.0, -1.0], &mut slope).unwrap();
    assert_eq!((out.loss, slope, out.clipped_fraction), (-1.0, [0.0, -1.0], Some(0.0)));
}

#[test]
fn an_overflowing_ratio_is_an_error_that_names_the_token() {
    let loss = Loss::ImportanceSampling;
    let inputs = LossInputs {
        logprobs: Some(&[-1.0, -200.0]),
        advantages: Some(&[1.0, 1.0]),
        ..LossInputs::default()
    };
    loss.check(&[2], &inputs).unwrap();
    let error = loss.evaluate(&inputs, &[-1.0, -0.5], &mut [0.0; 2]).unwrap_err();
    assert!(matches!(error, Error::NonFiniteResult { index: 1, .. }), "{error}");
    assert_eq!(error.in_datum(3).kind(), ErrorKind::Numeric);
    let error = loss.evaluate(&inputs, &[f32::NAN, -0.5], &mut [0.0; 2]).unwrap_err();
    assert!(error.to_string().contains("log-probability"), "{error}");
}

#[test]
fn reversed_bounds_of_a_token_are_rejected() {
    let loss = Loss::parse("cispo", &[], UnverifiedLosses::Reject).unwrap();
    let inputs = LossInputs {
        logprobs: Some(&[0.0; 2]),
        advantages: Some(&[1.0; 2]),
        clip_low: Some(&[0.5, 5.0]),
        ..LossInputs::default()
    };
    let error = loss.check(&[2], &inputs).unwrap_err();
    assert!(error.to_string().contains("position 1"), "{error}");
}

/// Computes the term of a token as a function of `p`. `at_p` is the point of evaluation, used where
/// the formula treats a ratio as a constant; `ratio0` is the sequence ratio there.
fn reference_term(loss: &Loss, p: f64, at_p: f64, ratio0: f64, q: f64, a: f64) -> f64 {
    let ratio = (p - q).exp();
    match *loss {
        Loss::CrossEntropy => -p,
        Loss::ImportanceSampling => -ratio * a,
        Loss::Ppo(clip) => -(ratio * a).min(ratio.clamp(clip.low, clip.high) * a),
        Loss::Cispo(clip) => -(at_p - q).exp().clamp(clip.low, clip.high) * p * a,
        Loss::Dro { beta } => -(p * a - beta / 2.0 * (p - q) * (p - q)),
        Loss::Gspo(clip) => {
            let s = ratio0 * (p - at_p).exp();
            -(s * a).min(s.clamp(clip.low, clip.high) * a)
        }
        Loss::StableReinforce { kl_coeff } => {
            let c = (at_p - q).exp().min(1.0);
            -c * a * p + kl_coeff / 2.0 * (p - q) * (p - q)
        }
        _ => panic!("no reference formula for {loss:?}"),
    }
}

proptest! {
    /// Compares with central differences of the reference formulas, except near the kinks, where a
    /// loss is not differentiable.
    #[test]
    fn gradients_agree_with_finite_differences(
        tokens in prop::collection::vec(
            (-4.0_f32..0.0, -4.0_f32..0.0, -2.0_f32..2.0, -1.0_f32..2.0),
            1..6,
        ),
        name in prop::sample::select(&LOSSES[..]),
    ) {
        let loss = Loss::parse(name, &[], UnverifiedLosses::Allow).unwrap();
        let p: Vec<f32> = tokens.iter().map(|t| t.0).collect();
        let q: Vec<f32> = tokens.iter().map(|t| t.1).collect();
        let a: Vec<f32> = tokens.iter().map(|t| t.2).collect();
        let w: Vec<f32> = tokens.iter().map(|t| t.3).collect();
        let ones = vec![1.0; p.len()];
        let inputs = LossInputs {
            weights: Some(&w), logprobs: Some(&q), advantages: Some(&a),
            sequence_ratio_mask: Some(&ones), sampled_mask: Some(&ones), ..LossInputs::default()
        };
        loss.check(&[p.len()], &inputs).unwrap();
        let mut slope = vec![0.0; p.len()];
        let out = loss.evaluate(&inputs, &p, &mut slope).unwrap();
        let differences = p.iter().zip(&q).map(|(p, q)| f64::from(*p) - f64::from(*q));
        let s = (differences.sum::<f64>() / p.len() as f64).exp();
        let mut total = 0.0;
        for i in 0..p.len() {
            let p = f64::from(p[i]);
            let q = f64::from(q[i]);
            let a = f64::from(a[i]);
            let w = f64::from(w[i]);
            total += w * reference_term(&loss, p, p, s, q, a);
            let ratio = if matches!(loss, Loss::Gspo(_)) { s } else { (p - q).exp() };
            // The default bounds, and the bound 1 of `stable_reinforce`.
            let kink = [0.8, 1.2, 1.0, 4.0].iter().any(|edge| (ratio - edge).abs() < 1e-3);
            if kink {
                continue;
            }
            let h = 1e-5;
            let up = reference_term(&loss, p + h, p, s, q, a);
            let down = reference_term(&loss, p - h, p, s, q, a);
            let want = w * (up - down) / (2.0 * h);
            let got = f64::from(slope[i]);
            let close = (got - want).abs() <= 1e-5 * (1.0 + want.abs());
            prop_assert!(close, "{name}: {got} instead of {want}");
        }
        prop_assert!((out.loss - total).abs() <= 1e-9 * (1.0 + total.abs()));
    }

    /// For any input the result is finite or an error.
    #[test]
    fn results_are_finite_for_any_input(
        tokens in prop::collection::vec(any::<(f32, f32, f32, f32)>(), 0..5),
        name in prop::sample::select(&LOSSES[..]),
    ) {
        let loss = Loss::parse(name, &[], UnverifiedLosses::Allow).unwrap();
        let list = |f: fn(&(f32, f32, f32, f32)) -> f32| tokens.iter().map(f).collect::<Vec<_>>();
        let p = list(|t| t.0);
        let q = list(|t| t.1);
        let a = list(|t| t.2);
        let w = list(|t| t.3);
        let inputs = LossInputs {
            weights: Some(&w), logprobs: Some(&q), advantages: Some(&a),
            sequence_ratio_mask: Some(&w), sampled_mask: Some(&w), ..LossInputs::default()
        };
        if loss.check(&[p.len()], &inputs).is_ok() {
            let mut slope = vec![0.0; p.len()];
            if let Ok(out) = loss.evaluate(&inputs, &p, &mut slope) {
                prop_assert!(out.loss.is_finite());
                prop_assert!(slope.iter().all(|slope| slope.is_finite()));
            }
        }
    }
}
