//! The GGUF format: metadata, descriptions of tensors, and aligned little-endian data.
//!
//! `value` defines the values of the metadata and `value_encoding` their form in files, `cursor`
//! reads numbers and strings, `header` parses and validates everything before the data, `read` opens
//! a file, `write` creates one, `tensor_type` and `token_type` have the numbers of the types of
//! tensors and tokens. `model` opens a file as a base model: `config` derives its configuration from
//! the metadata, `names` translates the names of tensors, and `tokenizer` converts the tokenizer.

mod config;
mod cursor;
mod header;
mod model;
mod names;
mod read;
mod tensor_type;
pub(crate) mod token_type;
mod tokenizer;
mod value;
mod value_encoding;
mod write;

pub use model::GgufModel;
pub use names::gguf_tensor_name;
pub(crate) use names::{GGUF_EMBEDDING, GGUF_UNEMBEDDING, ROPE_FACTORS, has_interleaved_heads};
pub use read::GgufFile;
pub use tokenizer::GgufTokenizerFiles;
pub(crate) use tokenizer::pre_tokenizer_name;
pub use value::{GgufArray, GgufValue};
pub use write::{FillError, GgufWriter};

/// First four bytes of a file.
const MAGIC: &[u8; 4] = b"GGUF";
/// Alignment of tensors in bytes, unless the metadata has another alignment.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Key of the alignment in the metadata.
const ALIGNMENT_KEY: &str = "general.alignment";
/// Maximum number of dimensions of a tensor.
const MAX_DIMENSIONS: usize = 4;
