//! Access to the golden cases in `fixtures/semantics`.

use std::path::PathBuf;

use serde_json::Value;

/// Reads the file `fixtures/semantics/<name>`.
pub(crate) fn semantics(name: &str) -> Value {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/semantics");
    serde_json::from_slice(&std::fs::read(root.join(name)).unwrap()).unwrap()
}

/// Parses a number, or one of the strings `inf`, `-inf` and `nan`, which JSON has no numbers for.
pub(crate) fn number(value: &Value) -> f64 {
    match value.as_str() {
        None => value.as_f64().unwrap(),
        Some("inf") => f64::INFINITY,
        Some("-inf") => f64::NEG_INFINITY,
        Some("nan") => f64::NAN,
        Some(other) => panic!("{other} is not a number"),
    }
}

/// Returns all numbers of nested lists, in order.
pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    match value.as_array() {
        Some(items) => items.iter().flat_map(numbers).collect(),
        None => vec![number(value)],
    }
}

/// Returns all numbers of nested lists, rounded to f32.
#[expect(clippy::cast_possible_truncation, reason = "the cases are rounded to f32")]
pub(crate) fn floats(value: &Value) -> Vec<f32> {
    numbers(value).into_iter().map(|number| number as f32).collect()
}

/// Returns the dimensions of nested lists, outermost first.
pub(crate) fn shape(value: &Value) -> Vec<usize> {
    match value.as_array() {
        None => Vec::new(),
        Some(items) => {
            let inner = items.first().map(shape).unwrap_or_default();
            [vec![items.len()], inner].concat()
        }
    }
}

/// Asserts that values agree within the relative and absolute tolerances `rel` and `abs`, or are both
/// NaN.
pub(crate) fn close(what: &str, got: &[f64], want: &[f64], rel: f64, abs: f64) {
    assert_eq!(got.len(), want.len(), "{what}: {got:?} instead of {want:?}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let near = (got - want).abs() <= abs + rel * want.abs();
        assert!(near || (got.is_nan() && want.is_nan()), "{what}[{i}]: {got} instead of {want}");
    }
}

/// Converts values to f64.
pub(crate) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}
