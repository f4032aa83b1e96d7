//! Reads and writes the files of language models and LoRA adapters.
//!
//! | Files | Types |
//! |---|---|
//! | safetensors | [`TensorFile`], [`StoredTensor`], [`write_tensors`] |
//! | Hugging Face model folder | [`ModelFolder`], [`ModelConfig`] |
//! | GGUF | [`GgufFile`], [`GgufModel`], [`GgufWriter`] |
//! | quantized weights | [`BlockFormat`] |
//! | PEFT adapter folder | [`AdapterFile`], [`StoredAdapter`], [`PeftConfig`] |
//! | PEFT folder of the hosted service | [`AdapterConversion`] |
//! | merged models | [`AdapterExport`] |
//!
//! Files that are read may be truncated, corrupted or malicious: every length is checked before it
//! is used and before memory is allocated for it. Files and folders that are written replace their
//! predecessors atomically: they are written under a temporary name, flushed, and renamed.
//!
//! All functions block.

#![forbid(unsafe_code)]

mod adapter;
mod adapter_conversion;
mod atomic;
mod config;
mod config_json;
mod dtype;
mod error;
mod export;
mod gguf;
mod json_fields;
mod model_folder;
mod peft;
mod quant;
mod rope;
mod safetensors;
mod stored_adapter;
mod stored_tensor;

pub use adapter::{AdapterFile, LoraPair, LoraPairRef};
pub use adapter_conversion::AdapterConversion;
pub use atomic::{write_file, write_folder};
pub use config::{Architecture, ModelConfig};
pub use dtype::DType;
pub use error::{Error, Result};
pub use export::{
    AdapterExport, ConversionProgress, ExportDType, ExportFormat, ExportedModel, PreparedExport,
    RemoteAdapter,
};
pub use gguf::{
    FillError, GgufArray, GgufFile, GgufModel, GgufTokenizerFiles, GgufValue, GgufWriter,
    gguf_tensor_name,
};
pub use model_folder::ModelFolder;
pub use peft::PeftConfig;
pub use quant::BlockFormat;
pub use rope::{Rope, RopeScaling};
pub use safetensors::{NamedTensor, TensorFile, TensorSlice, write_tensors};
pub use stored_adapter::{StoredAdapter, StoredLoraPair};
pub use stored_tensor::StoredTensor;
