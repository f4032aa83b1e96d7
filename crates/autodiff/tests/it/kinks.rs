//! Kinks, ties and extremes of every operation, against `tests/golden/kinks.json`.
//!
//! `kinks.py` records the file with torch, and the conformance run compares it with the installed
//! torch. The server's tests run the same cases on the client and on the server.

use serde_json::Value;
use tinkex_autodiff::{Error, GraphInput, LossGraph, LossProgram, TensorView};

use crate::json::{assert_close, floats, load, number, numbers, to_f64};

#[test]
fn every_kink_has_the_recorded_slope() {
    let file = load("tests/golden/kinks.json");
    for case in file["cases"].as_array().unwrap() {
        check(case);
    }
}

fn check(case: &Value) {
    let name = case["name"].as_str().unwrap();
    let graph: LossGraph = serde_json::from_value(case["graph"].clone()).unwrap();
    let inputs = ["logprobs", "base", "at", "y"].map(|name| GraphInput::new(name, 1));
    let program = LossProgram::new(inputs.to_vec(), graph).unwrap();
    let at = floats(&case["at"]);
    let y = floats(&case["y"]);
    // The loss computes the point as logprobs - base + at.
    let base: Vec<f32> = (1_u8..).take(at.len()).map(|i| -0.1 * f32::from(i)).collect();
    let shape = [at.len()];
    let tensors = [&base, &base, &at, &y].map(|values| TensorView::f32(&shape, values));
    let loss = number(&case["loss"]);
    let gradient = numbers(&case["gradient"]);
    match program.evaluate(&tensors) {
        Ok(result) => {
            assert_close(name, &[result.loss], &[loss], 1e-7, 1e-7);
            assert_close(name, &to_f64(&result.gradient), &gradient, 1e-7, 1e-7);
        }
        Err(Error::NonFiniteResult { what: "value", value, .. }) => {
            assert_eq!(value, loss, "{name}");
        }
        Err(Error::NonFiniteResult { index, value, .. }) => {
            assert_eq!(value, gradient[index], "{name}");
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

/// Every difference from torch is stated in the crate's documentation.
#[test]
fn gradients_differ_from_torch_only_where_documented() {
    let file = load("tests/golden/kinks.json");
    for case in file["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let Some(torch) = case.get("torch_gradient") else { continue };
        let pairs = numbers(&case["gradient"]).into_iter().zip(numbers(torch));
        let mut different = pairs.filter(|(ours, torch)| ours != torch).peekable();
        assert!(different.peek().is_some(), "{name} does not differ");
        match case["difference"].as_str().unwrap() {
            "zero_times_infinity" => assert!(different.all(|(_, torch)| torch.is_nan()), "{name}"),
            "clamp_bound" => assert!(different.all(|(ours, _)| ours == 1.0), "{name}"),
            other => panic!("{name}: undocumented difference {other}"),
        }
    }
}
