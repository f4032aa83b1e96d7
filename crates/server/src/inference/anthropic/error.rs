//! Errors in the shape of the Anthropic API.

use serde::Serialize;

use crate::inference::{ErrorClass, EventWriter, InferenceError};

/// `{"type": "error", "error": …}`.
#[derive(Serialize)]
pub(crate) struct AnthropicError<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    error: ErrorDetail<'a>,
}

#[derive(Serialize)]
struct ErrorDetail<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    message: &'a str,
}

/// Returns the document of an error.
pub(crate) fn error_document(class: ErrorClass, message: &str) -> AnthropicError<'_> {
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
    let message = error.error.to_string();
    out.event("error", &error_document(ErrorClass::from(&error.error), &message));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ServerError;

    #[test]
    fn an_error_within_a_stream_is_an_event() {
        let mut out = EventWriter::default();
        write_error(&ServerError::shutting_down().into(), &mut out);
        let expected = "event: error\ndata: {\"type\":\"error\",\"error\":\
            {\"type\":\"rate_limit_error\",\"message\":\"the server is shutting down\"}}\n\n";
        assert_eq!(out.take(), expected);
    }
}
