//! Errors in the shape of the Anthropic API.

use serde::Serialize;

use crate::{ErrorClass, EventWriter, InferenceError};

/// Error document: `{"type": "error", "error": …}`.
#[derive(Debug, Serialize)]
pub struct AnthropicError<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    error: ErrorDetail<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorDetail<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    message: &'a str,
}

/// Returns the document of an error.
#[must_use]
pub fn error_document(class: ErrorClass, message: &str) -> AnthropicError<'_> {
    let kind = match class {
        ErrorClass::InvalidRequest | ErrorClass::ContextLength => "invalid_request_error",
        ErrorClass::Authentication => "authentication_error",
        ErrorClass::Permission => "permission_error",
        ErrorClass::NotFound => "not_found_error",
        ErrorClass::TooLarge => "request_too_large",
        ErrorClass::RateLimit => "rate_limit_error",
        ErrorClass::Unavailable => "overloaded_error",
        ErrorClass::Internal => "api_error",
    };
    AnthropicError { kind: "error", error: ErrorDetail { kind, message } }
}

/// Writes the event of an error that occurs within a stream.
pub(super) fn write_error(error: &InferenceError, out: &mut EventWriter) {
    let message = error.to_string();
    out.event("error", &error_document(error.class(), &message));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_within_a_stream_is_an_event() {
        let mut out = EventWriter::default();
        let error = InferenceError::new(ErrorClass::RateLimit, "the server is shutting down");
        write_error(&error, &mut out);
        let expected = "event: error\ndata: {\"type\":\"error\",\"error\":\
            {\"type\":\"rate_limit_error\",\"message\":\"the server is shutting down\"}}\n\n";
        assert_eq!(out.take(), expected);
    }
}
