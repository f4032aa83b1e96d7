//! [`SaveOptions`]: under which name to save, and how.

use std::time::Duration;

use tinkex_wire::{Metadata, TinkerPath};

use crate::error::{Error, ErrorKind, Result};

/// How to save weights. A plain name saves for ever, unless the name is taken.
///
/// ```
/// use std::time::Duration;
/// use tinkex::SaveOptions;
///
/// let save = SaveOptions::new("step-100")
///     .ttl(Duration::from_secs(7 * 24 * 3600))
///     .overwrite()
///     .metadata("accuracy", "0.91");
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct SaveOptions {
    pub(super) name: String,
    pub(super) ttl: Option<Duration>,
    pub(super) overwrite: bool,
    pub(super) metadata: Metadata,
    pub(super) recipients: Vec<String>,
}

impl SaveOptions {
    /// Saves under a name.
    pub fn new(name: impl Into<String>) -> Self {
        let (metadata, recipients) = (Metadata::new(), Vec::new());
        Self { name: name.into(), ttl: None, overwrite: false, metadata, recipients }
    }

    /// Kept for this long, an hour at least.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Replaces a checkpoint of that name, if there is one; only for
    /// [`TrainingClient::save_state`](crate::TrainingClient::save_state).
    pub fn overwrite(mut self) -> Self {
        self.overwrite = true;
        self
    }

    /// Remembers something with it.
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.insert(key, value);
        self
    }

    /// Encrypts the files for this `age` public key as well; only for
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

    /// Refuses what makes no sense for this kind of checkpoint.
    pub(super) fn check(&self, kind: SaveKind) -> Result<()> {
        let wrong = |why: &str| {
            let why = format!("cannot save {:?}: {why}", self.name);
            Err(Error::new(ErrorKind::InvalidInput, why))
        };
        if self.name.is_empty() {
            return wrong("a checkpoint needs a name");
        }
        if self.ttl.is_some_and(|ttl| ttl.as_secs() == 0) {
            return wrong("a checkpoint that is kept for less than a second is not kept");
        }
        if self.overwrite && kind != SaveKind::State {
            return wrong("only a saved state can be replaced");
        }
        if !self.recipients.is_empty() && kind != SaveKind::External {
            return wrong("only external weights can be encrypted");
        }
        if !self.metadata.is_empty() && kind == SaveKind::External {
            return wrong("external weights carry no metadata");
        }
        if self.recipients.len() > MOST_RECIPIENTS {
            return wrong("it can be encrypted for 10 recipients at most");
        }
        Ok(())
    }
}

const MOST_RECIPIENTS: usize = 10;

/// What is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SaveKind {
    State,
    Sampler,
    External,
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

/// Weights saved as files to download.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExternalWeights {
    /// Their address; see
    /// [`RestClient::get_external_weights_urls`](crate::RestClient::get_external_weights_urls).
    pub path: TinkerPath,
    /// How large they are, if the server says so.
    pub size_bytes: Option<u64>,
}

/// The address of weights to sample from. Servers of the first protocol leave its kind out.
pub(super) fn sampler_path(said: &str) -> Result<TinkerPath> {
    let parts = said.strip_prefix("tinker://").and_then(|rest| rest.split_once('/'));
    match parts {
        Some((run, name)) if !name.contains('/') => {
            Ok(format!("tinker://{run}/sampler_weights/{name}").parse()?)
        }
        _ => Ok(said.parse()?),
    }
}
