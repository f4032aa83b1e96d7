//! Errors of an export's files.

use tinkex_weights::Error as FileError;

use crate::error::{Error, ErrorKind};

/// Converts an error of reading or writing files.
pub(super) fn file_error(error: FileError) -> Error {
    let (kind, hint) = match &error {
        FileError::AlreadyExists { .. } => {
            (ErrorKind::Conflict, "Choose another folder, or allow this one to be replaced.")
        }
        FileError::NotEnoughSpace { .. } => {
            (ErrorKind::Config, "Free disk space, or choose a folder on another disk.")
        }
        FileError::Io { .. } => {
            (ErrorKind::Config, "Check that the path exists and is accessible.")
        }
        FileError::InvalidExport { .. } => {
            (ErrorKind::InvalidInput, "Choose another format or element type.")
        }
        FileError::Cancelled => (ErrorKind::Closed, "Run the export again."),
        FileError::InvalidTensor { .. } => {
            (ErrorKind::Decode, "Choose another element type, or an earlier checkpoint.")
        }
        FileError::BadFile { path, .. } if path.ends_with("tokenizer.json") => (
            ErrorKind::Decode,
            "Choose the format hf: GGUF files support the tokenizers of Llama 3, Qwen2, Qwen3, GPT-2 \
             and SmolLM.",
        ),
        _ => (
            ErrorKind::Decode,
            "Check that adapter and base model belong together and are complete.",
        ),
    };
    Error::new(kind, error.to_string()).with_source(error).with_hint(hint)
}
