//! Readers of model and adapter files.

use std::path::Path;
use std::sync::LazyLock;

use tempfile::TempDir;
use tinkex_weights::{
    AdapterConversion, AdapterFile, GgufFile, GgufModel, ModelConfig, StoredAdapter, StoredTensor,
    TensorFile,
};

/// Folder of the files that are read, in memory if the system has such a file system.
static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    tempfile::Builder::new().prefix("tinkex-fuzz-").tempdir_in(parent).expect("a folder")
});

/// Reads a GGUF file as a file, as a model, and its tokenizer.
pub(crate) fn gguf(input: &[u8]) {
    let Ok(file) = GgufFile::from_bytes(input.to_vec(), "x.gguf") else { return };
    for name in file.names() {
        if let Ok(tensor) = file.tensor(name) {
            read(&tensor);
        }
    }
    let Ok(model) = GgufModel::new(file) else { return };
    let _ = model.tokenizer_files();
    for (name, _) in model.config().tensors().take(1_000) {
        if let Ok(tensor) = model.tensor(&name) {
            read(&tensor);
        }
    }
}

pub(crate) fn safetensors(input: &[u8]) {
    let path = FOLDER.path().join("x.safetensors");
    std::fs::write(&path, input).expect("written");
    let Ok(file) = TensorFile::open(&path) else { return };
    file.tensors().for_each(|tensor| read(&tensor));
}

fn read(tensor: &StoredTensor<'_>) {
    let Ok(bytes) = tensor.bytes() else { return };
    assert_eq!(tensor.dtype().byte_len(tensor.count()), Some(bytes.len()));
    if let Ok(float) = tensor.as_float() {
        let values = float.to_f32().expect("the bytes have been read");
        assert_eq!(values.len(), tensor.count());
    }
}

/// Reads an adapter folder. The input is the configuration, a zero byte, and the tensors.
pub(crate) fn adapter(input: &[u8]) {
    let split = input.iter().position(|byte| *byte == 0).unwrap_or(input.len());
    let config = &input[..split];
    let tensors = input.get(split + 1..).unwrap_or_default();
    let folder = FOLDER.path().join("adapter");
    std::fs::create_dir_all(&folder).expect("created");
    std::fs::write(folder.join("adapter_config.json"), config).expect("written");
    std::fs::write(folder.join("adapter_model.safetensors"), tensors).expect("written");
    let _ = StoredAdapter::open(&folder);
    let _ = AdapterFile::load(&folder);
    if let Ok(Some(conversion)) = AdapterConversion::open(&folder)
        && conversion.apply(Some("base")).is_ok()
    {
        let converted = AdapterConversion::open(&folder).expect("converted").expect("both files");
        assert!(!converted.is_needed(Some("base")), "a converted adapter needs a conversion");
    }
}

/// Reads the `config.json` of a model.
pub(crate) fn model_config(input: &[u8]) {
    let Ok(config) = ModelConfig::parse(input, "config.json") else { return };
    // A configuration may name billions of layers; the tensors of the first ones are computed.
    config.tensors().take(1_000).for_each(drop);
}
