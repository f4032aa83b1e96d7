//! Errors of inference requests, independent of the API that reports them.

use crate::error::ServerError;

/// Reason why an inference request was not accepted or failed.
#[derive(Clone, Debug)]
pub(crate) struct InferenceError {
    pub(crate) error: ServerError,
    /// Parameter of the request that caused the error.
    pub(crate) param: Option<String>,
}

impl InferenceError {
    /// Creates the error for an invalid value of a parameter.
    pub(crate) fn invalid(param: &str, reason: impl std::fmt::Display) -> Self {
        let error = ServerError::invalid(format!("{param}: {reason}"));
        Self { error, param: Some(param.to_owned()) }
    }

    /// Adds the path of the object whose field is invalid, for example `messages[2]`.
    pub(crate) fn within(self, path: &str) -> Self {
        match self.param {
            Some(field) => {
                let message = self.error.to_string();
                let reason = message.strip_prefix(&field).and_then(|rest| rest.strip_prefix(": "));
                Self::invalid(&format!("{path}.{field}"), reason.unwrap_or(&message))
            }
            None => Self::invalid(path, self.error),
        }
    }
}

impl From<ServerError> for InferenceError {
    fn from(error: ServerError) -> Self {
        Self { error, param: None }
    }
}

/// Class of an error. Each API has its own names for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorClass {
    InvalidRequest,
    Authentication,
    Permission,
    NotFound,
    TooLarge,
    RateLimit,
    Unavailable,
    Internal,
}

impl From<&ServerError> for ErrorClass {
    fn from(error: &ServerError) -> Self {
        match error {
            ServerError::Invalid(_) | ServerError::Conflict(_) | ServerError::Malformed(_) => {
                Self::InvalidRequest
            }
            ServerError::NotFound(_) | ServerError::Gone(_) => Self::NotFound,
            ServerError::Forbidden(_) => Self::Permission,
            ServerError::TooLarge(_) => Self::TooLarge,
            ServerError::Busy { .. } => Self::RateLimit,
            ServerError::StorageUnavailable(_) | ServerError::Unavailable(_) => Self::Unavailable,
            ServerError::Internal(_) => Self::Internal,
        }
    }
}

impl ErrorClass {
    /// Returns the class of a response with an HTTP status of 400 or more.
    pub(crate) fn of_status(status: u16) -> Self {
        match status {
            401 => Self::Authentication,
            403 => Self::Permission,
            404 | 410 => Self::NotFound,
            413 => Self::TooLarge,
            429 => Self::RateLimit,
            503 => Self::Unavailable,
            500.. => Self::Internal,
            _ => Self::InvalidRequest,
        }
    }
}
