//! [`SaveOptions`]: name, lifetime and metadata of a checkpoint to save.

use std::time::Duration;

use tinkex_wire::{Metadata, ModelId, Seq, SubmitRequest, TinkerPath};

use crate::error::{Error, ErrorKind, Result};
use crate::future::ApiFuture;
use crate::hint::Hint;

use super::TrainingClient;

/// Maximum number of recipients of an encrypted checkpoint.
const MAX_RECIPIENTS: usize = 10;

/// Name of a checkpoint to save, with optional settings.
///
/// A plain string converts into options with that name: the checkpoint never expires, and saving
/// fails if the name exists.
///
/// ```
/// use std::time::Duration;
/// use tinkex::SaveOptions;
///
/// let options = SaveOptions::new("step-100")
///     .ttl(Duration::from_secs(7 * 24 * 3600))
///     .overwrite()
///     .metadata("accuracy", "0.91");
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use = "options do nothing until they are passed to a save method"]
pub struct SaveOptions {
    pub(super) name: String,
    pub(super) ttl: Option<Duration>,
    pub(super) overwrite: bool,
    pub(super) metadata: Metadata,
    pub(super) recipients: Vec<String>,
}

impl SaveOptions {
    /// Creates options for a checkpoint called `name`. The name must not be empty.
    pub fn new(name: impl Into<String>) -> Self {
        let metadata = Metadata::new();
        let recipients = Vec::new();
        Self { name: name.into(), ttl: None, overwrite: false, metadata, recipients }
    }

    /// Sets the lifetime after which the server deletes the checkpoint (default: unlimited).
    ///
    /// Rounded down to whole seconds. Servers accept one hour or more.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Replaces an existing checkpoint of the same name (default: saving fails).
    ///
    /// Accepted only by [`TrainingClient::save_state`](crate::TrainingClient::save_state).
    pub fn overwrite(mut self) -> Self {
        self.overwrite = true;
        self
    }

    /// Stores a key and value with the checkpoint. A later value replaces an earlier one.
    ///
    /// Not accepted by
    /// [`TrainingClient::save_weights_external`](crate::TrainingClient::save_weights_external).
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.insert(key, value);
        self
    }

    /// Encrypts the files for an `age` public key, in addition to the keys of earlier calls. At
    /// most 10 keys.
    ///
    /// Accepted only by
    /// [`TrainingClient::save_weights_external`](crate::TrainingClient::save_weights_external).
    pub fn encrypt_for(mut self, recipient: impl Into<String>) -> Self {
        self.recipients.push(recipient.into());
        self
    }

    pub(super) fn ttl_seconds(&self) -> Option<u64> {
        self.ttl.map(|ttl| ttl.as_secs())
    }

    pub(super) fn user_metadata(&self) -> Option<Metadata> {
        (!self.metadata.is_empty()).then(|| self.metadata.clone())
    }

    /// Checks the options that depend on the kind of checkpoint.
    pub(super) fn validate(&self, kind: SaveKind) -> Result<()> {
        let cause = if self.name.is_empty() {
            "the name is empty"
        } else if self.ttl.is_some_and(|ttl| ttl.as_secs() == 0) {
            "ttl is less than one second"
        } else if self.overwrite && kind != SaveKind::State {
            "only save_state supports overwrite"
        } else if !self.recipients.is_empty() && kind != SaveKind::External {
            "only save_weights_external supports encryption"
        } else if !self.metadata.is_empty() && kind == SaveKind::External {
            "save_weights_external does not support metadata"
        } else if self.recipients.len() > MAX_RECIPIENTS {
            "more than 10 encryption recipients"
        } else {
            return Ok(());
        };
        let message = format!("cannot save checkpoint {:?}: {cause}", self.name);
        Err(Error::new(ErrorKind::InvalidInput, message))
    }
}

/// Kind of checkpoint to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SaveKind {
    State,
    Sampler,
    External,
}

impl SaveKind {
    /// Adds a hint to the error of a save if a checkpoint of this name exists.
    fn explain_conflict(self, error: Error) -> Error {
        if error.kind() != ErrorKind::Conflict {
            return error;
        }
        error.with_hint(match self {
            Self::State => Hint::OverwriteCheckpoint,
            Self::Sampler | Self::External => Hint::ChooseAnotherName,
        })
    }
}

impl TrainingClient {
    /// Queues a request that saves a checkpoint, and converts its result with `finish`.
    pub(super) fn enqueue_save<S, T>(
        &self,
        kind: SaveKind,
        request: impl FnOnce(ModelId, Seq) -> S + Send + 'static,
        finish: impl FnOnce(S::Output) -> Result<T> + Send + 'static,
    ) -> ApiFuture<T>
    where
        S: SubmitRequest<Output: Send> + Send + Sync + 'static,
        T: Send + 'static,
    {
        self.enqueue_work(move |shared, mut reservation| async move {
            reservation.wait().await;
            let saved = shared.send_next(reservation, request).await;
            finish(saved.map_err(|error| kind.explain_conflict(error))?)
        })
    }
}

impl From<&str> for SaveOptions {
    fn from(name: &str) -> Self {
        Self::new(name)
    }
}

impl From<String> for SaveOptions {
    fn from(name: String) -> Self {
        Self::new(name)
    }
}

/// Weights that were saved as downloadable files.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExternalWeights {
    /// Path of the checkpoint, for
    /// [`RestClient::get_external_weights_urls`](crate::RestClient::get_external_weights_urls).
    pub path: TinkerPath,
    /// Total size of the files in bytes, if the server reports it.
    pub size_bytes: Option<u64>,
}

/// Parses the path of sampler weights. Servers of the first protocol version omit the segment
/// `sampler_weights` of the path.
pub(super) fn sampler_path(path: &str) -> Result<TinkerPath> {
    let segments = path.strip_prefix("tinker://").and_then(|rest| rest.split_once('/'));
    match segments {
        Some((run, name)) if !name.contains('/') => {
            Ok(format!("tinker://{run}/sampler_weights/{name}").parse()?)
        }
        _ => Ok(path.parse()?),
    }
}
