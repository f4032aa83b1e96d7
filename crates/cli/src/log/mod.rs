//! The log on standard error: events of the SDK and, with `serve`, of the server.
//!
//! `serve` logs events with time stamps, as text or JSON. For the other commands, two layers of
//! `tracing-subscriber` write the log:
//!
//! - events at the chosen level, one line each (`warning: …`);
//! - [`ConnectionNotices`], which reports retries on a terminal (`retrying in 4s (429)`) and
//!   reports an outage once instead of once for every pending request.

mod connection_notices;
mod event_fields;

use std::fmt;
use std::io;

use clap::ValueEnum;
use tinkex::Env;
use tinkex::targets::{HTTP, OUTAGE, RETRY};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{Targets, filter_fn};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;

use crate::args::{Globals, OutputFormat};
use crate::console::{Console, LogWriter};
use crate::environment::{Environment, LogScope};
use crate::format::{escape_controls, escape_controls_except, escape_controls_in_json};
use crate::style::Style;

use connection_notices::{ConnectionNotices, Notices};
use event_fields::EventFields;

/// Format of the log of `tinkex serve`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// One line of text per event
    #[default]
    Text,
    /// One JSON object per event
    Json,
}

/// Least severe level that the log of `tinkex serve` includes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl From<LogLevel> for LevelFilter {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Off => Self::OFF,
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
            LogLevel::Trace => Self::TRACE,
        }
    }
}

/// Log options of `tinkex serve`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerLog {
    pub(crate) format: LogFormat,
    /// Overrides `-v`, `-q` and `TINKER_LOG`.
    pub(crate) level: Option<LogLevel>,
    pub(crate) colors: bool,
}

/// Installs the log for the current command. It is uninstalled when the returned guard is dropped,
/// except with [`LogScope::AllThreads`].
pub(crate) fn install(
    console: &Console,
    environment: &Environment,
    globals: &Globals,
    format: OutputFormat,
    server: Option<ServerLog>,
) -> Option<tracing::subscriber::DefaultGuard> {
    let requested = requested_level(&environment.variables, globals);
    if let Some(server) = server {
        let default = if globals.quiet { LevelFilter::WARN } else { LevelFilter::INFO };
        let level = server.level.map_or_else(|| requested.unwrap_or(default), Into::into);
        let writer = EscapedLog { console: console.clone(), server };
        let events = tracing_subscriber::fmt::layer().with_writer(writer);
        let filter = own_targets(level);
        return match server.format {
            LogFormat::Json => {
                let events = events.json().flatten_event(true);
                set_subscriber(
                    environment,
                    tracing_subscriber::registry().with(events.with_filter(filter)),
                )
            }
            LogFormat::Text => {
                let events = events.with_ansi(server.colors).with_target(false);
                set_subscriber(
                    environment,
                    tracing_subscriber::registry().with(events.with_filter(filter)),
                )
            }
        };
    }
    let quiet = globals.quiet || format == OutputFormat::Json;
    let default = if quiet { LevelFilter::OFF } else { LevelFilter::WARN };
    let level = requested.unwrap_or(default);
    let interactive = environment.terminals.err.is_some() || globals.verbose > 0;
    let notices = Notices {
        // At the debug level the events themselves are logged.
        retries: interactive && !quiet && level < LevelFilter::DEBUG,
        outages: level >= LevelFilter::WARN,
    };
    let events = tracing_subscriber::fmt::layer()
        .event_format(PlainEvents(console.style()))
        .with_writer(console.clone())
        .with_filter(without_notices(own_targets(level), level));
    let active = notices.retries || notices.outages;
    // The closure must reject what the level hint excludes: `tracing-subscriber` asserts it in
    // debug builds.
    let notice_filter = filter_fn(move |metadata| {
        active
            && metadata.is_event()
            && *metadata.level() <= Level::DEBUG
            && [RETRY, OUTAGE, HTTP].contains(&metadata.target())
    })
    .with_max_level_hint(LevelFilter::DEBUG);
    let notices = ConnectionNotices::new(console.clone(), notices).with_filter(notice_filter);
    set_subscriber(environment, tracing_subscriber::registry().with(events).with(notices))
}

/// Installs the subscriber for this thread or for the process, as the environment demands.
fn set_subscriber(
    environment: &Environment,
    subscriber: impl Subscriber + Send + Sync + 'static,
) -> Option<tracing::subscriber::DefaultGuard> {
    match environment.log_scope {
        LogScope::ThisThread => Some(tracing::subscriber::set_default(subscriber)),
        LogScope::AllThreads => {
            // Fails if the process already has a subscriber, which remains installed.
            let _ = tracing::subscriber::set_global_default(subscriber);
            None
        }
    }
}

/// Excludes the events that [`ConnectionNotices`] reports in its own words. At the debug level the
/// retries themselves are logged.
fn without_notices(targets: Targets, level: LevelFilter) -> Targets {
    let targets = targets.with_target(OUTAGE, LevelFilter::OFF);
    if level < LevelFilter::DEBUG { targets.with_target(RETRY, LevelFilter::OFF) } else { targets }
}

/// Returns the level that `-v` or `TINKER_LOG` requests. Other values of `TINKER_LOG` than `info`
/// and `debug` are ignored.
fn requested_level(variables: &Env, globals: &Globals) -> Option<LevelFilter> {
    match (globals.verbose, variables.get("TINKER_LOG")) {
        (0, Some("debug")) | (2, _) => Some(LevelFilter::DEBUG),
        (0, Some("info")) | (1, _) => Some(LevelFilter::INFO),
        (0, _) => None,
        (3.., _) => Some(LevelFilter::TRACE),
    }
}

/// Selects the events of this project's crates at `level`, and only warnings and errors of other
/// crates: HTTP libraries log every frame.
fn own_targets(level: LevelFilter) -> Targets {
    Targets::new().with_default(level.min(LevelFilter::WARN)).with_target("tinkex", level)
}

/// Writer of the server's log, which has text of clients. Escapes terminal controls.
struct EscapedLog {
    console: Console,
    server: ServerLog,
}

/// Writer of one event of the server's log.
struct EscapedEvent {
    console: LogWriter,
    server: ServerLog,
}

impl MakeWriter<'_> for EscapedLog {
    type Writer = EscapedEvent;

    fn make_writer(&self) -> EscapedEvent {
        EscapedEvent { console: self.console.make_writer(), server: self.server }
    }
}

impl io::Write for EscapedEvent {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let escaped = match self.server.format {
            LogFormat::Json => escape_controls_in_json(&text),
            // `tracing-subscriber` has escaped the escape character in messages and fields; the
            // others are its own colors.
            LogFormat::Text => escape_controls_except(&text, |letter| {
                matches!(letter, '\n' | '\t') || self.server.colors && letter == '\u{1b}'
            }),
        };
        self.console.write_all(escaped.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.console.flush()
    }
}

/// Formats an event as `level: message field=value`, with control characters escaped.
struct PlainEvents(Style);

impl<S, N> FormatEvent<S, N> for PlainEvents
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        let fields = EventFields::of(event);
        let message = escape_controls(&fields.message);
        let rest = escape_controls(&fields.others);
        let line = self.0.message(&format!("{level}: {message}{rest}"));
        writeln!(out, "{line}")
    }
}
