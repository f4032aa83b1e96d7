//! [`GgufModel`]: a GGUF file as a base model.

use std::collections::BTreeSet;
use std::path::Path;

use super::config;
use super::names::{ROPE_FACTORS, gguf_tensor_name, has_interleaved_heads};
use super::read::GgufFile;
use super::tokenizer::{GgufTokenizerFiles, tokenizer_files};
use super::value::GgufValue;
use crate::stored_tensor::RowOrder;
use crate::{Error, ModelConfig, Result, StoredTensor};

/// A model in an open GGUF file. Tensors have their Hugging Face names and row order, and are read
/// from the file when they are used.
#[derive(Debug)]
pub struct GgufModel {
    file: GgufFile,
    config: ModelConfig,
    warnings: Vec<String>,
}

impl GgufModel {
    /// Opens the file `path`.
    ///
    /// Checks that every tensor of the architecture exists, with the right shape and a supported
    /// type. Reads only the header and the factors of the rotary frequencies.
    ///
    /// # Errors
    /// As [`GgufFile::open`]; [`Error::UnknownArchitecture`] for an architecture that is not
    /// supported; [`Error::MissingTensor`] or [`Error::BadFile`] if a tensor is missing or does not
    /// match the metadata, or if the metadata is invalid or requests an unsupported feature.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::new(GgufFile::open(path)?)
    }

    /// Checks a file that is already open, as [`open`](Self::open) does.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn new(file: GgufFile) -> Result<Self> {
        let (config, warnings) = config::model_config(&file)?;
        let mut model = Self { file, config, warnings };
        model.check()?;
        Ok(model)
    }

    /// Checks the tensors of the architecture. Refuses other tensors that would change the result,
    /// and warns about the rest.
    fn check(&mut self) -> Result<()> {
        let mut known = BTreeSet::from([ROPE_FACTORS.to_owned()]);
        for (name, shape) in self.config.tensors() {
            let stored = self.tensor(&name)?.with_shape(&shape)?.as_float()?;
            known.insert(stored.name().to_owned());
        }
        let unused: Vec<&str> = self.file.names().filter(|name| !known.contains(*name)).collect();
        if let Some(name) = unused.iter().find(|name| changes_result(name)) {
            let reason = format!(
                "tensor {name} changes the result of the model, but the architecture {} does not \
                 have it",
                self.config.architecture.model_type()
            );
            return Err(Error::bad_file(self.file.path(), reason));
        }
        if let Some(first) = unused.first() {
            let path = self.file.path().display();
            let count = unused.len();
            self.warnings.push(format!(
                "{path} has tensors that its architecture does not have, and which are ignored: \
                 {first}{}",
                if count > 1 { format!(" and {} more", count - 1) } else { String::new() }
            ));
        }
        Ok(())
    }

    /// Returns the architecture and dimensions of the model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the open file.
    #[must_use]
    pub fn file(&self) -> &GgufFile {
        &self.file
    }

    /// Returns warnings about properties of the file that do not prevent its use.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns the tensor that Hugging Face files call `name`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if the file does not contain it, [`Error::BadFile`] if its type is
    /// not supported.
    pub fn tensor(&self, name: &str) -> Result<StoredTensor<'_>> {
        let missing =
            || Error::MissingTensor { path: self.file.path().to_owned(), name: name.to_owned() };
        let stored = self.file.tensor(&gguf_tensor_name(name).ok_or_else(missing)?)?;
        Ok(if has_interleaved_heads(name, self.config.architecture) {
            stored.with_row_order(RowOrder::Interleaved { head_dim: self.config.head_dim })
        } else {
            stored
        })
    }

    /// Returns the chat template of the file, if it has one.
    #[must_use]
    pub fn chat_template(&self) -> Option<&str> {
        self.file.get("tokenizer.chat_template").and_then(GgufValue::as_str)
    }

    /// Returns the tokenizer and the chat template of the file, as the files of a Hugging Face
    /// folder.
    ///
    /// # Errors
    /// [`Error::BadFile`] if the file has no tokenizer, or a tokenizer that is not supported.
    pub fn tokenizer_files(&self) -> Result<GgufTokenizerFiles> {
        tokenizer_files(&self.file, &self.config)
    }
}

/// Returns whether a tensor that the architecture does not have would change the result: biases and
/// scales are added to, and multiplied with, the outputs of layers that the architecture does have.
fn changes_result(name: &str) -> bool {
    [".bias", ".scale"].iter().any(|suffix| name.ends_with(suffix))
}
