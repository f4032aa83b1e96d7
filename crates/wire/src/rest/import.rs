//! Import of PEFT adapters: an extension of `tinkex` servers.

use std::fmt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::request::{ApiRequest, json_response};
use crate::{InvalidInput, ModelId, RequestBody, Route, TinkerPath};

/// Imports a PEFT adapter as checkpoints of a new training run, to sample from and to continue
/// training from.
///
/// Only `tinkex` servers have this route. A retry with the same id imports the adapter once.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImportAdapter {
    /// Id that the client chooses, which becomes part of the run id: 1 to 64 letters, digits and
    /// dashes.
    pub import_id: String,
    /// Base model and name.
    pub options: ImportOptions,
    /// The two files of the adapter, or their beginning; see [`AdapterFiles`].
    pub files: Bytes,
    /// File with the rest of the body, `adapter_model.safetensors`, if `files` is the beginning.
    pub tensors: Option<PathBuf>,
}

/// Query of [`ImportAdapter`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ImportOptions {
    /// Base model of the server. `None` uses the base model that the adapter's configuration names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_model: Option<String>,
    /// Name of the checkpoints. Defaults to `imported`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Response to [`ImportAdapter`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AdapterImported {
    /// The new training run, which cannot be trained itself.
    pub training_run_id: ModelId,
    /// Path of the checkpoint to continue training from, without optimizer state.
    pub weights_path: TinkerPath,
    /// Path of the checkpoint to sample from.
    pub sampler_weights_path: TinkerPath,
    /// Base model of the adapter on the server.
    pub base_model: String,
    /// Rank of the adapter.
    pub lora_rank: u32,
    /// Size of the adapter in bytes.
    pub size_bytes: u64,
}

impl ImportAdapter {
    /// Creates a request with the body `files`, in the format of [`AdapterFiles`].
    #[must_use]
    pub fn new(import_id: impl Into<String>, options: ImportOptions, files: Bytes) -> Self {
        Self { import_id: import_id.into(), options, files, tensors: None }
    }

    /// Sets the file whose content follows `files` in the body. The file is read while it is sent.
    #[must_use]
    pub fn tensors(mut self, file: impl Into<PathBuf>) -> Self {
        self.tensors = Some(file.into());
        self
    }
}

impl ImportOptions {
    /// Sets the base model.
    #[must_use]
    pub fn base_model(mut self, base_model: Option<String>) -> Self {
        self.base_model = base_model;
        self
    }

    /// Sets the name of the checkpoints.
    #[must_use]
    pub fn name(mut self, name: Option<String>) -> Self {
        self.name = name;
        self
    }
}

impl AdapterImported {
    /// Creates a response without base model, rank and size, which the setters add.
    #[must_use]
    pub fn new(weights_path: TinkerPath, sampler_weights_path: TinkerPath) -> Self {
        Self {
            training_run_id: weights_path.run().clone(),
            weights_path,
            sampler_weights_path,
            base_model: String::new(),
            lora_rank: 0,
            size_bytes: 0,
        }
    }

    /// Sets the base model and the rank.
    #[must_use]
    pub fn adapter(mut self, base_model: impl Into<String>, lora_rank: u32) -> Self {
        self.base_model = base_model.into();
        self.lora_rank = lora_rank;
        self
    }

    /// Sets the size in bytes.
    #[must_use]
    pub fn size_bytes(mut self, size_bytes: u64) -> Self {
        self.size_bytes = size_bytes;
        self
    }
}

impl fmt::Debug for ImportAdapter {
    /// Prints the length of the files instead of their content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportAdapter")
            .field("import_id", &self.import_id)
            .field("options", &self.options)
            .field("files", &format_args!("{} bytes", self.files.len()))
            .field("tensors", &self.tensors)
            .finish()
    }
}

impl ApiRequest for ImportAdapter {
    type Response = AdapterImported;
    const ROUTE: Route = Route::ImportAdapter;

    fn params(&self) -> Vec<&str> {
        vec![&self.import_id]
    }

    fn query(&self) -> Result<String, InvalidInput> {
        crate::codec::query::encode(&self.options)
    }

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Binary(self.files.clone()))
    }

    fn body_file(&self) -> Option<&Path> {
        self.tensors.as_deref()
    }
}

json_response!(AdapterImported);

/// Body format of [`ImportAdapter`]: eight bytes with the length of `adapter_config.json` in
/// little-endian order, then that file, then `adapter_model.safetensors`.
///
/// ```
/// use tinkex_wire::rest::AdapterFiles;
///
/// let mut body = AdapterFiles::start(b"{}");
/// body.extend_from_slice(b"tensors");
/// let config_length = AdapterFiles::config_length(body.first_chunk().unwrap());
/// assert_eq!((config_length, &body[8..10], &body[10..]), (2, &b"{}"[..], &b"tensors"[..]));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct AdapterFiles;

impl AdapterFiles {
    /// Length of the first part in bytes.
    pub const PREFIX: usize = 8;

    /// Returns the beginning of a body, up to and including the configuration.
    #[must_use]
    pub fn start(config: &[u8]) -> Vec<u8> {
        [&(config.len() as u64).to_le_bytes(), config].concat()
    }

    /// Returns the length of the configuration, from the first bytes of a body. A malformed body may
    /// declare a length that exceeds the length of the body.
    #[must_use]
    pub fn config_length(prefix: &[u8; Self::PREFIX]) -> u64 {
        u64::from_le_bytes(*prefix)
    }
}
