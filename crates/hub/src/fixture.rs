//! Recorded behaviour of the Python SDK (`fixtures/behaviour`), for unit tests.

use std::path::Path;

use serde_json::Value;

/// Reads a fixture file.
pub(crate) fn load(file: &str) -> Value {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/behaviour");
    let text = std::fs::read(folder.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Returns the field `cases` of a fixture file.
pub(crate) fn cases(file: &str) -> Vec<Value> {
    load(file)["cases"].as_array().unwrap().clone()
}
