//! The safetensors format: an eight-byte header length, a JSON header, and little-endian data.
//!
//! `header` validates the header, `read` opens a file, `write` creates one, and `rename` copies one
//! with other names of its tensors.

mod header;
mod read;
mod rename;
mod write;

pub use read::TensorFile;
pub use write::{NamedTensor, TensorSlice, write_tensors};
pub(crate) use write::{TensorInfo, header};
