//! Telemetry events that clients report to the server.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::SDK_VERSION;
use crate::request::{json_request, json_response};
use crate::time::Timestamp;
use crate::{InvalidInput, JsonObject};

/// Reports events of one client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TelemetryBatch {
    /// Events to report, 1 to [`TelemetryBatch::MAX_EVENTS`].
    pub events: Vec<TelemetryEvent>,
    /// Operating system of the client.
    pub platform: String,
    /// Protocol version of the client.
    pub sdk_version: String,
    /// Id of the session, or a generated id if the client has no session.
    pub session_id: String,
    /// Random id of the client process.
    pub process_uuid: String,
}

impl TelemetryBatch {
    /// Maximum number of events per request.
    pub const MAX_EVENTS: usize = 100;

    /// Creates a batch of events.
    pub fn new(
        events: Vec<TelemetryEvent>,
        platform: impl Into<String>,
        session_id: impl Into<String>,
        process_uuid: impl Into<String>,
    ) -> Self {
        Self {
            events,
            platform: platform.into(),
            sdk_version: SDK_VERSION.to_owned(),
            session_id: session_id.into(),
            process_uuid: process_uuid.into(),
        }
    }

    fn validate_events(&self) -> Result<(), InvalidInput> {
        if (1..=Self::MAX_EVENTS).contains(&self.events.len()) {
            return Ok(());
        }
        let reason =
            format!("must have 1 to {} entries, not {}", Self::MAX_EVENTS, self.events.len());
        Err(InvalidInput::new("events", reason))
    }
}

/// A telemetry event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TelemetryEvent {
    /// Random id of the event.
    pub event_id: String,
    /// Number of earlier events of the client.
    pub event_session_index: u64,
    /// Severity of the event.
    pub severity: Severity,
    /// Time of the event.
    pub timestamp: Timestamp,
    /// Kind of the event and its properties.
    #[serde(flatten)]
    pub kind: EventKind,
}

impl TelemetryEvent {
    /// Creates an event.
    pub fn new(
        event_id: impl Into<String>,
        event_session_index: u64,
        severity: Severity,
        timestamp: Timestamp,
        kind: EventKind,
    ) -> Self {
        Self { event_id: event_id.into(), event_session_index, severity, timestamp, kind }
    }
}

/// Kind of a telemetry event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "SCREAMING_SNAKE_CASE")]
#[non_exhaustive]
pub enum EventKind {
    /// The client started.
    SessionStart,
    /// The client ended.
    SessionEnd {
        /// Run time of the client, formatted by [`format_duration`].
        duration: String,
    },
    /// An error that the user did not cause.
    UnhandledException {
        /// Message of the error.
        error_message: String,
        /// Type of the error.
        error_type: String,
        /// Backtrace of the error.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        traceback: Option<String>,
    },
    /// Any other event.
    GenericEvent {
        /// Name of the event, from a small fixed set.
        event_name: String,
        /// Properties of the event.
        #[serde(default)]
        event_data: JsonObject,
    },
}

/// Severity of a telemetry event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Severity {
    /// Diagnostic information.
    Debug,
    /// Normal operation.
    Info,
    /// Unexpected, but handled.
    Warning,
    /// An operation failed.
    Error,
    /// The client cannot continue.
    Critical,
}

/// Response to [`TelemetryBatch`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TelemetryResponse {
    /// Always [`TelemetryStatus::Accepted`].
    pub status: TelemetryStatus,
}

impl TelemetryResponse {
    /// Response for accepted events.
    pub const ACCEPTED: Self = Self { status: TelemetryStatus::Accepted };
}

/// Status of reported events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TelemetryStatus {
    /// The server accepted the events.
    Accepted,
}

/// Formats a duration like Python's `str(timedelta)`, with microsecond precision.
///
/// ```
/// use std::time::Duration;
/// use tinkex_wire::format_duration;
///
/// assert_eq!(format_duration(Duration::from_micros(3_661_000_250)), "1:01:01.000250");
/// assert_eq!(format_duration(Duration::from_secs(86_402)), "1 day, 0:00:02");
/// ```
#[must_use]
pub fn format_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let micros = duration.subsec_micros();
    let days = match seconds / 86_400 {
        0 => String::new(),
        1 => "1 day, ".to_owned(),
        n => format!("{n} days, "),
    };
    let fraction = if micros == 0 { String::new() } else { format!(".{micros:06}") };
    let h = seconds / 3600 % 24;
    let m = seconds / 60 % 60;
    let s = seconds % 60;
    format!("{days}{h}:{m:02}:{s:02}{fraction}")
}

json_response!(TelemetryResponse);

json_request! {
    TelemetryBatch: Telemetry => TelemetryResponse, validate TelemetryBatch::validate_events;
}
