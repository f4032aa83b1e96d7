//! Converts a downloaded adapter, so that `peft` loads every tensor.

use std::path::Path;
use std::sync::Arc;

use tinkex_files::remove_file_if_exists;
use tinkex_weights::{AdapterConversion, Error as FileError};
use tinkex_wire::TinkerPath;

use crate::error::{Error, ErrorKind, Result};
use crate::service::ServiceClient;

use super::folder::StagingFolder;
use super::part_file::write_error;
use super::space::SpaceBudget;
use crate::transport::download::resume::blocking;

/// Checks and converts the adapter among the complete files of `staging`, if there is one.
///
/// The entity tags of converted and of damaged files are removed, so that a later download requests
/// these files again instead of taking them for content of the server. An interrupted conversion
/// is repeated; it does not change files that are already converted.
///
/// # Errors
/// [`ErrorKind::Decode`] if the adapter is damaged or its tensors do not match its configuration;
/// [`ErrorKind::Io`] if a file cannot be written, or `space` has no space for a copy of the
/// tensors.
pub(super) async fn convert_adapter(
    service: &ServiceClient,
    staging: &StagingFolder,
    path: &TinkerPath,
    space: &Arc<SpaceBudget>,
) -> Result<()> {
    let etags = AdapterConversion::FILES.map(|name| staging.paths(name).etag);
    let forget = move || {
        etags.iter().try_for_each(|etag| {
            remove_file_if_exists(etag).map_err(|error| write_error(etag, &error))
        })
    };
    let files = staging.files();
    let opened = {
        let forget = forget.clone();
        let path = path.clone();
        let open = move || {
            AdapterConversion::open(&files).map_err(|error| {
                let error = file_error(&path, error);
                forget().err().unwrap_or(error)
            })
        };
        blocking(open).await?
    };
    let Some(conversion) = opened else { return Ok(()) };
    let base_model =
        if conversion.has_base_model() { None } else { base_model(service, path).await };
    if !conversion.is_needed(base_model.as_deref()) {
        return Ok(());
    }
    let path = path.clone();
    let space = Arc::clone(space);
    let folder = staging.files();
    let convert = move || {
        let needed = conversion.space_needed().map_err(|error| file_error(&path, error))?;
        space.require(&folder, needed).map_err(|error| write_error(&folder, &error))?;
        forget()?;
        conversion.apply(base_model.as_deref()).map_err(|error| file_error(&path, error))
    };
    blocking(convert).await
}

/// Returns the name of a checkpoint's base model. `peft` loads an adapter without it as well, so a
/// failed request is only logged.
async fn base_model(service: &ServiceClient, path: &TinkerPath) -> Option<String> {
    match service.rest().get_weights_info(path).await {
        Ok(info) => Some(info.base_model),
        Err(error) => {
            tracing::warn!(%error, %path, "cannot add the base model to the adapter configuration");
            None
        }
    }
}

/// Converts an error of reading or writing the files of the adapter.
fn file_error(path: &TinkerPath, error: FileError) -> Error {
    if let FileError::Io { path, source, .. } = &error {
        return write_error(path, source);
    }
    let name = |file: &Path| file.file_name().map(|name| name.to_string_lossy().into_owned());
    let reason = match &error {
        FileError::BadFile { path, reason } => name(path).map(|name| format!("{name}: {reason}")),
        FileError::MissingTensor { path, name: tensor } => {
            name(path).map(|name| format!("{name}: tensor {tensor} is missing"))
        }
        _ => None,
    };
    let reason = reason.unwrap_or_else(|| error.to_string());
    let message = format!("cannot use the adapter of {path}: {reason}");
    Error::new(ErrorKind::Decode, message).with_source(error).with_hint(
        "Run the download again. Request the raw files (--raw on the command line) to keep them as \
         the server sends them.",
    )
}
