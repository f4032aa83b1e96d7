//! [`ServerError`]: why a request was not accepted, without reference to HTTP.
//!
//! The routes map each variant to a status code. Clients retry after 408, 409, 429 and every
//! 5xx status, so the variants are divided by whether a retry can succeed: see
//! [`ServerError::is_permanent`].

use std::time::Duration;

use tinkex_wire::{
    DecodeError, DecodeErrorKind, InvalidInput, ModelId, SamplerId, SessionId, TinkerPath,
};

/// Reason why the server did not accept a request.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ServerError {
    /// The request was decoded, but asks for something that is not possible.
    #[error("{0}")]
    Invalid(String),
    /// The prompt and the tokens to sample exceed the context window of the model.
    #[error("{0}")]
    ContextLength(String),
    /// An object of that name already exists, so a retry fails too.
    #[error("{0}")]
    Conflict(String),
    /// The body is not a valid encoding of the request.
    #[error("{0}")]
    Malformed(String),
    /// The request refers to an object that does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The request refers to an object that no longer exists.
    #[error("{0}")]
    Gone(String),
    /// The request is not allowed in the current state of its session.
    #[error("{0}")]
    Forbidden(String),
    /// The body exceeds its size limit.
    #[error("{0}")]
    TooLarge(String),
    /// A limit is reached; retry after the given time.
    #[error("{message}")]
    Busy { message: String, retry_after: Duration },
    /// A file in the data folder cannot be written or read. A change that could not be written
    /// was rolled back.
    #[error("{0}")]
    StorageUnavailable(String),
    /// The worker thread has ended, and the server must be restarted; or an upstream does not
    /// respond.
    #[error("{0}")]
    Unavailable(String),
    /// An error of the server itself.
    #[error("{0}")]
    Internal(String),
}

impl ServerError {
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::Invalid(message.into())
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::NotFound(message.into())
    }

    pub fn no_session(id: &SessionId) -> Self {
        Self::NotFound(format!("session {id} does not exist"))
    }

    pub fn no_run(id: &ModelId) -> Self {
        Self::NotFound(format!("training run {id} does not exist"))
    }

    pub fn no_sampling_session(id: &SamplerId) -> Self {
        Self::NotFound(format!("sampling session {id} does not exist"))
    }

    pub fn no_checkpoint(path: &TinkerPath) -> Self {
        Self::NotFound(format!("checkpoint {path} does not exist"))
    }

    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::Forbidden(message.into())
    }

    /// Creates a [`Busy`](Self::Busy) error that asks the client to retry after one second.
    pub fn busy(message: impl Into<String>) -> Self {
        Self::Busy { message: message.into(), retry_after: Duration::from_secs(1) }
    }

    /// Creates the error for every request after the worker thread has panicked.
    pub fn worker_panicked() -> Self {
        Self::Unavailable(
            "the server has an internal error and must be restarted; accepted requests are kept"
                .to_owned(),
        )
    }

    /// Creates the error for every request after another server has claimed the data folder.
    pub fn superseded() -> Self {
        Self::Unavailable("another server has taken over the data; send requests to it".to_owned())
    }

    pub fn shutting_down() -> Self {
        Self::busy("the server is shutting down")
    }

    /// Creates the error for a change that could not be written and was rolled back.
    pub fn write_failed(error: &std::io::Error) -> Self {
        Self::StorageUnavailable(format!(
            "nothing was changed: cannot write to the server's disk: {error}"
        ))
    }

    /// Creates the error for a file in the data folder that cannot be read.
    pub fn read_failed(error: &std::io::Error) -> Self {
        Self::StorageUnavailable(format!("cannot read from the server's disk: {error}"))
    }

    /// Returns whether a retry of the request fails again.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Invalid(_)
            | Self::ContextLength(_)
            | Self::Conflict(_)
            | Self::Malformed(_)
            | Self::NotFound(_)
            | Self::Gone(_)
            | Self::Forbidden(_)
            | Self::TooLarge(_) => true,
            Self::Busy { .. }
            | Self::StorageUnavailable(_)
            | Self::Unavailable(_)
            | Self::Internal(_) => false,
        }
    }
}

impl From<DecodeError> for ServerError {
    fn from(error: DecodeError) -> Self {
        match error.kind() {
            DecodeErrorKind::TooLarge => Self::TooLarge(error.to_string()),
            _ => Self::Malformed(error.to_string()),
        }
    }
}

impl From<InvalidInput> for ServerError {
    fn from(error: InvalidInput) -> Self {
        Self::Invalid(error.to_string())
    }
}

/// Returns the message of an error and the messages of its causes, separated by colons.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        message = format!("{message}: {error}");
        cause = error.source();
    }
    message
}
