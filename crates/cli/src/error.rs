//! [`CommandError`]: the message, hint and exit code of a failed command.

use std::fmt;
use std::io;

use serde::Serialize;
use tinkex::{Error, ErrorKind, Hint};

use crate::commands;
use crate::environment::Environment;
use crate::format::{escape_controls_in_json, escape_controls_in_lines};
use crate::style::Style;

/// Exit status of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exit {
    /// The command succeeded.
    Success,
    /// The command failed.
    Failed,
    /// The command line or an input file is invalid; nothing was changed.
    Usage,
    /// The credential is missing or was rejected.
    Credentials,
    /// The requested resource does not exist.
    NotFound,
    /// The failure is temporary: too many requests, a server error, or no connection.
    Temporary,
    /// A part of the command succeeded, for example some of several deletions.
    Partial,
    /// The failure is permanent: the server rejected the request or cannot use the model, and the
    /// same command would fail again.
    Rejected,
    /// The user interrupted the command.
    Interrupted,
}

impl Exit {
    /// Returns the exit code of the process.
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
            Self::Rejected => 7,
            Self::Interrupted => 130,
        }
    }
}

/// Error of a command.
#[derive(Debug)]
pub(crate) enum CommandError {
    /// Error that is printed on standard error.
    Report(Box<ErrorReport>),
    /// The reader of standard output closed the pipe. No error is printed, and the program exits with
    /// 0.
    ClosedPipe,
}

/// Contents of an error report. Serialized as the `error` object of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct ErrorReport {
    kind: &'static str,
    message: String,
    status: Option<u16>,
    /// The server's own message.
    detail: Option<String>,
    /// Advice in the order in which it is printed, for example to correct the API key and then to
    /// resume the run. Joined into one text.
    #[serde(rename = "hint", serialize_with = "serialize_hints")]
    hints: Vec<ErrorHint>,
    /// Method and path of the failed request.
    request: Option<String>,
    /// Base URL of the server. Printed with the request.
    #[serde(skip)]
    server: Option<String>,
    #[serde(skip)]
    exit: Exit,
}

/// Advice on how to resolve an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ErrorHint {
    /// Advice of the SDK.
    Sdk(Hint),
    /// Advice to repeat the command after a temporary failure.
    RetryLater,
    /// Advice of the command line, as a sentence.
    Text(String),
}

impl fmt::Display for ErrorHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Unlike the texts of the SDK, these name commands and options of the command line.
            Self::Sdk(Hint::SetCredential) => f.write_str(
                "Set TINKER_API_KEY or run `tinkex auth login`. To use the server on this machine, \
                 which needs no key, pass --local.",
            ),
            Self::Sdk(Hint::CheckApiKey) => {
                f.write_str("Check the API key (TINKER_API_KEY), or run `tinkex auth login`.")
            }
            Self::Sdk(Hint::ShortenPrompt) => f.write_str(
                "Shorten the prompt or lower --max-tokens; `tinkex model list` shows the context \
                 length of each model.",
            ),
            // The option of the command line instead of the name of the SDK.
            Self::Sdk(Hint::RetryLater) => Self::RetryLater.fmt(f),
            Self::Sdk(Hint::OverwriteCheckpoint) => Hint::ChooseAnotherName.fmt(f),
            Self::Sdk(hint) => hint.fmt(f),
            Self::RetryLater => f.write_str("Try again later, or pass a longer --retry-for."),
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl From<String> for ErrorHint {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for ErrorHint {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// Returns all hints as one text, or `None` if there are none.
fn join_hints(hints: &[ErrorHint]) -> Option<String> {
    let texts: Vec<String> = hints.iter().map(ToString::to_string).collect();
    (!texts.is_empty()).then(|| texts.join(" "))
}

fn serialize_hints<S: serde::Serializer>(
    hints: &[ErrorHint],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    join_hints(hints).serialize(serializer)
}

impl CommandError {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        let kind = match exit {
            Exit::Usage => "usage",
            Exit::Credentials => "auth",
            Exit::NotFound => "not_found",
            Exit::Temporary => "temporary",
            Exit::Partial => "partly_done",
            Exit::Rejected => "rejected",
            Exit::Interrupted => "interrupted",
            Exit::Success | Exit::Failed => "failed",
        };
        Self::Report(Box::new(ErrorReport {
            kind,
            message: message.into(),
            status: None,
            detail: None,
            hints: Vec::new(),
            request: None,
            server: None,
            exit,
        }))
    }

    /// Creates an error about an invalid command line.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// Converts an error of the argument parser: the message with all arguments that it names, and
    /// the usage line as the hint.
    pub(crate) fn from_clap(error: &clap::Error) -> Self {
        let text = error.to_string();
        if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            let list = text.split("Commands:\n").nth(1).and_then(|rest| rest.split("\n\n").next());
            let names = list.unwrap_or_default().lines().filter_map(|line| {
                line.strip_prefix("  ").filter(|line| !line.starts_with(' '))?.split(' ').next()
            });
            let names: Vec<_> = names.filter(|name| *name != "help").collect();
            let expected = match names[..] {
                [] => String::new(),
                _ => format!("; expected one of: {}", names.join(", ")),
            };
            return Self::usage(format!("no command given{expected}")).hint("Run with --help.");
        }
        let mut paragraphs = text.split("\n\n");
        let mut lines = paragraphs.next().unwrap_or_default().lines().map(str::trim);
        let mut message = lines.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
        let rest = lines.collect::<Vec<_>>().join(", ");
        if !rest.is_empty() {
            message = format!("{message} {rest}");
        }
        let mut hint = commands::usage_hint(error).unwrap_or_default();
        if hint.is_empty() {
            for paragraph in paragraphs.map(str::trim) {
                if let Some(tip) = paragraph.strip_prefix("tip: ") {
                    hint += &format!("Note: {tip}. ");
                } else if let Some(usage) = paragraph.strip_prefix("Usage: ") {
                    hint += &format!("Usage: {usage}; ");
                }
            }
            hint += if hint.ends_with("; ") { "run with --help." } else { "Run with --help." };
        }
        Self::usage(message).hint(hint)
    }

    /// Creates the error of a command that the user interrupted.
    pub(crate) fn interrupted() -> Self {
        Self::new(Exit::Interrupted, "interrupted")
    }

    /// Creates an error about a file: `cannot {action} {path}: {error}`.
    pub(crate) fn file(action: &str, path: impl fmt::Display, error: &io::Error) -> Self {
        let reason = without_code(&error.to_string()).to_owned();
        Self::new(Exit::Failed, format!("cannot {action} {path}: {reason}"))
    }

    /// Sets the hint. Replaces earlier hints.
    pub(crate) fn hint(mut self, hint: impl Into<ErrorHint>) -> Self {
        if let Self::Report(report) = &mut self {
            report.hints = vec![hint.into()];
        }
        self
    }

    /// Adds a hint after the existing ones.
    pub(crate) fn add_hint(mut self, hint: impl Into<ErrorHint>) -> Self {
        if let Self::Report(report) = &mut self {
            report.hints.push(hint.into());
        }
        self
    }

    /// Returns the text of the hints, if there are any.
    pub(crate) fn hint_text(&self) -> Option<String> {
        match self {
            Self::Report(report) => join_hints(&report.hints),
            Self::ClosedPipe => None,
        }
    }

    /// Returns whether the server rejected a request as invalid. The same request would fail again.
    pub(crate) fn is_rejected_request(&self) -> bool {
        matches!(self, Self::Report(report) if matches!(report.status, Some(400 | 404 | 422)))
    }

    /// Adapts the hints to the server: names it if it could not be reached, and refers to the lists
    /// of the local server if a resource does not exist there.
    pub(crate) fn with_server(mut self, server: &str, local: bool) -> Self {
        let Self::Report(report) = &mut self else { return self };
        report.server = Some(server.to_owned());
        for hint in &mut report.hints {
            match hint {
                ErrorHint::Sdk(Hint::CheckNetwork) => {
                    *hint = ErrorHint::Text(format!(
                        "Check the network and that {server} is the right server (--base-url, \
                         TINKER_BASE_URL)."
                    ));
                }
                ErrorHint::Sdk(Hint::StartServer) => {
                    *hint = ErrorHint::Text(format!(
                        "Start the server (tinkex serve), or check that {server} is the right \
                         one (--base-url, TINKER_BASE_URL)."
                    ));
                }
                ErrorHint::Sdk(Hint::CheckScheme) => {
                    *hint = ErrorHint::Text(match server.strip_prefix("https://") {
                        Some(rest) => format!(
                            "Use http://{rest} (--base-url, TINKER_BASE_URL) if the server has no TLS, \
                             such as a local one."
                        ),
                        None => format!(
                            "Use {} (--base-url, TINKER_BASE_URL) if the server expects TLS.",
                            server.replacen("http://", "https://", 1)
                        ),
                    });
                }
                ErrorHint::Sdk(Hint::CheckServer) => {
                    *hint = ErrorHint::Text(format!(
                        "Check that {server} is a Tinker server (--base-url, TINKER_BASE_URL), and \
                         that no proxy answers for it (HTTP_PROXY, HTTPS_PROXY, NO_PROXY)."
                    ));
                }
                ErrorHint::Sdk(Hint::CheckEndpoint) => {
                    *hint = ErrorHint::Text(format!(
                        "This server may not support the command; check that {server} is the right \
                         one (--base-url, TINKER_BASE_URL)."
                    ));
                }
                ErrorHint::Sdk(Hint::CheckId) if local => {
                    *hint = ErrorHint::from(
                        "List what the local server has: tinkex model list --local, tinkex run \
                         list --local, tinkex checkpoint list --local.",
                    );
                }
                _ => {}
            }
        }
        self
    }

    /// Prefixes the message with the operation that failed: `{operation}: {message}`.
    pub(crate) fn context(mut self, operation: &str) -> Self {
        if let Self::Report(report) = &mut self {
            report.message = format!("{operation}: {}", report.message);
        }
        self
    }

    /// Like [`context`](Self::context), for a command of which another part succeeded.
    pub(crate) fn partial(self, operation: &str) -> Self {
        let mut error = self.context(operation);
        if let Self::Report(report) = &mut error {
            report.exit = Exit::Partial;
        }
        error
    }

    /// Returns the exit status of the program if the command fails with this error.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Report(report) => report.exit,
            Self::ClosedPipe => Exit::Success,
        }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Report(report) => f.write_str(&report.message),
            Self::ClosedPipe => f.write_str("the output was closed"),
        }
    }
}

impl From<Error> for CommandError {
    fn from(error: Error) -> Self {
        let detail = error.detail();
        Self::Report(Box::new(ErrorReport {
            kind: error.kind().as_str(),
            message: message(&error, detail.as_deref()),
            status: error.status(),
            detail,
            hints: hint(&error).into_iter().collect(),
            request: error.operation().map(str::to_owned),
            server: None,
            exit: exit(&error),
        }))
    }
}

/// Returns the text of an I/O error without the number of the operating system.
fn without_code(text: &str) -> &str {
    text.split(" (os error ").next().unwrap_or_default()
}

/// Returns whether an operation is a request: method and path.
fn is_request(operation: &str) -> bool {
    operation.split_once(' ').is_some_and(|(_, path)| path.starts_with('/'))
}

/// Returns the message of an error. It starts with the reason: the request is printed with `-v` only.
/// Other operations, such as loading a tokenizer, are named.
fn message(error: &Error, detail: Option<&str>) -> String {
    let mut message = match error.operation().filter(|operation| !is_request(operation)) {
        Some(operation) => format!("{operation} failed: {}", error.message()),
        None => error.message().to_owned(),
    };
    if let (Some(status), Some(detail)) = (error.status(), detail) {
        let response = format!("server responded with status {status}: {detail}");
        message = message.replace(&response, &format!("{detail} (status {status})"));
    }
    let source = root_cause(error).map(ToString::to_string);
    if let Some(source) = source
        && error.status().is_none()
        && error.kind() != ErrorKind::Decode
        // Errors of files and of connections repeat the text of their source.
        && !message.ends_with(source.as_str())
        && !message.ends_with(without_code(&source))
    {
        message = format!("{message}: {}", without_code(&source));
    }
    // The gradients that the server holds after a partly failed batch.
    let printed = error.to_string();
    message += printed.split_once(error.message()).map_or("", |(_, rest)| rest);
    if error.attempts() > 1 {
        let seconds = error.elapsed().as_secs_f64();
        message += &format!(", after {} attempts ({seconds:.1} s)", error.attempts());
    }
    message
}

/// Returns the last error of the source chain, the only one that names the cause.
fn root_cause(error: &Error) -> Option<&dyn std::error::Error> {
    std::iter::successors(std::error::Error::source(error), |error| error.source()).last()
}

impl From<io::Error> for CommandError {
    /// Converts an error of writing to standard output.
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self::ClosedPipe;
        }
        let reason = without_code(&error.to_string()).to_owned();
        Self::new(Exit::Failed, format!("cannot write the result: {reason}"))
    }
}

fn exit(error: &Error) -> Exit {
    match error.kind() {
        ErrorKind::Auth | ErrorKind::Permission => Exit::Credentials,
        ErrorKind::NotFound => Exit::NotFound,
        ErrorKind::InvalidInput => Exit::Usage,
        ErrorKind::Conflict => Exit::Failed,
        // A 408 is of this kind and temporary.
        ErrorKind::Rejected | ErrorKind::Connect if !error.is_retryable() => Exit::Rejected,
        ErrorKind::WorkFailed if error.is_user_error() => Exit::Rejected,
        ErrorKind::Server if error.status() == Some(501) => Exit::Rejected,
        // An HTML page, or JSON of another schema: not a Tinker server.
        ErrorKind::Decode if error.hint() == Some(Hint::CheckServer) => Exit::Rejected,
        _ if error.is_retryable() => Exit::Temporary,
        _ => Exit::Failed,
    }
}

/// Chooses the hint: the SDK's, or advice to retry a temporary failure.
fn hint(error: &Error) -> Option<ErrorHint> {
    let is_temporary = error.is_retryable() && error.kind() != ErrorKind::Conflict;
    error.hint().map(ErrorHint::Sdk).or(is_temporary.then_some(ErrorHint::RetryLater))
}

/// Prints an error, as text or as a JSON document, and returns the exit status.
///
/// With `verbose`, the text names the failed request, which a JSON document always does.
pub(crate) fn report(
    environment: &mut Environment,
    error: &CommandError,
    json: bool,
    verbose: bool,
    style: Style,
) -> Exit {
    if let CommandError::Report(report) = error {
        #[derive(Serialize)]
        struct ErrorDocument<'a> {
            error: &'a ErrorReport,
        }
        let text = match serde_json::to_string(&ErrorDocument { error: report }) {
            Ok(text) if json => escape_controls_in_json(&text),
            _ => {
                let message = &report.message;
                let hint = join_hints(&report.hints).map(|hint| format!("\nhint: {hint}"));
                let request = report.request.as_ref().filter(|_| verbose);
                let request = request.map(|request| match &report.server {
                    Some(server) if is_request(request) => {
                        format!("\nrequest: {request} to {server}")
                    }
                    _ => format!("\nrequest: {request}"),
                });
                let request = request.unwrap_or_default();
                let hint = hint.unwrap_or_default();
                let message = format!("error: {message}{request}{hint}");
                style.message(&escape_controls_in_lines(&message))
            }
        };
        // The cursor may be behind a prompt or an echoed `^C`.
        let interrupted = report.exit == Exit::Interrupted && environment.terminals.input;
        let start = if interrupted { "\n" } else { "" };
        // If standard error is closed, the exit code alone reports the failure.
        let _ = environment.err.write_all(format!("{start}{text}\n").as_bytes());
    }
    error.exit()
}

/// Prints an error of the argument parser.
pub(crate) fn report_usage(
    environment: &mut Environment,
    error: &clap::Error,
    style: Style,
) -> Exit {
    let hint = commands::usage_hint(error).map(|hint| format!("hint: {hint}\n"));
    let text = escape_controls_in_lines(&format!("{error}{}", hint.unwrap_or_default()));
    let text = style.message(&text);
    let _ = environment.err.write_all(text.as_bytes());
    Exit::Usage
}
