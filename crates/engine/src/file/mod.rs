//! Files: models and adapters on disk.
//!
//! What comes in may be cut off, corrupted or hostile; every length is checked before it is used
//! and before anything is allocated for it. What goes out appears whole or not at all: it is
//! written aside, flushed, and renamed.

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
pub use model::ModelFolder;
pub use peft::PeftConfig;
pub use rope::{Rope, RopeScaling};
pub use safetensors::{DType, NamedTensor, TensorFile, TensorSlice, TensorView, write_tensors};
