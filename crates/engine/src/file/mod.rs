//! Reads and writes model and adapter files.
//!
//! Files that are read may be truncated, corrupted or malicious: every length is checked before it
//! is used and before memory is allocated for it. Files and folders that are written replace their
//! predecessors atomically: they are written under a temporary name, flushed, and renamed.

mod adapter;
mod atomic;
mod config;
mod model;
mod peft;
mod rope;
mod safetensors;

pub use adapter::{AdapterFile, LoraPair, LoraPairRef, UnembeddingName};
pub use atomic::{write_file, write_folder};
pub use config::{Architecture, ModelConfig};
pub(crate) use model::ModelFolder;
pub use peft::PeftConfig;
pub use rope::{Rope, RopeScaling};
pub use safetensors::{DType, NamedTensor, StoredTensor, TensorFile, TensorSlice, write_tensors};
