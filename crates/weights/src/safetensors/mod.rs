//! The safetensors format: an eight-byte header length, a JSON header, and little-endian data.

mod header;
mod read;
mod rename;
mod write;

pub use read::TensorFile;
pub use write::{NamedTensor, TensorSlice, write_tensors};
pub(crate) use write::{TensorInfo, header};
