//! Errors of an export's files.

use std::io;

use tinkex_weights::Error as FileError;

use crate::download::SPACE_HINT;
use crate::error::{Error, ErrorKind};

/// Converts an error of reading or writing files.
pub(super) fn file_error(error: FileError) -> Error {
    let (kind, hint) = match &error {
        FileError::AlreadyExists { .. } => {
            (ErrorKind::Conflict, "Choose another folder, or allow this one to be replaced.")
        }
        FileError::NotEnoughSpace { .. } => (ErrorKind::Io, SPACE_HINT),
        FileError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
            (ErrorKind::Io, SPACE_HINT)
        }
        FileError::Io { .. } => (ErrorKind::Io, "Check that the path exists and is accessible."),
        FileError::InvalidExport { .. } => {
            (ErrorKind::InvalidInput, "Choose another format, or options that this one supports.")
        }
        FileError::InvalidBase { .. } => (
            ErrorKind::InvalidInput,
            "Pass the Hugging Face folder of the base model (--base FOLDER on the command line).",
        ),
        FileError::Cancelled => (ErrorKind::Cancelled, "Run the export again."),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_becomes_full_has_the_hint_about_space() {
        let full = FileError::io("write", "model.safetensors".as_ref());
        let error = file_error(full(io::ErrorKind::StorageFull.into()));
        assert_eq!(error.kind(), ErrorKind::Io);
        assert_eq!(error.hint().unwrap().as_str(), SPACE_HINT);
        let denied = FileError::io("write", "model.safetensors".as_ref());
        let error = file_error(denied(io::ErrorKind::PermissionDenied.into()));
        assert_ne!(error.hint().unwrap().as_str(), SPACE_HINT);
    }
}
