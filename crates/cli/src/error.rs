//! [`CommandError`]: what went wrong, what to do about it, and the exit code.

use std::fmt;
use std::io;

use serde::Serialize;
use tinkex::wire::ErrorBody;
use tinkex::{Error, ErrorKind};

use crate::commands;
use crate::environment::Environment;

/// What to do where no server is known to have failed.
const UNREACHED: &str = "check the network and the base URL (TINKER_BASE_URL)";

/// What to do where there is no such thing, in the SDK's words.
const NOT_THERE: &str = "check the id and the base URL (TINKER_BASE_URL)";

/// What to do where whoever answers is no Tinker server.
const NO_API: &str = "check that the base URL (TINKER_BASE_URL) is that of the API";

/// What to do where there is no credential at all.
pub(crate) const NO_KEY: &str = "set TINKER_API_KEY, or store a key with `tinkex auth login`; \
                                 the server on this machine needs none: --local";

/// How the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exit {
    /// All is done.
    Success,
    /// It failed.
    Failed,
    /// The command line makes no sense; nothing was tried.
    Usage,
    /// The credential is missing or refused.
    Credentials,
    /// There is no such thing.
    NotFound,
    /// It may work later.
    Temporary,
    /// Some of it is done, and some failed.
    Partial,
    /// The user stopped it.
    Interrupted,
}

impl Exit {
    /// The number that the program ends with.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Credentials => 3,
            Self::NotFound => 4,
            Self::Temporary => 5,
            Self::Partial => 6,
            Self::Interrupted => 130,
        }
    }
}

/// What went wrong.
#[derive(Debug)]
pub(crate) enum CommandError {
    /// Something to say.
    Report(Box<ErrorReport>),
    /// Whoever reads the results has gone; there is nobody to tell.
    ClosedPipe,
}

/// What a failure says, to a person or, as it is, to a program.
#[derive(Debug, Serialize)]
pub(crate) struct ErrorReport {
    kind: &'static str,
    message: String,
    status: Option<u16>,
    /// The server's own words.
    detail: Option<String>,
    hint: Option<String>,
    /// What was asked for: method and path.
    request: Option<String>,
    #[serde(skip)]
    exit: Exit,
}

impl CommandError {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        let kind = match exit {
            Exit::Usage => "usage",
            Exit::Credentials => "auth",
            Exit::NotFound => "not_found",
            Exit::Temporary => "temporary",
            Exit::Partial => "partly_done",
            Exit::Interrupted => "interrupted",
            Exit::Success | Exit::Failed => "failed",
        };
        Self::Report(Box::new(ErrorReport {
            kind,
            message: message.into(),
            status: None,
            detail: None,
            hint: None,
            request: None,
            exit,
        }))
    }

    /// The command line makes no sense.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// The same, where the parser says so.
    pub(crate) fn usage_of(said: &clap::Error) -> Self {
        let text = said.to_string();
        let first = text.lines().next().unwrap_or_default();
        let hint = commands::hint(said).unwrap_or_else(|| "see --help".to_owned());
        Self::usage(first.trim_start_matches("error: ")).hint(hint)
    }

    /// The user stopped it.
    pub(crate) fn interrupted() -> Self {
        Self::new(Exit::Interrupted, "interrupted")
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        if let Self::Report(said) = &mut self {
            said.hint = Some(hint.into());
        }
        self
    }

    /// Names the server, where it could not be reached, and what is on this machine's own, where
    /// something is not.
    pub(crate) fn at(mut self, server: &str, local: bool) -> Self {
        let Self::Report(said) = &mut self else { return self };
        match said.hint.as_deref() {
            Some(UNREACHED) => {
                said.hint = Some(format!(
                    "check the network, and that {server} is the server (--base-url, \
                     TINKER_BASE_URL)"
                ));
            }
            Some(NOT_THERE) if local => {
                let see = "see what is there: tinkex model list --local, tinkex run list --local, \
                           tinkex checkpoint list --local";
                said.hint = Some(see.to_owned());
            }
            _ => {}
        }
        self
    }

    /// Says first what did not happen because of it.
    pub(crate) fn during(mut self, what: &str) -> Self {
        if let Self::Report(said) = &mut self {
            said.message = format!("{what}: {}", said.message);
        }
        self
    }

    /// The same where the rest of the work is done.
    pub(crate) fn partly(self, what: &str) -> Self {
        let mut failure = self.during(what);
        if let Self::Report(said) = &mut failure {
            said.exit = Exit::Partial;
        }
        failure
    }

    /// How the program ends, if this is how the command ended.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Report(said) => said.exit,
            Self::ClosedPipe => Exit::Success,
        }
    }

    /// A file could not be read or written.
    pub(crate) fn file(what: &str, path: &str, why: &io::Error) -> Self {
        Self::new(Exit::Failed, format!("{path} cannot be {what}: {why}"))
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Report(said) => f.write_str(&said.message),
            Self::ClosedPipe => f.write_str("nobody reads the results"),
        }
    }
}

impl From<Error> for CommandError {
    fn from(error: Error) -> Self {
        let source = innermost(&error).map(ToString::to_string);
        let detail = error.body().and_then(|body| ErrorBody::message(body.as_bytes()));
        let message = match source.filter(|_| error.status().is_none()) {
            Some(source) if error.kind() != ErrorKind::Decode => format!("{error}: {source}"),
            _ if is_page(&error) => {
                error.to_string().replace(detail.as_deref().unwrap_or_default(), "a web page")
            }
            _ => error.to_string(),
        };
        Self::Report(Box::new(ErrorReport {
            kind: kind(error.kind()),
            message,
            status: error.status(),
            detail,
            hint: hint(&error).map(str::to_owned),
            request: error.operation().map(str::to_owned),
            exit: exit(&error),
        }))
    }
}

/// Whether a page for people came back, which the API never sends.
fn is_page(error: &Error) -> bool {
    error.body().is_some_and(|body| body.trim_start().starts_with('<'))
}

/// What it came from in the end: those between only say that something failed.
fn innermost(error: &Error) -> Option<&dyn std::error::Error> {
    std::iter::successors(std::error::Error::source(error), |why| why.source()).last()
}

impl From<io::Error> for CommandError {
    /// Results could not be written.
    fn from(why: io::Error) -> Self {
        if why.kind() == io::ErrorKind::BrokenPipe {
            return Self::ClosedPipe;
        }
        Self::new(Exit::Failed, format!("the result cannot be written: {why}"))
    }
}

fn exit(error: &Error) -> Exit {
    match error.kind() {
        ErrorKind::Auth | ErrorKind::Permission => Exit::Credentials,
        ErrorKind::NotFound => Exit::NotFound,
        ErrorKind::InvalidInput => Exit::Usage,
        ErrorKind::Conflict => Exit::Failed,
        _ if error.is_retryable() => Exit::Temporary,
        _ => Exit::Failed,
    }
}

/// What to do: as the SDK says, unless the command line knows better or it says nothing.
fn hint(error: &Error) -> Option<&str> {
    if error.is_missing_credential() {
        return Some(NO_KEY);
    }
    if is_page(error) {
        return Some(NO_API);
    }
    error.hint().map(tinkex::Hint::as_str).or_else(|| match error.kind() {
        ErrorKind::Connect => Some(UNREACHED),
        _ if error.is_retryable() && error.kind() != ErrorKind::Conflict => {
            Some("try again later, or let it try longer with --retry-for")
        }
        ErrorKind::Decode => Some(NO_API),
        _ => None,
    })
}

fn kind(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Auth => "auth",
        ErrorKind::Billing => "billing",
        ErrorKind::Closed => "closed",
        ErrorKind::Config => "config",
        ErrorKind::Conflict => "conflict",
        ErrorKind::Connect => "connect",
        ErrorKind::Decode => "decode",
        ErrorKind::Expired => "expired",
        ErrorKind::InvalidInput => "invalid_input",
        ErrorKind::NotFound => "not_found",
        ErrorKind::Permission => "permission",
        ErrorKind::RateLimited => "rate_limited",
        ErrorKind::Rejected => "rejected",
        ErrorKind::Server => "server",
        ErrorKind::Timeout => "timeout",
        ErrorKind::WorkFailed => "work_failed",
        _ => "failed",
    }
}

/// Tells what went wrong, and how the program ends.
pub(crate) fn report(environment: &mut Environment, failure: &CommandError, json: bool) -> Exit {
    if let CommandError::Report(said) = failure {
        #[derive(Serialize)]
        struct ErrorDocument<'a> {
            error: &'a ErrorReport,
        }
        let text = match serde_json::to_string(&ErrorDocument { error: said }) {
            Ok(text) if json => text,
            _ => {
                let message = crate::format::visible_lines(&said.message);
                let hint = said.hint.as_ref().map(|hint| format!("\nhint: {hint}"));
                format!("error: {message}{}", hint.unwrap_or_default())
            }
        };
        if said.exit == Exit::Interrupted && environment.terminals.input {
            // Whatever stood there, a question or `^C`, the message has a line of its own.
            let _ = writeln!(environment.err);
        }
        // If even that cannot be told, the exit code must do.
        let _ = writeln!(environment.err, "{text}");
    }
    failure.exit()
}

/// Shows what the parser says about a command line.
pub(crate) fn show_usage(environment: &mut Environment, said: &clap::Error) -> Exit {
    let hint = commands::hint(said).map(|hint| format!("hint: {hint}\n"));
    let _ = write!(environment.err, "{said}{}", hint.unwrap_or_default());
    Exit::Usage
}
