//! What is written down about waiting for an answer.

use std::time::Duration;

use serde_json::json;
use tinkex_wire::{ErrorCategory, JsonObject, Severity};

use crate::error::{Error, ErrorKind};
use crate::targets;
use crate::telemetry::{EventQueue, told};

use super::poll::Submitted;

/// Tells and writes down why a poll, or the answer behind it, was a failure.
pub(super) fn failure(
    events: Option<&EventQueue>,
    error: &Error,
    taken: &Submitted,
    polls: u64,
    since: Duration,
) {
    let (event, severity) = match (error.kind(), error.status(), error.category()) {
        (_, _, Some(ErrorCategory::User)) => ("application_error", Severity::Warning),
        (_, _, Some(_)) => ("application_error", Severity::Error),
        (ErrorKind::Decode, ..) => ("validation_error", Severity::Error),
        (_, Some(400), _) => ("api_status_error", Severity::Error),
        (_, Some(_), _) if error.is_retryable() => ("api_status_error", Severity::Warning),
        (_, Some(_), _) => ("api_status_error", Severity::Error),
        _ if error.is_retryable() => ("connection_error", Severity::Warning),
        _ => ("connection_error", Severity::Error),
    };
    let (request_id, request_type) = (&taken.response.request_id, taken.request_type);
    tracing::debug!(
        target: targets::POLL, event, %request_id, request_type, polls, %error, "poll failed"
    );
    let Some(events) = events else { return };
    let facts = [
        ("request_id", json!(taken.response.request_id)),
        ("request_type", json!(taken.request_type)),
        ("status_code", json!(error.status())),
        ("detail", json!(told(error))),
        ("kind", json!(format!("{:?}", error.kind()))),
        ("should_retry", json!(error.is_retryable())),
        ("is_user_error", json!(error.is_user_error())),
        ("iteration", json!(polls)),
        ("elapsed_time", json!(since.as_secs_f64())),
    ];
    let data: JsonObject =
        facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    events.note(&format!("APIFuture.result_async.{event}"), severity, data);
}

#[cfg(test)]
mod tests {
    use tinkex_wire::SubmitResponse;

    use super::*;
    use crate::telemetry::TelemetryScope;

    #[test]
    fn what_a_credential_command_printed_is_not_told() {
        let events = EventQueue::new(TelemetryScope::NoSession);
        let ticket = serde_json::from_value::<SubmitResponse>(json!({"request_id": "r"})).unwrap();
        let taken =
            Submitted { response: ticket, request_type: "Sample", submit_duration: Duration::ZERO };
        let error = Error::new(ErrorKind::Auth, "the credential command failed: hidden");
        failure(Some(&events), &error, &taken, 1, Duration::ZERO);
        let refused = Error::from_response(500, b"{\"detail\":\"overheated\"}", None);
        failure(Some(&events), &refused, &taken, 1, Duration::ZERO);
        let told = serde_json::to_string(&events.batch()).unwrap();
        assert!(told.contains("overheated") && !told.contains("hidden"), "{told}");
    }
}
