//! Errors in the shape of the OpenAI API.

use serde::Serialize;

use crate::{ErrorClass, InferenceError};

/// Error document: `{"error": …}`.
#[derive(Debug, Serialize)]
pub struct ErrorDocument<'a> {
    error: ErrorDetail<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorDetail<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
}

/// Returns the document of an error. `param` is the parameter that caused it.
#[must_use]
pub fn error_document<'a>(
    class: ErrorClass,
    message: &'a str,
    param: Option<&'a str>,
) -> ErrorDocument<'a> {
    let (kind, code) = match class {
        ErrorClass::InvalidRequest | ErrorClass::TooLarge => ("invalid_request_error", None),
        ErrorClass::ContextLength => ("invalid_request_error", Some("context_length_exceeded")),
        ErrorClass::Authentication => ("invalid_request_error", Some("invalid_api_key")),
        ErrorClass::Permission => ("permission_error", None),
        ErrorClass::NotFound => ("invalid_request_error", Some("not_found")),
        ErrorClass::RateLimit => ("rate_limit_error", Some("rate_limit_exceeded")),
        ErrorClass::Unavailable => ("server_error", Some("service_unavailable")),
        ErrorClass::Internal => ("server_error", None),
    };
    // The only object that a request names is its model.
    let code = if param == Some("model") && code == Some("not_found") {
        Some("model_not_found")
    } else {
        code
    };
    ErrorDocument { error: ErrorDetail { message, kind, param, code } }
}

/// Calls `send` with the document of an error that occurs within a stream.
pub(super) fn with_document<T>(
    error: &InferenceError,
    send: impl FnOnce(&ErrorDocument<'_>) -> T,
) -> T {
    let message = error.to_string();
    send(&error_document(error.class(), &message, error.param()))
}
