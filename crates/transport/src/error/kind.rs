//! [`ErrorKind`]: the classification of errors.

use std::fmt;

#[cfg(doc)]
use super::Error;

/// Classification of an [`Error`].
///
/// `Display` and [`as_str`](Self::as_str) give the name, for logs and metrics:
///
/// ```
/// use tinkex::ErrorKind;
///
/// assert_eq!(ErrorKind::RateLimited.to_string(), "rate_limited");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The credential is missing, malformed or rejected (401).
    Auth,
    /// The account has an open billing problem (402).
    Billing,
    /// The caller cancelled the operation, for example an export.
    Cancelled,
    /// The server's TLS certificate was rejected.
    Certificate,
    /// The client was closed.
    Closed,
    /// A setting is invalid.
    Config,
    /// An object of that name already exists, or it changed concurrently (409, or a response with
    /// the code `conflict`).
    Conflict,
    /// No connection could be made, or it was interrupted.
    Connect,
    /// The server's response could not be decoded.
    Decode,
    /// The result was not retrieved in time and the server discarded it (410 on a poll).
    Expired,
    /// The request is invalid and was not sent.
    InvalidInput,
    /// A file or folder on this machine cannot be read or written, for example because the disk is
    /// full.
    Io,
    /// The requested object does not exist (404).
    NotFound,
    /// A background task of the client or the caller's HTTP service panicked. This is a bug in the
    /// client, in the service or in a callback that was passed to the client.
    Panicked,
    /// The credential lacks the permission for this request (403).
    Permission,
    /// The server's rate limit was exceeded (429).
    RateLimited,
    /// The server rejected the request (400, 422 and any other 4xx).
    Rejected,
    /// The server failed (5xx).
    Server,
    /// The response or the result did not arrive in time.
    Timeout,
    /// The server executed the request, and the execution failed. [`Error::category`] returns
    /// whether the client or the server caused the failure.
    WorkFailed,
}

impl ErrorKind {
    /// Returns the name of the kind in lower case, with underscores.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auth => "auth",
            Self::Billing => "billing",
            Self::Cancelled => "cancelled",
            Self::Certificate => "certificate",
            Self::Closed => "closed",
            Self::Config => "config",
            Self::Conflict => "conflict",
            Self::Connect => "connect",
            Self::Decode => "decode",
            Self::Expired => "expired",
            Self::InvalidInput => "invalid_input",
            Self::Io => "io",
            Self::NotFound => "not_found",
            Self::Panicked => "panicked",
            Self::Permission => "permission",
            Self::RateLimited => "rate_limited",
            Self::Rejected => "rejected",
            Self::Server => "server",
            Self::Timeout => "timeout",
            Self::WorkFailed => "work_failed",
        }
    }

    pub(crate) fn from_status(status: u16) -> Self {
        match status {
            401 => Self::Auth,
            402 => Self::Billing,
            403 => Self::Permission,
            404 => Self::NotFound,
            409 => Self::Conflict,
            429 => Self::RateLimited,
            500.. => Self::Server,
            _ => Self::Rejected,
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
