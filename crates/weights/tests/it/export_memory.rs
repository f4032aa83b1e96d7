//! Exports hold a part of one tensor in memory at a time, whatever the size of the model.

use std::fs::{self, File};
use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::json;
use tempfile::TempDir;
use tinkex_weights::{
    AdapterExport, AdapterFile, ExportDType, ExportFormat, LoraPairRef, ModelConfig, PeftConfig,
};

use crate::export_gguf::add_tokenizer;

const VOCABULARY: usize = 1 << 16;
const WIDTH: usize = 256;
const RANK: usize = 4;
/// Maximum memory of an export in bytes. The embedding alone would take 67 MB in f32.
const LIMIT: u64 = 40_000_000;

/// Writes a file of tensors that are zeros: a sparse file, which takes no space. `size` is the size
/// of an element of the type `dtype`, in bytes.
fn write_zeros(
    path: &Path,
    dtype: &str,
    size: usize,
    tensors: impl IntoIterator<Item = (String, Vec<usize>)>,
) {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += size * shape.iter().product::<usize>();
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&header).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
}

/// Writes a model whose weights are zeros.
fn write_model(folder: &Path) {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": WIDTH,
        "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
        "tie_word_embeddings": true,
    });
    let text = config.to_string();
    fs::write(folder.join("config.json"), &text).unwrap();
    let config = ModelConfig::parse(text.as_bytes(), "config.json").unwrap();
    write_zeros(&folder.join("model.safetensors"), "BF16", 2, config.tensors());
    add_tokenizer(folder, 300);
}

fn write_adapter(folder: &Path) {
    let config = PeftConfig {
        rank: RANK,
        alpha: 8.0,
        base_model: "zeros".to_owned(),
        target_modules: vec!["lm_head".to_owned()],
    };
    let a = vec![0.5; RANK * WIDTH];
    let b = vec![0.25; VOCABULARY * RANK];
    let inputs = WIDTH;
    let outputs = VOCABULARY;
    let pair = LoraPairRef { module: "lm_head", inputs, outputs, a: &a, b: &b };
    AdapterFile::save(folder, &config, &[pair]).unwrap();
}

#[test]
fn an_export_holds_a_part_of_one_tensor_in_memory() {
    let folder = TempDir::new().unwrap();
    let base = folder.path().join("base");
    let adapter = folder.path().join("adapter");
    fs::create_dir(&base).unwrap();
    fs::create_dir(&adapter).unwrap();
    write_model(&base);
    write_adapter(&adapter);
    for (format, dtype) in
        [(ExportFormat::Hf, ExportDType::Bf16), (ExportFormat::Gguf, ExportDType::Q8_0)]
    {
        let to = folder.path().join(format.as_str());
        let mut bytes = 0;
        let used = allocation_counter::measure(|| {
            let export = AdapterExport::new(&adapter, &to).base(&base).format(format).dtype(dtype);
            let prepared = export.prepare().unwrap();
            bytes = prepared.write(|_| ControlFlow::Continue(())).unwrap().bytes;
        });
        assert!(bytes > 35_000_000, "{format} has {bytes} bytes");
        assert!(used.bytes_max < LIMIT, "{format} took {} bytes of memory", used.bytes_max);
        fs::remove_dir_all(to).unwrap();
    }
}

/// The unembedding of a large vocabulary has a matrix of hundreds of megabytes.
#[test]
fn the_export_of_an_adapter_holds_a_part_of_one_matrix_in_memory() {
    /// Rank at which B takes 67 MB in f32, half of it in the file.
    const HIGH_RANK: usize = 256;
    let folder = TempDir::new().unwrap();
    let adapter = folder.path().join("adapter");
    fs::create_dir(&adapter).unwrap();
    let config = json!({
        "peft_type": "LORA", "r": HIGH_RANK, "lora_alpha": 32, "target_modules": ["lm_head"],
    });
    fs::write(adapter.join("adapter_config.json"), config.to_string()).unwrap();
    // A file with the names of `peft` is copied; a file with the names of the hosted service is
    // rewritten.
    for module in ["lm_head", "model.unembed_tokens"] {
        let name = |matrix: &str| format!("base_model.model.{module}.lora_{matrix}.weight");
        let tensors =
            [(name("A"), vec![HIGH_RANK, WIDTH]), (name("B"), vec![VOCABULARY, HIGH_RANK])];
        write_zeros(&adapter.join("adapter_model.safetensors"), "F16", 2, tensors);
        let to = folder.path().join("peft");
        let mut bytes = 0;
        let used = allocation_counter::measure(|| {
            let export = AdapterExport::new(&adapter, &to).format(ExportFormat::Peft);
            let written = export.prepare().unwrap().write(|_| ControlFlow::Continue(()));
            bytes = written.unwrap().bytes;
        });
        assert!(bytes > 33_000_000, "{module} has {bytes} bytes");
        assert!(used.bytes_max < 8_000_000, "{module} took {} bytes of memory", used.bytes_max);
        fs::remove_dir_all(to).unwrap();
    }
}
