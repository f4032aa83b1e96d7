//! The recorded numbers of `tests/golden`.

use std::path::PathBuf;

/// The three recorded models.
pub(crate) const MODELS: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// The folder of a recorded model.
pub(crate) fn folder(model: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(model)
}
