//! Tracing, and values and gradients of traced losses that the client executes.

use super::*;
use crate::{fixture, regularize};
use serde_json::{Value, json};

/// Creates a datum of `tokens` tokens with additional loss inputs.
fn datum(inputs: &[(&'static str, TensorData)], tokens: usize) -> Datum {
    let mut builder = Datum::builder(vec![1_u32; tokens]);
    builder = builder.loss_input(loss_input::TARGET_TOKENS, vec![1_i64; tokens]);
    for (name, tensor) in inputs {
        builder = builder.loss_input(*name, tensor.clone());
    }
    builder.build().unwrap()
}

fn numbers(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Evaluates a loss of one datum.
fn evaluate(
    loss: &CustomLoss,
    logprobs: Vec<f32>,
    inputs: &[(&'static str, TensorData)],
) -> LossValue {
    let datum = datum(inputs, logprobs.len());
    loss.evaluate(&[datum], &[TensorData::from(logprobs)]).unwrap()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-5 * a.abs().max(b.abs()).max(1.0)
}

#[test]
fn gradients_agree_with_finite_differences() {
    type Describe = for<'t> fn(Term<'t>, Term<'t>) -> Term<'t>;
    let cases: [(&str, Describe); 24] = [
        ("add", |x, y| (x + y + 2.0).sum()),
        ("sub", |x, y| (x - y - (1.0 - x)).sum()),
        ("mul", |x, y| (x * y * x).sum()),
        ("div", |x, y| (x / y + 1.0 / x).sum()),
        ("pow", |x, _| x.pow(3.0).sum()),
        ("exp", |x, _| x.exp().sum()),
        ("ln", |x, y| (y * y + x.exp()).ln().sum()),
        ("abs", |x, _| x.abs().sum()),
        ("sqrt", |x, _| (x * x).sqrt().sum()),
        ("sigmoid", |x, _| x.sigmoid().sum()),
        ("log_sigmoid", |x, _| x.log_sigmoid().sum()),
        ("softplus", |x, _| x.softplus().sum()),
        ("tanh", |x, _| x.tanh().mean()),
        ("relu", |x, _| (x + 1.0).relu().sum()),
        ("neg", |x, _| (-x).sum()),
        ("max", |x, y| x.max(y).sum() + x.max(-0.6).sum()),
        ("min", |x, y| x.min(y).sum() + x.min(-0.6).sum()),
        ("clamp", |x, _| (x * x).clamp(0.1, 1.0).sum()),
        ("choose", |x, y| x.gt(y).choose(x * x, y * x).sum()),
        ("choose_less", |x, _| x.lt(-0.6).choose(x, 3.0).sum()),
        ("sum_last", |x, y| (x * y).sum_last() * x.sum()),
        ("log_sum_exp", |x, _| x.log_sum_exp_last()),
        ("cumulative", |x, y| (x.cumulative_sum() * y).sum()),
        ("broadcast", |x, y| (x * y.sum() + x.mean()).sum()),
    ];
    let at = [-0.5_f32, -1.25, -0.75];
    let other = [("other", TensorData::from(vec![-1.0_f32, -0.25, 0.5]))];
    for (name, describe) in cases {
        let loss = CustomLoss::trace(name, |trace| {
            describe(trace.input("logprobs", 1), trace.input("other", 1))
        })
        .unwrap();
        let value = evaluate(&loss, at.to_vec(), &other);
        for i in 0..at.len() {
            let step = 1.0 / 1024.0;
            let shifted = |distance: f32| {
                let mut at = at;
                at[i] += distance;
                evaluate(&loss, at.to_vec(), &other).loss
            };
            let difference = (shifted(step) - shifted(-step)) / f64::from(2.0 * step);
            let gradient = f64::from(value.gradients[0][i]);
            assert!(
                (difference - gradient).abs() < 1e-4 * difference.abs().max(1.0),
                "{name} {i}: {difference} {gradient}"
            );
        }
    }
    let detached = CustomLoss::trace("detached", |trace| {
        let x = trace.input("logprobs", 1);
        (x.detach() * x).sum()
    });
    assert_eq!(evaluate(&detached.unwrap(), at.to_vec(), &[]).gradients[0], at);
}

#[test]
fn matrices_are_reduced_over_their_last_dimension() {
    let loss = CustomLoss::trace("table", |trace| {
        let x = trace.input("logprobs", 2);
        (x.log_sum_exp_last() * trace.input("weights", 1)).sum()
    });
    // The second input is declared too late.
    assert!(loss.unwrap_err().to_string().contains("after the first computation"));
    let loss = CustomLoss::trace("table", |trace| {
        let x = trace.input("logprobs", 2);
        let weights = trace.input("per_row", 1);
        (x.log_sum_exp_last() * weights).sum()
    });
    let rows = [[0.0_f32, 0.0], [1.0, 3.0]];
    let table = TensorData::from_rows(&rows).unwrap();
    let per_row = ("per_row", TensorData::from(vec![1.0_f32, 2.0]));
    let value = loss.unwrap().evaluate(&[datum(&[per_row], 2)], &[table]).unwrap();
    let second = 3.0 + (-2.0_f64).exp().ln_1p();
    assert!(close(value.loss, 2.0_f64.ln() + 2.0 * second), "{value:?}");
    assert!(close(f64::from(value.gradients[0][0]), 0.5));
    assert_eq!(value.gradients[0].len(), 4);
}

#[test]
fn invalid_descriptions_are_rejected() {
    type Describe = for<'t> fn(&'t Trace) -> Term<'t>;
    let cases: [(Describe, &str); 6] = [
        (|trace| trace.input("logprobs", 1), "not a scalar"),
        (|trace| trace.input("advantages", 1).sum(), "the first input must be `logprobs`"),
        (|trace| trace.input("logprobs", 3).sum(), "rank 1 or 2"),
        (|trace| trace.input("logprobs", 1).sum().sum_last(), "no last dimension"),
        (
            |trace| {
                let loss = trace.input("logprobs", 1).sum();
                trace.metric("loss:sum", loss);
                loss
            },
            "metric name \"loss:sum\"",
        ),
        (
            |trace| {
                let loss = trace.input("logprobs", 1).sum();
                regularize::add(trace, loss, &[("x", -1.0, loss)])
            },
            "weight -1 of regularizer \"x\"",
        ),
    ];
    for (describe, message) in cases {
        let error = CustomLoss::trace("odd", describe).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[test]
fn metrics_are_combined_over_data_as_in_the_python_sdk() {
    let case = fixture::cases("custom_loss.json");
    let case = case.iter().find(|case| case["id"] == "per_datum_metrics").unwrap();
    let loss = CustomLoss::trace("m", |trace| {
        let x = trace.input("logprobs", 1);
        let a = trace.input("a", 0);
        let b = trace.input("b", 0);
        trace.metric("custom/a:sum", a);
        trace.metric("custom/b:mean", b);
        x.sum()
    })
    .unwrap();
    let per_datum = case["per_datum"].as_array().unwrap();
    #[expect(clippy::cast_possible_truncation, reason = "small numbers")]
    let scalar = |value: &Value| TensorData::scalar(value.as_f64().unwrap() as f32);
    let data: Vec<Datum> = per_datum
        .iter()
        .map(|m| datum(&[("a", scalar(&m["custom/a:sum"])), ("b", scalar(&m["custom/b:mean"]))], 1))
        .collect();
    let logprobs = vec![TensorData::from(vec![0.0_f32]); data.len()];
    let value = loss.evaluate(&data, &logprobs).unwrap();
    assert_eq!(json!(value.metrics), case["expected"]);
}

#[test]
fn a_traced_graph_has_the_form_of_the_api() {
    let loss = CustomLoss::trace("ppo", |trace| {
        let x = trace.input("logprobs", 1);
        let old = trace.input("old", 1);
        let advantages = trace.input("advantages", 1);
        let ratio = (x - old).exp();
        let clipped = ratio.clamp(0.8, 1.2);
        trace.metric("custom/ratio:mean", ratio.mean());
        -(ratio * advantages).min(clipped * advantages).sum() + ratio.max(2.0).sum()
    })
    .unwrap();
    let request = serde_json::to_value(loss.registration(SessionId::from("s"), 3)).unwrap();
    let nodes = request["graph"]["nodes"].as_array().unwrap();
    let targets: Vec<_> = nodes.iter().map(|node| node["target"].as_str().unwrap()).collect();
    assert_eq!(
        targets,
        [
            "logprobs",
            "old",
            "advantages",
            "operator.sub",
            "torch.exp",
            "torch.clamp",
            "mean",
            "operator.mul",
            "operator.mul",
            "torch.minimum",
            "sum",
            "operator.neg",
            "torch.full_like",
            "torch.maximum",
            "sum",
            "operator.add",
            "output",
        ]
    );
    assert_eq!(nodes[3]["args"], json!([{"ref": "logprobs"}, {"ref": "old"}]));
    assert_eq!(nodes[5]["kwargs"], json!({"min": 0.8, "max": 1.2}));
    assert_eq!(nodes[12]["args"], json!([{"ref": "Step4"}, 2.0]));
    assert_eq!(nodes[12]["kwargs"], json!({"dtype": {"dtype": "float32"}}));
    assert_eq!(nodes[13]["args"], json!([{"ref": "Step4"}, {"ref": "Step12"}]));
    let output = &nodes[16]["args"][0]["tuple"];
    assert_eq!(output[1]["dict"], json!({"custom/ratio:mean": {"ref": "Step6"}}));
    let inputs = loss.program.inputs().to_vec();
    let read: LossGraph = serde_json::from_value(request["graph"].clone()).unwrap();
    assert_eq!(CustomLoss::from_graph("read", inputs, read).unwrap(), loss);
    let other = CustomLoss::trace("ppo", |t| t.input("logprobs", 1).sum()).unwrap();
    assert_ne!(loss.fingerprint(), other.fingerprint());
}

/// Evaluates terms where they are not differentiable, and compares the derivatives with the
/// derivatives of PyTorch that `crates/autodiff/tests/golden/kinks.json` records.
#[test]
fn terms_have_the_recorded_derivatives_at_kinks() {
    type Describe = for<'t> fn(Term<'t>, Term<'t>) -> Term<'t>;
    let terms: [(&str, Describe); 24] = [
        ("maximum", |x, y| x.max(y)),
        ("minimum", |x, y| x.min(y)),
        ("maximum_with_itself", |x, _| x.max(x)),
        ("maximum_with_number", |x, _| x.max(0.5)),
        ("minimum_with_number", |x, _| x.min(0.5)),
        ("clamp", |x, _| x.clamp(-1.0, 1.0)),
        ("clamp_min", |x, _| x.clamp(0.0, f64::INFINITY)),
        ("clamp_max", |x, _| x.clamp(f64::NEG_INFINITY, 0.0)),
        ("relu", |x, _| x.relu()),
        ("abs", |x, _| x.abs()),
        ("sqrt_at_zero", |x, _| x.sqrt()),
        ("sqrt_times_zero", |x, y| x.sqrt() * y),
        ("division_by_zero", |x, y| x / y),
        ("log_at_zero", |x, _| x.ln()),
        ("where", |x, y| x.gt(y).choose(x * 3.0, x * 2.0)),
        ("where_masks_log", |x, _| (!x.le(0.0)).choose(x.ln(), 0.0)),
        ("where_masks_sqrt", |x, _| (x.gt(0.0) & x.ge(0.0)).choose(x.sqrt(), x)),
        ("pow_zero", |x, _| x.pow(0.0)),
        ("pow_half_at_zero", |x, _| x.pow(0.5)),
        ("pow_two", |x, _| x.pow(2.0)),
        ("sigmoid_extremes", |x, _| x.sigmoid()),
        ("logsigmoid_extremes", |x, _| x.log_sigmoid()),
        ("softplus_extremes", |x, _| x.softplus()),
        ("tanh_extremes", |x, _| x.tanh()),
    ];
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let file = std::fs::read(crates.join("autodiff/tests/golden/kinks.json")).unwrap();
    let file: Value = serde_json::from_slice(&file).unwrap();
    let read = |value: &Value| -> Vec<f64> {
        let number = |value: &Value| value.as_f64().or_else(|| value.as_str()?.parse().ok());
        value.as_array().unwrap().iter().map(|value| number(value).unwrap()).collect()
    };
    for (name, describe) in terms {
        let cases = file["cases"].as_array().unwrap();
        let case = cases.iter().find(|case| case["name"] == name).unwrap();
        let loss = CustomLoss::trace(name, |trace| {
            let x = trace.input("logprobs", 1);
            let y = trace.input("y", 1);
            describe(x, y).sum()
        })
        .unwrap();
        let y = TensorData::from(numbers(&case["y"]));
        let at = numbers(&case["at"]);
        let datum = datum(&[("y", y)], at.len());
        let gradient = read(&case["gradient"]);
        match loss.evaluate(&[datum], &[TensorData::from(at)]) {
            Ok(value) => {
                assert!(close(value.loss, case["loss"].as_f64().unwrap()), "{name}: {value:?}");
                for (got, want) in value.gradients[0].iter().zip(&gradient) {
                    assert!(close(f64::from(*got), *want), "{name}: {got} instead of {want}");
                }
            }
            Err(error) => {
                let finite = gradient.iter().all(|derivative| derivative.is_finite());
                assert!(!finite, "{name}: {error}");
            }
        }
    }
}

/// The fixture holds values computed by hand.
#[test]
fn regularizers_have_the_values_of_their_formulas() {
    use regularize::*;

    let unary = |describe: &dyn for<'t> Fn(Term<'t>) -> Term<'t>, x: &[f32]| {
        let loss = CustomLoss::trace("r", |trace| describe(trace.input("logprobs", 1))).unwrap();
        evaluate(&loss, x.to_vec(), &[]).loss
    };
    let binary =
        |describe: &dyn for<'t> Fn(Term<'t>, Term<'t>) -> Term<'t>, x: &[f32], y: &[f32]| {
            let loss = CustomLoss::trace("r", |trace| {
                describe(trace.input("logprobs", 1), trace.input("other", 1))
            });
            evaluate(&loss.unwrap(), x.to_vec(), &[("other", TensorData::from(y.to_vec()))]).loss
        };
    let logs = |value: &Value| numbers(value).into_iter().map(f32::ln).collect::<Vec<_>>();
    for case in fixture::cases("regularizers.json") {
        let opts = &case["opts"];
        let number = |name: &str, or: f64| opts[name].as_f64().unwrap_or(or);
        let lambda = number("lambda", 1.0);
        let mean = opts["reduction"] == "mean";
        let reduced = |x: f64, len: usize| {
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let len = len as f64;
            lambda * if mean { x / len } else { x }
        };
        let x = if case["input"].is_array() { numbers(&case["input"]) } else { Vec::new() };
        let value = match case["name"].as_str().unwrap() {
            "l1" => reduced(unary(&|x| l1(x).sum(), &x), x.len()),
            "l2" => {
                #[expect(clippy::cast_precision_loss, reason = "small numbers")]
                let average = x.iter().map(|x| f64::from(*x)).sum::<f64>() / x.len() as f64;
                let center = if opts["center"] == "mean" { average } else { number("center", 0.0) };
                let clip = number("clip", f64::INFINITY);
                lambda * unary(&|x| l2((x - center).clamp(-clip, clip)).sum(), &x)
            }
            "elastic_net" => {
                let l1_ratio = number("l1_ratio", 0.5);
                reduced(unary(&|x| elastic_net(x, l1_ratio).sum(), &x), x.len())
            }
            "kl_divergence" => {
                let p = logs(&case["p"]);
                let q = logs(&case["q"]);
                if opts["symmetric"] == true {
                    binary(&symmetric_kl, &p, &q)
                } else if opts["direction"] == "reverse" {
                    binary(&kl, &q, &p)
                } else {
                    binary(&kl, &p, &q)
                }
            }
            "entropy" => {
                let p = logs(&case["p"]);
                let entropy =
                    unary(&|x| entropy(with_temperature(x, number("temperature", 1.0))), &p);
                #[expect(clippy::cast_precision_loss, reason = "small numbers")]
                let scale = if opts["normalize"] == true { (p.len() as f64).ln() } else { 1.0 };
                if opts["mode"] == "maximize" { -entropy / scale } else { entropy / scale }
            }
            "consistency" => {
                let a = numbers(&case["a"]);
                let b = numbers(&case["b"]);
                match opts["metric"].as_str().unwrap() {
                    "mse" => binary(&|a, b| l2(a - b).mean(), &a, &b),
                    "l1" => binary(&|a, b| l1(a - b).sum(), &a, &b),
                    _ => binary(&cosine_distance, &a, &b),
                }
            }
            "orthogonality" => {
                let rows: Vec<Vec<f64>> = serde_json::from_value(case["matrix"].clone()).unwrap();
                let rows = if opts["normalize"] == false { rows } else { normalized(&rows) };
                let mode = match opts["mode"].as_str().unwrap() {
                    "soft" => Orthogonality::Soft,
                    "hard" => Orthogonality::Hard,
                    _ => Orthogonality::Spectral,
                };
                orthogonality(&rows, mode)
            }
            "gradient_penalty" => {
                let squares = case["loss"].as_str().unwrap().contains("squares");
                let loss = CustomLoss::trace("g", |trace| {
                    let x = trace.input("logprobs", 1);
                    if squares { l2(x).sum() } else { x.sum() }
                });
                let value = evaluate(&loss.unwrap(), x, &[]);
                gradient_penalty(&value.gradients, number("target_norm", 0.0))
            }
            other => panic!("no test for {other}"),
        };
        assert!(close(value, case["expected"].as_f64().unwrap()), "{value} {case}");
    }
}

#[test]
fn weighted_regularizers_are_added_to_the_loss() {
    let file = fixture::load("regularizers.json");
    for case in file["composition"].as_array().unwrap() {
        let parts = case["regularizers"].as_array().unwrap();
        let base = case["base_loss"].as_f64();
        let a = &parts[0];
        let b = &parts[1];
        let loss = CustomLoss::trace("sum", |trace| {
            let zero = trace.input("logprobs", 1).sum() * 0.0;
            let part = |part: &Value| zero + part["value"].as_f64().unwrap();
            let weight = |part: &Value| part["weight"].as_f64().unwrap();
            let parts = [("a", weight(a), part(a)), ("b", weight(b), part(b))];
            regularize::add(trace, zero + base.unwrap(), &parts)
        });
        let value = evaluate(&loss.unwrap(), vec![-1.0], &[]);
        assert!(close(value.loss, case["expected"]["loss_total"].as_f64().unwrap()), "{value:?}");
        let metric = value.metrics["custom/regularizer/a:sum"];
        assert!(close(metric, a["value"].as_f64().unwrap()));
        let contribution = a["weight"].as_f64().unwrap() * metric;
        assert!(close(contribution, case["expected"]["a"]["contribution"].as_f64().unwrap()));
    }
}
