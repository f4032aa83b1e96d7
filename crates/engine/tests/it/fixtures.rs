//! Access to the golden cases in `fixtures/semantics`.

use serde_json::Value;

#[path = "../../../autodiff/tests/it/json.rs"]
mod json;

pub(crate) use json::{assert_close, floats, number, numbers, shape, to_f64};

/// Reads the file `fixtures/semantics/<name>`.
pub(crate) fn semantics(name: &str) -> Value {
    json::load(&format!("../../fixtures/semantics/{name}"))
}
