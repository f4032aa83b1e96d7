//! [`EventFields`]: the fields of a `tracing` event.

use std::fmt::{self, Write as _};

use tinkex::Lane;
use tracing::Event;
use tracing::field::{Field, Visit};

/// Fields of an event: all of them as text, and some by name.
#[derive(Default)]
pub(super) struct EventFields {
    pub(super) message: String,
    /// All fields but the message, each as ` name=value`.
    pub(super) others: String,
    /// Delay before a retry, in seconds.
    pub(super) seconds: Option<f64>,
    /// HTTP status of the response, if there was one.
    pub(super) status: Option<u64>,
    pub(super) lane: Option<Lane>,
    /// Scheme, host and port of the server that a download or hub request was sent to.
    pub(super) origin: Option<String>,
}

impl EventFields {
    pub(super) fn of(event: &Event<'_>) -> Self {
        let mut fields = Self::default();
        event.record(&mut fields);
        fields
    }
}

impl Visit for EventFields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        if field.name() == "seconds" {
            self.seconds = Some(value);
        }
        self.record_debug(field, &value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "status" {
            self.status = Some(value);
        }
        self.record_debug(field, &value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "lane" => self.lane = Lane::from_name(value),
            "origin" => self.origin = Some(value.to_owned()),
            _ => {}
        }
        self.record_debug(field, &value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.others, " {name}={value:?}"),
        };
    }
}
