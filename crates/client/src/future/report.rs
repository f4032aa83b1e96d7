//! What is written down about waiting for an answer.

use std::time::Duration;

use serde_json::json;
use tinkex_wire::{Category, JsonObject, Severity};

use crate::error::{Error, ErrorKind};
use crate::telemetry::Journal;

use super::poll::Taken;

/// Writes down why a poll, or the answer behind it, was a failure.
pub(super) fn failure(
    journal: &Journal,
    error: &Error,
    taken: &Taken,
    polls: u64,
    since: Duration,
) {
    let (event, severity) = match (error.kind(), error.status(), error.category()) {
        (_, _, Some(Category::User)) => ("application_error", Severity::Warning),
        (_, _, Some(_)) => ("application_error", Severity::Error),
        (ErrorKind::Decode, ..) => ("validation_error", Severity::Error),
        (_, Some(400), _) => ("api_status_error", Severity::Error),
        (_, Some(_), _) if error.is_retryable() => ("api_status_error", Severity::Warning),
        (_, Some(_), _) => ("api_status_error", Severity::Error),
        _ if error.is_retryable() => ("connection_error", Severity::Warning),
        _ => ("connection_error", Severity::Error),
    };
    let facts = [
        ("request_id", json!(taken.ticket.request_id)),
        ("request_type", json!(taken.request_type)),
        ("status_code", json!(error.status())),
        ("detail", json!(error.to_string())),
        ("kind", json!(format!("{:?}", error.kind()))),
        ("should_retry", json!(error.is_retryable())),
        ("is_user_error", json!(error.is_user_error())),
        ("iteration", json!(polls)),
        ("elapsed_time", json!(since.as_secs_f64())),
    ];
    let data: JsonObject =
        facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    journal.note(&format!("APIFuture.result_async.{event}"), severity, data);
}
