//! [`ExportFormat`]: the file format of an export.

use std::fmt;
use std::str::FromStr;

use super::ExportDType;

/// Format of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExportFormat {
    /// Hugging Face model folder with the merged weights: safetensors, configuration, tokenizer.
    #[default]
    Hf,
    /// PEFT adapter folder: the adapter alone, without the base model.
    Peft,
    /// Folder with one GGUF file, which contains the merged weights, the tokenizer and the chat
    /// template.
    Gguf,
}

impl ExportFormat {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Hf, Self::Peft, Self::Gguf];

    /// Returns the name of the format, for example `hf`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hf => "hf",
            Self::Peft => "peft",
            Self::Gguf => "gguf",
        }
    }

    /// Checks that the format can store the element type. Returns the reason if it cannot.
    pub(super) fn check_dtype(self, dtype: ExportDType) -> Result<(), String> {
        match self {
            Self::Hf if dtype.stored().is_none() => {
                Err(format!("format hf cannot store {dtype}; choose format gguf for it"))
            }
            Self::Peft => Err(format!(
                "format peft keeps the element type of the adapter and cannot convert it to {dtype}"
            )),
            Self::Hf | Self::Gguf => Ok(()),
        }
    }

    /// Checks that the format can split the weights into files of at most `bytes` bytes. Returns the
    /// reason if it cannot.
    pub(super) fn check_shard_bytes(self, bytes: u64) -> Result<(), String> {
        match self {
            Self::Hf if bytes == 0 => {
                Err("the maximum size of a file is 0, expected at least 1 byte".to_owned())
            }
            Self::Hf => Ok(()),
            Self::Peft | Self::Gguf => Err(format!(
                "format {self} has one file of weights and no maximum size; choose format hf to \
                 split the weights"
            )),
        }
    }
}

impl fmt::Display for ExportFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for ExportFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = Self::ALL;
        all.into_iter().find(|format| format.as_str() == text).ok_or_else(|| {
            let names = all.map(Self::as_str).join(", ");
            format!("unknown format {text:?}, expected one of {names}")
        })
    }
}
