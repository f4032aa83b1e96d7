//! Access to the recorded models, which belong to the tests of `tinkex-engine`.

use std::fs;
use std::path::PathBuf;

/// Names of the recorded models.
pub(crate) const MODELS: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// Returns the path of a recorded model or file.
pub(crate) fn folder(model: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden").join(model)
}

/// Copies the files of a recorded model, without its adapter, to a temporary folder.
pub(crate) fn copy_of(model: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder(model)).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
    }
    copy
}
