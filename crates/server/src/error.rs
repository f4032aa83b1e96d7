//! [`ApiError`]: a refusal, and the only place that knows status codes.
//!
//! Clients send a request again after 408, 409, 429 and every 5xx. So those are for what time can
//! mend; a request that is wrong gets 400, 403, 404, 413 or 422, a conflict of names included.

use http::StatusCode;
use tinkex_wire::{DecodeError, DecodeErrorKind, InvalidInput};

/// Why a call was refused.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) detail: String,
    /// When to come back, in milliseconds.
    pub(crate) retry_after_ms: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), retry_after_ms: None }
    }

    pub(crate) fn bad(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    pub(crate) fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, detail)
    }

    pub(crate) fn forbidden(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, detail)
    }

    /// Whether sending the same again would be of no use.
    pub(crate) fn is_final(&self) -> bool {
        self.status.is_client_error()
            && !matches!(
                self.status,
                StatusCode::REQUEST_TIMEOUT | StatusCode::CONFLICT | StatusCode::TOO_MANY_REQUESTS
            )
    }

    /// Come back later.
    pub(crate) fn busy(detail: impl Into<String>, retry_after_ms: u64) -> Self {
        let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, detail);
        error.retry_after_ms = Some(retry_after_ms);
        error
    }

    /// The disk would not take it.
    pub(crate) fn disk(why: &std::io::Error) -> Self {
        let detail = format!("nothing was changed: the server could not write it down: {why}");
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, detail);
        error.retry_after_ms = Some(500);
        error
    }
}

impl From<DecodeError> for ApiError {
    fn from(error: DecodeError) -> Self {
        let status = match error.kind() {
            DecodeErrorKind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            _ => StatusCode::UNPROCESSABLE_ENTITY,
        };
        Self::new(status, error.to_string())
    }
}

impl From<InvalidInput> for ApiError {
    fn from(error: InvalidInput) -> Self {
        Self::bad(error.to_string())
    }
}

impl From<tinkex_engine::Error> for ApiError {
    fn from(error: tinkex_engine::Error) -> Self {
        match error.kind() {
            tinkex_engine::ErrorKind::Input | tinkex_engine::ErrorKind::Numeric => {
                Self::bad(error.to_string())
            }
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        }
    }
}
