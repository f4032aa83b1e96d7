//! Readers for numbers and shapes in golden JSON files.

use std::path::Path;

use serde_json::Value;

/// Reads a JSON file, by its path relative to the crate.
pub(crate) fn load(path: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Reads a number; `"inf"`, `"-inf"` and `"nan"` stand for values that JSON cannot express.
pub(crate) fn number(value: &Value) -> f64 {
    match value.as_str() {
        None => value.as_f64().unwrap(),
        Some("inf") => f64::INFINITY,
        Some("-inf") => f64::NEG_INFINITY,
        Some("nan") => f64::NAN,
        Some(other) => panic!("{other} is not a number"),
    }
}

/// Flattens nested lists of numbers, in row-major order.
pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    match value.as_array() {
        Some(items) => items.iter().flat_map(numbers).collect(),
        None => vec![number(value)],
    }
}

/// Flattens nested lists of numbers and rounds them to `f32`.
#[expect(clippy::cast_possible_truncation, reason = "golden inputs are rounded to f32")]
pub(crate) fn floats(value: &Value) -> Vec<f32> {
    numbers(value).into_iter().map(|number| number as f32).collect()
}

/// Returns the lengths of nested lists, outermost first.
pub(crate) fn shape(value: &Value) -> Vec<usize> {
    match value.as_array() {
        None => Vec::new(),
        Some(items) => {
            let inner = items.first().map(shape).unwrap_or_default();
            [vec![items.len()], inner].concat()
        }
    }
}

/// Asserts that `got` equals `want` within `absolute + relative × |want|`. NaN equals NaN.
pub(crate) fn assert_close(what: &str, got: &[f64], want: &[f64], relative: f64, absolute: f64) {
    assert_eq!(got.len(), want.len(), "{what}: {got:?} instead of {want:?}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let near = (got - want).abs() <= absolute + relative * want.abs();
        let same = got == want || (got.is_nan() && want.is_nan());
        assert!(near || same, "{what}[{i}]: {got} instead of {want}");
    }
}

pub(crate) fn to_f64(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}
