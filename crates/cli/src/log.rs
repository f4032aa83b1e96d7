//! What the SDK has to say on the way, told on standard error.
//!
//! Warnings are told, and on a terminal each retry (`retrying in 4s (429)`), so that nobody sits in
//! front of a silent program. A server that is gone is told once for all that wait for it, and once
//! when it is back. `-v`, `-vv` and `TINKER_LOG` show more.

use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tinkex::Env;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::args::{Format, Globals};
use crate::format::visible;

const RETRY: &str = tinkex::targets::RETRY;
/// Where the SDK says that nothing comes back, for every request that waits.
const LOST: &str = tinkex::targets::OUTAGE;
/// Where it says that a request was answered.
const HTTP: &str = tinkex::targets::HTTP;
/// Requests that ask for answers. A server that is about to go still answers those it has.
const POLLS: &str = "poll";

/// A stream that the log and the program both write to.
#[derive(Clone)]
pub(crate) struct Console(Arc<Mutex<ConsoleState>>);

/// A stream, and whether a bar stands where it goes on.
struct ConsoleState {
    stream: Box<dyn Write + Send>,
    drawn: bool,
    /// Whether it was told that the server does not answer.
    lost: bool,
    /// Whether events are of no interest any more.
    closed: bool,
}

/// Takes away what stands on the line.
const CLEAR: &str = "\r\u{1b}[K";
/// Takes away the rest of the line: what is drawn over itself ends with it.
const CLEAR_REST: &str = "\u{1b}[K";

impl ConsoleState {
    fn clear(&mut self) {
        if self.drawn {
            let _ = self.write_all(CLEAR.as_bytes());
        }
    }

    /// Tells of an event.
    fn tell(&mut self, line: &str) {
        if self.closed {
            return;
        }
        self.clear();
        // In one piece: a server in this program writes lines of its own.
        let _ = self.write_all(format!("{line}\n").as_bytes());
        let _ = self.flush();
    }
}

impl Write for ConsoleState {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.stream.write(bytes)?;
        self.drawn = bytes.ends_with(CLEAR_REST.as_bytes()) && bytes != CLEAR.as_bytes();
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl Console {
    pub(crate) fn new(stream: Box<dyn Write + Send>) -> Self {
        Self(Arc::new(Mutex::new(ConsoleState {
            stream,
            drawn: false,
            lost: false,
            closed: false,
        })))
    }

    /// Takes away the bar that stands on the line, if one does.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    /// From now on events are not told; what is written is.
    pub(crate) fn close_log(&self) {
        self.lock().closed = true;
    }

    fn lock(&self) -> MutexGuard<'_, ConsoleState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.lock().flush()
    }
}

/// Tells events, one line each.
pub(crate) struct ConsoleLog {
    err: Console,
    level: LevelFilter,
    /// Whether retries are told in a few words.
    retries: bool,
}

impl ConsoleLog {
    pub(crate) fn new(
        err: Console,
        env: &Env,
        globals: &Globals,
        format: Format,
        terminal: bool,
    ) -> Self {
        let calm = globals.quiet || format == Format::Json;
        let level = match (globals.verbose, env.get("TINKER_LOG")) {
            (0, Some("debug")) | (2, _) => LevelFilter::DEBUG,
            (0, Some("info")) | (1, _) => LevelFilter::INFO,
            (0, _) if calm => LevelFilter::OFF,
            (0, _) => LevelFilter::WARN,
            (3.., _) => LevelFilter::TRACE,
        };
        let retries = !calm && level < LevelFilter::DEBUG && (terminal || globals.verbose > 0);
        Self { err, level, retries }
    }

    fn tells_outages(&self) -> bool {
        self.level >= LevelFilter::WARN
    }

    /// A request came back. If it was told that none does, and this one was not waiting already, that
    /// is over.
    fn answered(&self, event: &Event<'_>) {
        let mut err = self.err.lock();
        if !err.lost {
            return;
        }
        let mut said = EventFields::default();
        event.record(&mut said);
        if said.status.is_some_and(|status| status < 500) && !said.lane.starts_with(POLLS) {
            err.lost = false;
            err.tell("the server answers again");
        }
    }
}

impl Subscriber for ConsoleLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        if metadata.is_span() {
            return false;
        }
        // Of other crates only what is serious: HTTP libraries tell every frame.
        let ours = metadata.target().starts_with("tinkex");
        let level = if ours { self.level } else { self.level.min(LevelFilter::WARN) };
        *metadata.level() <= level
            || (self.retries && metadata.target() == RETRY)
            || (self.tells_outages()
                && metadata.target() == HTTP
                && *metadata.level() == Level::DEBUG)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        let more = self.retries || self.tells_outages();
        Some(if more { self.level.max(LevelFilter::DEBUG) } else { self.level })
    }

    fn event(&self, event: &Event<'_>) {
        let (level, target) = (*event.metadata().level(), event.metadata().target());
        if target == HTTP {
            self.answered(event);
        }
        if level > self.level && target != RETRY {
            return;
        }
        let mut said = EventFields::default();
        event.record(&mut said);
        if level > self.level {
            if let Some(line) = said.retry() {
                self.err.lock().tell(&line);
            }
            return;
        }
        let word = match level {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        let mut err = self.err.lock();
        // Once for all that wait.
        if target == LOST && std::mem::replace(&mut err.lost, true) {
            return;
        }
        err.tell(&format!("{word}: {}{}", visible(&said.message), visible(&said.fields)));
    }

    // Spans are not enabled.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// What an event says.
#[derive(Default)]
struct EventFields {
    message: String,
    fields: String,
    seconds: Option<f64>,
    status: Option<u64>,
    lane: String,
}

impl EventFields {
    /// The few words about a retry.
    fn retry(&self) -> Option<String> {
        let seconds = self.seconds?;
        let why = self.status.map_or_else(|| "no answer".to_owned(), |status| status.to_string());
        Some(match seconds {
            ..1.0 => format!("retrying at once ({why})"),
            _ => format!("retrying in {seconds:.0}s ({why})"),
        })
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
        if field.name() == "lane" {
            value.clone_into(&mut self.lane);
        }
        self.record_debug(field, &value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
