//! Access to the recorded models, which belong to the tests of `tinkex-engine`.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;
use tinkex_weights::{NamedTensor, StoredTensor, TensorFile, TensorSlice, write_tensors};

/// Names of the recorded models.
pub(crate) const MODELS: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// Returns the path of a recorded model or file.
pub(crate) fn folder(model: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden").join(model)
}

/// Copies the files of a recorded model, without its adapter, to a temporary folder.
pub(crate) fn copy_of(model: &str) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder(model)).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
    }
    copy
}

/// Changes fields of a JSON file of the folder.
pub(crate) fn change_json(folder: &TempDir, file: &str, changes: &Value) {
    let path = folder.path().join(file);
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        json[key] = value.clone();
    }
    fs::write(path, json.to_string()).unwrap();
}

/// A tensor of a file, in memory.
pub(crate) struct OwnedTensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

impl OwnedTensor {
    fn new(tensor: StoredTensor<'_>) -> Self {
        let name = tensor.name().to_owned();
        let shape = tensor.shape().to_vec();
        Self { name, shape, values: tensor.to_f32().unwrap() }
    }
}

/// Rewrites the tensors of a folder with one file.
pub(crate) fn change_tensors(folder: &TempDir, change: impl FnOnce(&mut Vec<OwnedTensor>)) {
    let path = folder.path().join("model.safetensors");
    let file = TensorFile::open(&path).unwrap();
    let mut tensors: Vec<OwnedTensor> = file.tensors().map(OwnedTensor::new).collect();
    change(&mut tensors);
    let refs: Vec<NamedTensor<'_>> = tensors
        .iter()
        .map(|tensor| NamedTensor {
            name: &tensor.name,
            shape: &tensor.shape,
            values: TensorSlice::F32(&tensor.values),
        })
        .collect();
    write_tensors(&path, &refs, &[("format", "pt")]).unwrap();
}
