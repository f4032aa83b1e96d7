//! Access to the recorded models in `tests/golden`.

use std::path::PathBuf;

/// Names of the recorded models.
pub(crate) const MODELS: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// Returns the path of a recorded model or file.
pub(crate) fn folder(model: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(model)
}
