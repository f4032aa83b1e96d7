//! [`HttpError`]: the only mapping from errors to status codes, headers and bodies.
//!
//! Clients retry after 408, 409, 429 and every 5xx status. The server uses these statuses only for
//! conditions that can change. An invalid request gets another 4xx status, and so does a request
//! for a name that is already in use.

use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderName, RETRY_AFTER};
use http::{Response, StatusCode};
use tinkex_inference::{ErrorClass, InferenceError};
use tinkex_store::error::ServerError;
use tinkex_wire::codec::json;
use tinkex_wire::{DecodeError, ErrorBody, ErrorCode, InvalidInput, JSON, header};

use super::{ResponseBody, respond};
use crate::drain::DRAIN_RETRY;

/// Time after which a client should retry a request that could not be written to disk.
const STORAGE_RETRY: Duration = Duration::from_millis(500);

/// An error response.
#[derive(Debug)]
pub(crate) struct HttpError {
    pub(super) status: StatusCode,
    pub(super) detail: String,
    /// Parameter of an inference request that caused the error.
    pub(super) param: Option<String>,
    /// Class of an error of an inference request; `None` to derive the class from the status.
    pub(super) class: Option<ErrorClass>,
    code: Option<ErrorCode>,
    retry_after: Option<Duration>,
}

impl HttpError {
    fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            status,
            detail: detail.into(),
            param: None,
            class: None,
            code: None,
            retry_after: None,
        }
    }

    pub(super) fn unauthorized() -> Self {
        Self::new(
            StatusCode::UNAUTHORIZED,
            "invalid API key in x-api-key or authorization; a server that was started without \
             --api-key-file has its key in the file `key` of its data folder",
        )
    }

    pub(super) fn wrong_key() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "this is not the API key of the server")
    }

    pub(super) fn login_required() -> Self {
        Self::new(
            StatusCode::UNAUTHORIZED,
            "log in with the API key of the server, or open the URL that the server printed",
        )
    }

    /// Returns the error for a login after too many failed logins.
    pub(super) fn too_many_logins(wait: Duration) -> Self {
        let seconds = wait.as_secs_f64().ceil();
        let message = format!("too many failed logins; try again in {seconds} s");
        ServerError::Busy { message, retry_after: wait }.into()
    }

    pub(super) fn method_not_allowed(detail: String) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, detail)
    }

    pub(super) fn body_timeout(timeout: Duration) -> Self {
        let detail = format!("the body did not arrive within {} s", timeout.as_secs_f64());
        Self::new(StatusCode::REQUEST_TIMEOUT, detail)
    }

    pub(super) fn unsupported_encoding() -> Self {
        let detail = "content-encoding: not supported; use zstd or identity";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail)
    }

    /// Creates the response to new work while the server is drained.
    pub(super) fn draining() -> Self {
        let detail = "the server will stop soon and accepts no new work; accepted requests are \
                      executed and can be polled; retry";
        Self {
            retry_after: Some(DRAIN_RETRY),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, detail)
        }
    }

    /// Returns the response in the shape of the Tinker API.
    pub(super) fn into_response(self) -> Response<ResponseBody> {
        let body = json::encode(&ErrorBody::new(self.detail.clone()).code(self.code));
        let body = body.unwrap_or_else(|_| Bytes::from_static(b"{\"detail\":\"?\"}"));
        self.into_response_with(body)
    }

    /// Returns the response with a body in the shape of another API.
    pub(super) fn into_response_with(self, body: Bytes) -> Response<ResponseBody> {
        let mut response = respond(JSON, body);
        *response.status_mut() = self.status;
        if let Some(after) = self.retry_after {
            let millis = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
            let name = HeaderName::from_static(header::RETRY_AFTER_MS);
            response.headers_mut().insert(name, millis.into());
            // For clients that do not know the header with milliseconds.
            response.headers_mut().insert(RETRY_AFTER, millis.div_ceil(1_000).into());
        }
        response
    }
}

impl From<ServerError> for HttpError {
    fn from(error: ServerError) -> Self {
        let (status, retry_after) = match &error {
            ServerError::Invalid(_) | ServerError::ContextLength(_) | ServerError::Conflict(_) => {
                (StatusCode::BAD_REQUEST, None)
            }
            ServerError::Malformed(_) => (StatusCode::UNPROCESSABLE_ENTITY, None),
            ServerError::NotFound(_) => (StatusCode::NOT_FOUND, None),
            ServerError::Gone(_) => (StatusCode::GONE, None),
            ServerError::Forbidden(_) => (StatusCode::FORBIDDEN, None),
            ServerError::TooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, None),
            ServerError::Busy { retry_after, .. } => {
                (StatusCode::TOO_MANY_REQUESTS, Some(*retry_after))
            }
            ServerError::StorageUnavailable(_) => {
                (StatusCode::SERVICE_UNAVAILABLE, Some(STORAGE_RETRY))
            }
            ServerError::Unavailable(_) => (StatusCode::SERVICE_UNAVAILABLE, None),
            ServerError::Internal(_) => (StatusCode::INTERNAL_SERVER_ERROR, None),
        };
        let code = matches!(error, ServerError::Conflict(_)).then_some(ErrorCode::Conflict);
        Self { status, detail: error.to_string(), param: None, class: None, code, retry_after }
    }
}

impl From<InferenceError> for HttpError {
    fn from(error: InferenceError) -> Self {
        let status = match error.class() {
            ErrorClass::InvalidRequest | ErrorClass::ContextLength => StatusCode::BAD_REQUEST,
            ErrorClass::Authentication => StatusCode::UNAUTHORIZED,
            ErrorClass::Permission => StatusCode::FORBIDDEN,
            ErrorClass::NotFound => StatusCode::NOT_FOUND,
            ErrorClass::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            ErrorClass::RateLimit => StatusCode::TOO_MANY_REQUESTS,
            ErrorClass::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorClass::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self {
            status,
            detail: error.to_string(),
            param: error.param().map(str::to_owned),
            class: Some(error.class()),
            code: None,
            retry_after: error.retry_after(),
        }
    }
}

impl From<DecodeError> for HttpError {
    fn from(error: DecodeError) -> Self {
        ServerError::from(error).into()
    }
}

impl From<InvalidInput> for HttpError {
    fn from(error: InvalidInput) -> Self {
        ServerError::from(error).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permanent_error_has_a_status_that_clients_do_not_retry() {
        let text = || "x".to_owned();
        for error in [
            ServerError::Invalid(text()),
            ServerError::Conflict(text()),
            ServerError::Malformed(text()),
            ServerError::NotFound(text()),
            ServerError::Gone(text()),
            ServerError::Forbidden(text()),
            ServerError::TooLarge(text()),
            ServerError::busy(text()),
            ServerError::StorageUnavailable(text()),
            ServerError::Unavailable(text()),
            ServerError::Internal(text()),
        ] {
            let permanent = error.is_permanent();
            let status = HttpError::from(error).status;
            let retried = status.is_server_error() || matches!(status.as_u16(), 408 | 409 | 429);
            assert_eq!(permanent, !retried, "{status}");
        }
    }

    #[test]
    fn a_busy_response_says_when_to_retry() {
        let response = HttpError::from(ServerError::busy("queue is full")).into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER_MS], "1000");
        assert_eq!(response.headers()[RETRY_AFTER], "1");
    }
}
