//! [`ConnectionNotices`]: short notices about retries and outages.

use std::collections::BTreeSet;
use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tinkex::Lane;
use tinkex::targets::{HTTP, OUTAGE, RETRY};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use crate::console::Console;

use super::event_fields::EventFields;

/// Kinds of notices to print.
#[derive(Clone, Copy)]
pub(super) struct Notices {
    pub(super) retries: bool,
    pub(super) outages: bool,
}

/// Prints short notices about retries and outages of connections:
///
/// ```text
/// retrying in 4s (429)
/// warning: no connection to the Hugging Face hub (https://huggingface.co); retrying
/// the server responds again
/// ```
pub(super) struct ConnectionNotices {
    console: Console,
    notices: Notices,
    /// Hosts whose outage was reported. Every pending request emits events: without this set, an
    /// outage would be reported many times.
    unreachable: Mutex<BTreeSet<RemoteHost>>,
    /// Text of the latest notice of a retry, and when its delay ends.
    last_retry: Mutex<Option<(String, Instant)>>,
}

impl ConnectionNotices {
    pub(super) fn new(console: Console, notices: Notices) -> Self {
        Self { console, notices, unreachable: Mutex::default(), last_retry: Mutex::default() }
    }

    /// Reports a request without a response, unless the outage of the host was reported already.
    fn report_outage(&self, host: RemoteHost) {
        if !self.notices.outages {
            return;
        }
        let notice = format!("warning: no connection to {host}; retrying");
        if self.unreachable().insert(host) {
            self.console.log_line(&notice);
        }
    }

    /// Reports a retry, unless the same notice was printed within its delay: a 429 delays all
    /// samples of a command at once.
    fn report_retry(&self, notice: String, seconds: Option<f64>) {
        let delay = Duration::try_from_secs_f64(seconds.unwrap_or_default()).unwrap_or_default();
        let now = Instant::now();
        let mut last = self.last_retry.lock();
        if last.as_ref().is_some_and(|(text, until)| *text == notice && now < *until) {
            return;
        }
        self.console.log_line(&notice);
        *last = now.checked_add(delay).map(|until| (notice, until));
    }

    /// Reports the end of the API server's outage, if it responds. Outages of other hosts do not
    /// end, because their responses emit no event: each is reported once per command.
    fn report_response(&self, fields: &EventFields) {
        let responds = fields.status.is_some_and(|status| status < 500);
        // A server that shuts down still responds to pending polls.
        let is_poll = fields.lane.is_some_and(Lane::is_poll);
        if responds && !is_poll && self.unreachable().remove(&RemoteHost::ApiServer) {
            self.console.log_line("the server responds again");
        }
    }

    fn unreachable(&self) -> MutexGuard<'_, BTreeSet<RemoteHost>> {
        self.unreachable.lock()
    }
}

impl<S: Subscriber> Layer<S> for ConnectionNotices {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        match event.metadata().target() {
            RETRY => {
                let fields = EventFields::of(event);
                match retry_notice(&fields) {
                    Some(notice) if self.notices.retries => {
                        self.report_retry(notice, fields.seconds);
                    }
                    Some(_) if fields.status.is_none() => {
                        self.report_outage(RemoteHost::of(&fields));
                    }
                    _ => {}
                }
            }
            // Only polls emit this event, and only the API server is polled. The end of the outage
            // is an event of a lower level.
            OUTAGE if *event.metadata().level() == Level::WARN => {
                self.report_outage(RemoteHost::ApiServer);
            }
            HTTP if self.unreachable().contains(&RemoteHost::ApiServer) => {
                self.report_response(&EventFields::of(event));
            }
            _ => {}
        }
    }
}

/// Host that requests are sent to.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RemoteHost {
    ApiServer,
    /// Hugging Face hub, or a storage server that it redirects to, with its origin.
    Hub(String),
    /// Storage server of checkpoint files, with its origin.
    FileHost(String),
}

impl RemoteHost {
    /// Returns the host that the request of a [`RETRY`] event was sent to.
    fn of(fields: &EventFields) -> Self {
        let origin = || fields.origin.clone().unwrap_or_default();
        match fields.lane {
            Some(Lane::Hub) => Self::Hub(origin()),
            Some(Lane::File) => Self::FileHost(origin()),
            _ => Self::ApiServer,
        }
    }
}

impl fmt::Display for RemoteHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ApiServer => f.write_str("the server"),
            Self::Hub(origin) => write!(f, "the Hugging Face hub ({origin})"),
            Self::FileHost(origin) => write!(f, "the file host ({origin})"),
        }
    }
}

/// Describes a retry. Returns `None` for events without a delay, which announce no retry.
fn retry_notice(fields: &EventFields) -> Option<String> {
    let seconds = fields.seconds?;
    let cause = match (fields.status, RemoteHost::of(fields)) {
        (Some(status), _) => status.to_string(),
        (None, RemoteHost::ApiServer) => "no response".to_owned(),
        (None, host) => format!("no response from {host}"),
    };
    Some(match seconds {
        ..1.0 => format!("retrying now ({cause})"),
        _ => format!("retrying in {seconds:.0}s ({cause})"),
    })
}
