//! Logging and telemetry of failed polls.

use std::time::Duration;

use serde_json::json;
use tinkex_wire::{ErrorCategory, JsonObject, Severity};

use crate::error::{Error, ErrorKind};
use crate::targets;
use crate::telemetry::{EventQueue, safe_message};

use super::Submitted;

/// Logs a failed poll or failed request, and records it in telemetry.
pub(super) fn failure(
    events: Option<&EventQueue>,
    error: &Error,
    submitted: &Submitted,
    polls: u64,
    elapsed: Duration,
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
    let request_id = &submitted.response.request_id;
    let request_type = submitted.request_type;
    tracing::debug!(
        target: targets::POLL, event, %request_id, request_type, polls, %error, "poll failed"
    );
    let Some(events) = events else { return };
    let fields = [
        ("request_id", json!(submitted.response.request_id)),
        ("request_type", json!(submitted.request_type)),
        ("status_code", json!(error.status())),
        ("detail", json!(safe_message(error))),
        ("kind", json!(format!("{:?}", error.kind()))),
        ("should_retry", json!(error.is_retryable())),
        ("is_user_error", json!(error.is_user_error())),
        ("iteration", json!(polls)),
        ("elapsed_time", json!(elapsed.as_secs_f64())),
    ];
    let data: JsonObject =
        fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    events.generic(&format!("APIFuture.result_async.{event}"), severity, data);
}

#[cfg(test)]
mod tests {
    use tinkex_wire::SubmitResponse;

    use super::*;
    use crate::telemetry::TelemetryScope;

    #[test]
    fn the_output_of_a_credential_command_is_not_recorded() {
        let events = EventQueue::new(TelemetryScope::NoSession);
        let response =
            serde_json::from_value::<SubmitResponse>(json!({"request_id": "r"})).unwrap();
        let submitted = Submitted {
            response,
            request_type: "Sample",
            submit_duration: Duration::ZERO,
            call_start: tokio::time::Instant::now(),
            attempts: 1,
        };
        let error = Error::new(ErrorKind::Auth, "credential command failed: hidden");
        failure(Some(&events), &error, &submitted, 1, Duration::ZERO);
        let rejected = Error::from_response(500, b"{\"detail\":\"overheated\"}", None);
        failure(Some(&events), &rejected, &submitted, 1, Duration::ZERO);
        let recorded = serde_json::to_string(&events.batch()).unwrap();
        assert!(recorded.contains("overheated") && !recorded.contains("hidden"), "{recorded}");
    }
}
