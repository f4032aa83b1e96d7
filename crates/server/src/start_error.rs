//! [`StartError`]: why a server cannot start.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use tinkex_weights::Error as FileError;

#[cfg(doc)]
use crate::options::ServerOptions;
use tinkex_store::error::with_causes;

/// Error returned when a server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The address is not a loopback address and no API key is set.
    #[error("refusing to listen on {0}: other machines can reach it and no API key is set")]
    UnprotectedAddress(SocketAddr),
    /// The API key is an empty string.
    #[error("the API key is empty")]
    EmptyApiKey,
    /// The file with the API key that the server creates cannot be created or used. See
    /// [`ServerOptions::create_api_key`].
    #[error("cannot use API key file {}: {source}", path.display())]
    ApiKeyFile {
        /// Path of the file.
        path: PathBuf,
        /// The problem; `PermissionDenied` if other users can access the file.
        source: io::Error,
    },
    /// An allowed origin is not of the form `http://HOST:PORT`.
    #[error("invalid origin {0:?}: expected the scheme, host and port of a web page")]
    InvalidOrigin(String),
    /// The data folder or the address cannot be used, or the worker thread cannot be started.
    #[error("cannot {action} {target}: {source}")]
    Io {
        /// Step that failed.
        action: StartAction,
        /// Path, address or thread that the step used.
        target: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Another server uses the data folder.
    #[error("data folder {} is in use by another server", .0.display())]
    DataDirInUse(PathBuf),
    /// Unfinished requests need a base model that is not available. See
    /// [`ServerOptions::pending_on_start`].
    #[error(
        "base model {name:?} is not available, but {requests} unfinished requests need it{}",
        first_run(run.as_deref())
    )]
    MissingModel {
        /// Name of the base model.
        name: String,
        /// First training run of these requests, in alphabetical order; `None` if all requests are
        /// samples.
        run: Option<String>,
        /// Number of unfinished requests that need the base model.
        requests: usize,
    },
    /// Open training runs or unfinished requests are on an upstream that is not configured. See
    /// [`ServerOptions::pending_on_start`].
    #[error(
        "upstream {name:?} is not configured, but {runs} open training runs and {requests} \
         unfinished requests are on it{}",
        first_run(run.as_deref())
    )]
    MissingUpstream {
        /// Name of the upstream, as it was given to `ServerOptions::upstream`.
        name: String,
        /// First of the training runs in alphabetical order, if there is one.
        run: Option<String>,
        /// Number of training runs on the upstream whose sessions are open.
        runs: usize,
        /// Number of unfinished requests that the upstream must execute.
        requests: usize,
    },
    /// The certificate or the key of [`ServerOptions::tls`] cannot be used.
    #[error("cannot use TLS: {0}")]
    Tls(#[from] crate::tls::TlsError),
    /// The base URL or the key of an upstream is invalid.
    #[error("cannot use an upstream: {0}")]
    InvalidUpstream(String),
    /// A model of [`ServerOptions::quantize_models`] or [`ServerOptions::tokenizers`] is not
    /// served.
    #[error("cannot {action} {name:?}: no such base model; available: {available}")]
    UnknownModel {
        /// Step of the start that needs the model, as a verb for the message: `quantize` or `use a
        /// tokenizer for`.
        action: &'static str,
        /// Name of the model.
        name: String,
        /// Names of the served models, for the message.
        available: String,
    },
    /// A folder of [`ServerOptions::tokenizers`] has no tokenizer.
    #[error(
        "cannot use a tokenizer for {name:?}: {} has neither tokenizer.json nor tiktoken.model",
        folder.display()
    )]
    InvalidTokenizer {
        /// Name of the base model.
        name: String,
        /// The folder.
        folder: PathBuf,
    },
    /// The files of a base model are missing, damaged or not supported.
    #[error("cannot use base model {name:?}: {}", with_causes(&**error))]
    InvalidModel {
        /// Name of the base model.
        name: String,
        /// Folder or GGUF file of the base model.
        folder: PathBuf,
        /// The problem. It is part of the message and therefore not the
        /// [`source`](std::error::Error::source).
        error: Box<tinkex_engine::Error>,
    },
}

/// Step of the start that an I/O error interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StartAction {
    /// Creating the data folder or a file in it.
    Create,
    /// Using the data folder although other users can change it.
    Use,
    /// Locking the data folder.
    Lock,
    /// Reading the data folder.
    Read,
    /// Binding the listening socket.
    Listen,
    /// Spawning the worker thread.
    Spawn,
}

impl std::fmt::Display for StartAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Create => "create",
            Self::Use => "use",
            Self::Lock => "lock",
            Self::Read => "read",
            Self::Listen => "listen on",
            Self::Spawn => "start",
        })
    }
}

impl StartError {
    pub(crate) fn io(
        action: StartAction,
        target: impl std::fmt::Display,
    ) -> impl FnOnce(io::Error) -> Self {
        let target = target.to_string();
        move |source| Self::Io { action, target, source }
    }

    pub(crate) fn invalid_model(name: &str, folder: &Path, error: tinkex_engine::Error) -> Self {
        Self::InvalidModel {
            name: name.to_owned(),
            folder: folder.to_owned(),
            error: Box::new(error),
        }
    }

    pub(crate) fn unknown_model(action: &'static str, name: &str, available: String) -> Self {
        Self::UnknownModel { action, name: name.to_owned(), available }
    }

    pub(crate) fn invalid_tokenizer(name: &str, folder: &Path) -> Self {
        Self::InvalidTokenizer { name: name.to_owned(), folder: folder.to_owned() }
    }

    /// Returns a hint for the user about [`ApiKeyFile`](Self::ApiKeyFile), in one sentence; `None`
    /// for other errors.
    #[must_use]
    pub fn api_key_hint(&self) -> Option<String> {
        let Self::ApiKeyFile { path, source } = self else { return None };
        let shown = path.display();
        Some(match source.kind() {
            io::ErrorKind::PermissionDenied => format!(
                "Remove {shown} to get a new key at the next start; or, if no other user has read \
                 it, run `chmod 600 {shown}`."
            ),
            io::ErrorKind::InvalidData => {
                format!("Remove {shown} to get a new key at the next start.")
            }
            _ => format!("Make sure that {shown} can be created and read."),
        })
    }

    /// Returns a hint for the user about [`InvalidModel`](Self::InvalidModel) and
    /// [`InvalidTokenizer`](Self::InvalidTokenizer), in one sentence; `None` for other errors.
    #[must_use]
    pub fn model_hint(&self) -> Option<String> {
        if let Self::InvalidTokenizer { name, .. } = self {
            return Some(format!(
                "Pass the folder that contains tokenizer.json or tiktoken.model: --tokenizer \
                 {name}=FOLDER."
            ));
        }
        let Self::InvalidModel { folder: path, error, .. } = self else { return None };
        let shown = path.display();
        Some(match &**error {
            tinkex_engine::Error::File(FileError::UnknownArchitecture { .. }) => {
                "Choose a model of a supported architecture.".to_owned()
            }
            tinkex_engine::Error::File(FileError::Io { source, .. })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                format!(
                    "Check the path {shown}: expected a folder with config.json, *.safetensors and \
                     tokenizer.json, or a GGUF file."
                )
            }
            _ if path.is_file() => {
                format!(
                    "Download {shown} again, or choose a GGUF file with supported tensor types."
                )
            }
            _ => format!("Download the files in {shown} again, or correct the faulty file."),
        })
    }
}

/// Returns the end of a message that names a run.
fn first_run(run: Option<&str>) -> String {
    run.map_or_else(String::new, |run| format!(" (first run: {run})"))
}
