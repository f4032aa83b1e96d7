//! How a client is doing, told to the server in batches.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::request::{json_request, json_response};
use crate::time::Timestamp;
use crate::{InvalidInput, JsonObject};

/// Events of one client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TelemetryBatch {
    /// What happened, at most [`TelemetryBatch::MAX_EVENTS`] at a time.
    pub events: Vec<TelemetryEvent>,
    /// The operating system.
    pub platform: String,
    /// The client's version.
    pub sdk_version: String,
    /// The session, or a made-up id for a client that has none.
    pub session_id: String,
    /// One id per process.
    pub process_uuid: String,
}

impl TelemetryBatch {
    /// How many events one call carries at most.
    pub const MAX_EVENTS: usize = 100;

    fn check_events(&self) -> Result<(), InvalidInput> {
        if (1..=Self::MAX_EVENTS).contains(&self.events.len()) {
            return Ok(());
        }
        let why = format!("{} are not 1 to {}", self.events.len(), Self::MAX_EVENTS);
        Err(InvalidInput::new("events", why))
    }
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TelemetryEvent {
    /// A random id.
    pub event_id: String,
    /// How many events of the client came before.
    pub event_session_index: u64,
    /// How bad it was.
    pub severity: Severity,
    /// When.
    pub timestamp: Timestamp,
    /// What.
    #[serde(flatten)]
    pub kind: EventKind,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "SCREAMING_SNAKE_CASE")]
pub enum EventKind {
    /// The client started.
    SessionStart,
    /// The client ended.
    SessionEnd {
        /// How long it ran: see [`format_duration`].
        duration: String,
    },
    /// Something failed that was not the user's fault.
    UnhandledException {
        /// What went wrong.
        error_message: String,
        /// What kind of error.
        error_type: String,
        /// Where in the program.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        traceback: Option<String>,
    },
    /// Anything else.
    GenericEvent {
        /// Its name, one of few.
        event_name: String,
        /// More about it.
        #[serde(default)]
        event_data: JsonObject,
    },
}

/// How bad an event was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Severity {
    /// Of interest to developers.
    Debug,
    /// As expected.
    Info,
    /// Worth a look.
    Warning,
    /// Something failed.
    Error,
    /// Nothing works.
    Critical,
}

/// The events have arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TelemetryResponse {
    /// Always [`TelemetryStatus::Accepted`].
    pub status: TelemetryStatus,
}

/// What became of the events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TelemetryStatus {
    /// They were taken.
    Accepted,
}

/// A duration as the API writes it.
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
    let (seconds, micros) = (duration.as_secs(), duration.subsec_micros());
    let days = match seconds / 86_400 {
        0 => String::new(),
        1 => "1 day, ".to_owned(),
        n => format!("{n} days, "),
    };
    let fraction = if micros == 0 { String::new() } else { format!(".{micros:06}") };
    let (h, m, s) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{days}{h}:{m:02}:{s:02}{fraction}")
}

json_response!(TelemetryResponse);

json_request! {
    TelemetryBatch: Telemetry => TelemetryResponse, check TelemetryBatch::check_events;
}
