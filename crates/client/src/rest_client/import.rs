//! [`AdapterImport`]: uploads a PEFT adapter to a `tinkex` server.

use std::future::IntoFuture;
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tinkex_weights::{AdapterConversion, Error as FileError, PeftConfig};
use tinkex_wire::rest::{AdapterFiles, AdapterImported, ImportAdapter, ImportOptions};
use uuid::Uuid;

use crate::error::{Error, ErrorKind, Result};
use crate::transport::download::resume::blocking;

use super::RestClient;

/// Builder for the import of a PEFT adapter; created by [`RestClient::import_adapter`] and run by
/// `.await`.
///
/// ```no_run
/// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
/// let adapter = service.rest().import_adapter("adapter").base_model("Qwen/Qwen3-0.6B").await?;
/// let sampler = service.create_sampling_client_from(&adapter.sampler_weights_path).await?;
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`ErrorKind::InvalidInput`] if the folder has no adapter, or one that is damaged or not plain
/// LoRA; [`ErrorKind::Rejected`] if it does not fit the base model, or the server cannot import
/// adapters; any error of the request.
///
/// # Cancel safety
/// Dropping the future stops the upload. The server then imports nothing, unless it has already
/// received the whole adapter.
#[derive(Clone, Debug)]
#[must_use = "an import does nothing until it is awaited"]
pub struct AdapterImport {
    rest: RestClient,
    folder: PathBuf,
    options: ImportOptions,
}

impl RestClient {
    /// Imports the PEFT adapter in `folder` as checkpoints of a new training run: one to sample from
    /// and one to continue training from. Only `tinkex` servers support it.
    ///
    /// The tensors are read while they are sent.
    pub fn import_adapter(&self, folder: impl Into<PathBuf>) -> AdapterImport {
        let options = ImportOptions::default();
        AdapterImport { rest: self.clone(), folder: folder.into(), options }
    }
}

impl AdapterImport {
    /// Sets the base model. Defaults to the one that the adapter's configuration names. Logs a
    /// warning if the configuration names another one.
    pub fn base_model(mut self, name: impl Into<String>) -> Self {
        self.options = self.options.base_model(Some(name.into()));
        self
    }

    /// Sets the name of the checkpoints. Defaults to `imported`.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.options = self.options.name(Some(name.into()));
        self
    }

    async fn run(self) -> Result<AdapterImported> {
        let folder = self.folder;
        let (start, tensors, config) = blocking(move || check_files(&folder)).await?;
        if let Some(base) = &self.options.base_model
            && !config.may_be_base(base)
        {
            let named = &config.base_model;
            tracing::warn!(
                "the adapter was trained on {named:?} but is imported for {base:?}; results are \
                 wrong unless both are the same model"
            );
        }
        let request = ImportAdapter::new(Uuid::new_v4().to_string(), self.options, start);
        let request = request.tensors(tensors);
        self.rest.call("import_adapter", request).await.map_err(|error| match error.status() {
            // A `tinkex` server rejects invalid requests of this route with other statuses.
            Some(404 | 405 | 501) => {
                let message = "this server cannot import adapters";
                Error::new(ErrorKind::Rejected, message).with_source(error).with_hint(
                    "Use a tinkex server: start one with `tinkex serve`, or pass --local on the \
                     command line.",
                )
            }
            _ => error,
        })
    }
}

impl IntoFuture for AdapterImport {
    type Output = Result<AdapterImported>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let rest = self.rest.clone();
        rest.service().transfer(Box::pin(self.run()))
    }
}

/// Checks the configuration and the headers of an adapter. Returns the beginning of the request's
/// body, the file with the rest, and the configuration.
fn check_files(folder: &Path) -> Result<(Bytes, PathBuf, PeftConfig)> {
    let [config, tensors] = AdapterConversion::FILES.map(|name| folder.join(name));
    for file in [&config, &tensors] {
        if !file.is_file() {
            let message = format!("cannot import {}: not found", file.display());
            let hint = "Pass the folder of a PEFT adapter, saved as safetensors.";
            return Err(Error::new(ErrorKind::InvalidInput, message).with_hint(hint));
        }
    }
    let settings = PeftConfig::read(&config).map_err(file_error)?;
    AdapterConversion::open(folder).map_err(file_error)?;
    let failed = |error: io::Error| {
        let message = format!("cannot read {}: {error}", config.display());
        Error::new(ErrorKind::InvalidInput, message)
    };
    let start = AdapterFiles::start(&std::fs::read(&config).map_err(failed)?);
    Ok((start.into(), tensors, settings))
}

/// Converts an error of reading the adapter.
fn file_error(error: FileError) -> Error {
    let message = match &error {
        FileError::Io { source, .. } => format!("{error}: {source}"),
        _ => error.to_string(),
    };
    Error::new(ErrorKind::InvalidInput, message).with_source(error)
}
