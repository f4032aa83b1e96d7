//! [`Error`]: the error of every fallible call.

mod kind;

use std::any::Any;
use std::convert::Infallible;
use std::error::Error as StdError;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tinkex_wire::{
    DecodeError, ErrorBody, ErrorCategory, ErrorCode, InvalidInput, RequestFailed, RequestId,
};

use crate::hint::Hint;

pub use kind::ErrorKind;

/// Result of a fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Error returned by the calls of this crate.
///
/// `Display` states what failed, on what, and the cause, on one line; [`hint`](Self::hint) says
/// what to do about the error, and the alternate form `{:#}` includes the hint. An error never
/// contains a credential. Cloning is cheap and keeps the source chain.
///
/// ```
/// use tinkex::{Env, ServiceClient};
///
/// let error = ServiceClient::builder().env(Env::empty()).build().unwrap_err();
/// assert_eq!(error.to_string(), "no API key found");
/// assert!(format!("{error:#}").starts_with("no API key found; hint: Set TINKER_API_KEY"));
/// ```
#[derive(Clone)]
pub struct Error(Box<ErrorDetails>);

#[derive(Clone)]
struct ErrorDetails {
    kind: ErrorKind,
    /// Operation that failed; empty if unknown.
    operation: String,
    message: String,
    hint: Option<Hint>,
    status: Option<u16>,
    body: Option<String>,
    category: Option<ErrorCategory>,
    request_id: Option<RequestId>,
    attempts: u32,
    elapsed: Duration,
    retry_after: Option<Duration>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
    /// Whether the request must not be retried, regardless of its status: the caller's own deadline
    /// ended the call, or the server declined retries with `x-should-retry: false`.
    not_retryable: bool,
    /// For a partly failed batch or a failed step: the datums whose gradients the server holds.
    accumulated: Vec<Range<usize>>,
    /// For a failed optimizer step: the gradients that it did not apply.
    unapplied: Option<UnappliedGradients>,
}

/// Gradients that a failed optimizer step did not apply.
#[derive(Clone, Copy)]
struct UnappliedGradients {
    passes: usize,
    datums: usize,
}

impl fmt::Display for UnappliedGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passes, datums } = self;
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let (was, stays) = if *passes == 1 { ("was", "stays") } else { ("were", "stay") };
        write!(
            f,
            "the gradient{} of {passes} pass{} with {datums} datum{} {was} not applied and {stays} \
             on the server",
            plural(*passes),
            if *passes == 1 { "" } else { "es" },
            plural(*datums),
        )
    }
}

impl Error {
    /// Creates an error from its kind and its cause. The cause is in lower case and has no full
    /// stop.
    ///
    /// ```
    /// use tinkex::{Error, ErrorKind};
    ///
    /// let error = Error::new(ErrorKind::InvalidInput, "no prompt is left")
    ///     .during("rl")
    ///     .with_hint("Pass more prompts.");
    /// assert_eq!(error.to_string(), "rl failed: no prompt is left");
    /// ```
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(ErrorDetails {
            kind,
            operation: String::new(),
            message: message.into(),
            hint: None,
            status: None,
            body: None,
            category: None,
            request_id: None,
            attempts: 0,
            elapsed: Duration::ZERO,
            retry_after: None,
            source: None,
            not_retryable: false,
            accumulated: Vec::new(),
            unapplied: None,
        }))
    }

    /// Creates the error for a client without any credential.
    pub(crate) fn missing_credential() -> Self {
        Self::new(ErrorKind::Auth, "no API key found").with_hint(Hint::SetCredential)
    }

    /// Creates the error for a response with an error status.
    #[doc(hidden)]
    #[must_use]
    pub fn from_response(status: u16, body: &[u8], retry_after: Option<Duration>) -> Self {
        let page = html_title(body);
        let detail = ErrorBody::message(body).filter(|_| page.is_none());
        let message = match (&detail, &page) {
            (Some(detail), _) => format!("server responded with status {status}: {detail}"),
            (None, Some(title)) => {
                format!("server responded with status {status} and an HTML page{title}")
            }
            (None, None) => format!("server responded with status {status}"),
        };
        let kind = match ErrorCode::of_body(body) {
            Some(ErrorCode::Conflict) => ErrorKind::Conflict,
            _ => ErrorKind::from_status(status),
        };
        let mut error = Self::new(kind, message);
        error.0.hint = match page {
            // The page comes from the gateway in front of a server that does not respond, so the
            // base URL is probably correct.
            Some(_) if (502..=504).contains(&status) => None,
            Some(_) => Some(Hint::CheckServer),
            None => Hint::for_response(status, detail.as_deref()),
        };
        error.0.status = Some(status);
        error.0.retry_after = retry_after;
        error.0.body = (!body.is_empty()).then(|| String::from_utf8_lossy(body).into_owned());
        error
    }

    /// Creates the error for a request that was not sent because the shared backoff ends after the
    /// time limit of the call. `remaining` is the remaining time of the backoff.
    pub(crate) fn rate_limited(remaining: Duration) -> Self {
        let seconds = remaining.as_secs_f64();
        let message = format!(
            "request was not sent: the backoff after a 429 lasts another {seconds:.1} s, which \
             exceeds the time limit of the call"
        );
        let mut error = Self::new(ErrorKind::RateLimited, message).with_hint(Hint::RetryLater);
        error.0.retry_after = Some(remaining);
        error
    }

    /// Adds that the server asks to wait for `retry_after`, which exceeds a limit of the call.
    #[doc(hidden)]
    #[must_use]
    pub fn asks_for_too_long_wait(self, retry_after: Duration) -> Self {
        let seconds = retry_after.as_secs_f64();
        self.map_message(|message| {
            format!(
                "{message}; the server asks to wait {seconds} s, which exceeds a limit of the call"
            )
        })
        .with_hint(Hint::RetryLater)
    }

    /// Creates the error for calls on a closed client.
    #[doc(hidden)]
    #[must_use]
    pub fn closed() -> Self {
        Self::new(ErrorKind::Closed, "client is closed").with_hint(Hint::CreateNewClient)
    }

    /// Creates the error for work whose tokio runtime ended before the work did.
    #[doc(hidden)]
    #[must_use]
    pub fn runtime_ended() -> Self {
        Self::new(ErrorKind::Closed, "tokio runtime ended before the request finished")
            .with_hint("Keep the runtime of a call running until its future has resolved.")
    }

    /// Creates the error for calls outside a tokio runtime.
    pub(crate) fn no_runtime() -> Self {
        Self::new(ErrorKind::Config, "no tokio runtime is running on this thread")
            .with_hint(Hint::EnterRuntime)
    }

    /// Creates the error for a background task that panicked with `payload`.
    #[doc(hidden)]
    #[must_use]
    pub fn panicked(payload: &(dyn Any + Send)) -> Self {
        let text = panic_message(payload);
        Self::new(ErrorKind::Panicked, format!("background task panicked: {text}"))
    }

    /// Creates the error for a request that the server executed and that failed.
    #[doc(hidden)]
    #[must_use]
    pub fn from_failed_request(failed: RequestFailed) -> Self {
        let kind = match failed.code {
            Some(ErrorCode::Conflict) => ErrorKind::Conflict,
            _ => ErrorKind::WorkFailed,
        };
        let mut error = Self::new(kind, failed.error);
        error.0.hint = Hint::for_message(&error.0.message);
        error.0.category = Some(failed.category);
        error
    }

    /// Creates the error for a result that did not arrive within the caller's own `limit`. The
    /// error is not retryable.
    #[doc(hidden)]
    #[must_use]
    pub fn deadline(limit: Duration) -> Self {
        let message = format!("result did not arrive within {} s", limit.as_secs_f64());
        Self::new(ErrorKind::Timeout, message).not_retryable()
    }

    /// Creates the error for the result of a training request that did not arrive within the
    /// caller's own `limit`.
    #[doc(hidden)]
    #[must_use]
    pub fn training_deadline(limit: Duration) -> Self {
        Self::deadline(limit)
            .map_message(|message| format!("{message}; the request continues on the server"))
    }

    /// Creates the error for a call that did not finish within the caller's own `limit`. The error
    /// is not retryable.
    #[doc(hidden)]
    #[must_use]
    pub fn call_deadline(limit: Duration) -> Self {
        let message = format!("call did not finish within {} s", limit.as_secs_f64());
        Self::new(ErrorKind::Timeout, message).not_retryable()
    }

    /// Marks the error as not retryable, regardless of its status.
    #[doc(hidden)]
    #[must_use]
    pub fn not_retryable(mut self) -> Self {
        self.0.not_retryable = true;
        self
    }

    /// Replaces the message, for example with a message that contains the address.
    pub(crate) fn with_message(mut self, message: impl Into<String>) -> Self {
        self.0.message = message.into();
        self
    }

    /// Returns the cause of the error. `Display` also writes the operation that failed and the
    /// number of attempts before the cause.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Sets the id of the failed request.
    #[doc(hidden)]
    #[must_use]
    pub fn with_request_id(mut self, request_id: RequestId) -> Self {
        self.0.request_id = Some(request_id);
        self
    }

    /// Reclassifies the error as [`ErrorKind::Expired`].
    #[doc(hidden)]
    #[must_use]
    pub fn expired(mut self) -> Self {
        self.0.kind = ErrorKind::Expired;
        self
    }

    /// Sets the cause that [`source`](StdError::source) returns.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Sets the cause that [`source`](StdError::source) returns.
    #[doc(hidden)]
    #[must_use]
    pub fn with_boxed_source(mut self, source: Box<dyn StdError + Send + Sync>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Sets the hint: advice for the user, as an imperative sentence. Replaces an earlier hint.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<Hint>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Changes the message, which does not include the operation.
    #[doc(hidden)]
    #[must_use]
    pub fn map_message(mut self, change: impl FnOnce(String) -> String) -> Self {
        self.0.message = change(std::mem::take(&mut self.0.message));
        self
    }

    /// Sets the datums of a partly failed batch whose gradients the server holds, in the order of
    /// the batch. Adjacent ranges are joined.
    #[doc(hidden)]
    #[must_use]
    pub fn with_accumulated(mut self, datums: impl Iterator<Item = Range<usize>>) -> Self {
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in datums {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        if !joined.is_empty() {
            self.0.hint.get_or_insert(Hint::DiscardGradient);
        }
        self.0.accumulated = joined;
        self
    }

    /// Sets the gradients that a failed optimizer step did not apply: the number of passes and of
    /// their datums, and the datums of the batch of the same call. Does nothing if `passes` is 0.
    #[doc(hidden)]
    #[must_use]
    pub fn with_unapplied(
        mut self,
        passes: usize,
        datums: usize,
        own: impl Iterator<Item = Range<usize>>,
    ) -> Self {
        if passes == 0 {
            return self;
        }
        self.0.unapplied = Some(UnappliedGradients { passes, datums });
        self.0.hint.get_or_insert(Hint::DiscardGradient);
        self.with_accumulated(own)
    }

    /// Sets the operation that failed, unless it is already set: the innermost caller knows the
    /// operation most precisely.
    #[must_use]
    pub fn during(mut self, operation: impl Into<String>) -> Self {
        if self.0.operation.is_empty() {
            self.0.operation = operation.into();
        }
        self
    }

    /// Sets the number of attempts and the time they took.
    #[doc(hidden)]
    #[must_use]
    pub fn after(mut self, attempts: u32, elapsed: Duration) -> Self {
        self.0.attempts = attempts;
        self.0.elapsed = elapsed;
        self
    }

    /// Returns the classification of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the operation that failed, if known: for a request its method and path, for invalid
    /// input the name of the method that was called.
    #[must_use]
    pub fn operation(&self) -> Option<&str> {
        Some(self.0.operation.as_str()).filter(|operation| !operation.is_empty())
    }

    /// Returns the HTTP status, if the server responded.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        self.0.status
    }

    /// Returns the body of the server's response, if it was not empty.
    #[must_use]
    pub fn body(&self) -> Option<&str> {
        self.0.body.as_deref()
    }

    /// Returns the body of the server's response as JSON, or `None` if it is empty or not JSON.
    /// Decodes the text on every call.
    ///
    /// ```
    /// # fn show(error: &tinkex::Error) {
    /// if let Some(body) = error.body_json() {
    ///     println!("the server's error code is {}", body["code"]);
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn body_json(&self) -> Option<serde_json::Value> {
        serde_json::from_str(self.body()?).ok()
    }

    /// Returns the message in the body of the server's response, if it has one.
    ///
    /// ```
    /// # fn show(error: &tinkex::Error) {
    /// if let Some(detail) = error.detail() {
    ///     println!("the server says: {detail}");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn detail(&self) -> Option<String> {
        ErrorBody::message(self.body()?.as_bytes())
    }

    /// Returns which side caused a failed request, if the server reported it.
    #[must_use]
    pub fn category(&self) -> Option<ErrorCategory> {
        self.0.category
    }

    /// Returns the id of the failed request, if the server had accepted it.
    #[must_use]
    pub fn request_id(&self) -> Option<&RequestId> {
        self.0.request_id.as_ref()
    }

    /// Returns how many times the request of the call was sent, including retries and resubmissions
    /// of a sample; 0 if the request was not sent. Polls for the result do not count.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.0.attempts
    }

    /// Returns the time from the start of the call to its failure.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed
    }

    /// Returns the delay that the server requested before a retry (`retry-after`), if any.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// Returns the datums of the call's batch whose gradients the server holds, as ranges of indices
    /// into the batch. Empty if the call had no batch, or no gradient of it is accumulated.
    ///
    /// A batch that exceeds the server's limits is sent in several requests. If one of them fails,
    /// the gradients of the others stay accumulated, and the next `optim_step` applies them. If the
    /// optimizer step of a training step is refused or fails, the gradient of the whole batch stays
    /// accumulated.
    #[must_use]
    pub fn accumulated_datums(&self) -> &[Range<usize>] {
        &self.0.accumulated
    }

    /// Returns advice on what to do about the error, if there is any.
    #[must_use]
    pub fn hint(&self) -> Option<Hint> {
        self.0.hint
    }

    /// Returns whether no credential was found at all: neither an argument, nor an environment
    /// variable, nor a stored key. A program can then ask the user for a credential. Other errors
    /// of [`ErrorKind::Auth`] are about a credential that is malformed or rejected.
    ///
    /// ```
    /// use tinkex::{Env, ErrorKind, ServiceClient};
    ///
    /// let error = ServiceClient::builder().env(Env::empty()).build().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Auth);
    /// assert!(error.is_missing_credential());
    /// ```
    #[must_use]
    pub fn is_missing_credential(&self) -> bool {
        self.0.hint == Some(Hint::SetCredential)
    }

    /// Returns whether the server lacks the endpoint, as opposed to the requested object.
    #[doc(hidden)]
    #[must_use]
    pub fn is_missing_endpoint(&self) -> bool {
        self.0.hint == Some(Hint::CheckEndpoint)
    }

    /// Returns whether the request must not be retried, regardless of its status: the server
    /// declined retries with `x-should-retry: false`, or the caller's own deadline ended the call.
    #[doc(hidden)]
    #[must_use]
    pub fn declines_retries(&self) -> bool {
        self.0.not_retryable
    }

    /// Returns whether the same request may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        if let Some(category) = self.0.category {
            return category != ErrorCategory::User;
        }
        match self.0.status {
            _ if self.0.not_retryable => false,
            Some(status) => is_retryable_status(status),
            None => matches!(self.0.kind, ErrorKind::Connect | ErrorKind::Timeout),
        }
    }

    /// Returns whether the request itself was at fault: [`ErrorKind::InvalidInput`], a status from
    /// 400 to 499 except 408, or a failed request whose category is [`ErrorCategory::User`].
    /// Expired results do not count.
    #[must_use]
    pub fn is_user_error(&self) -> bool {
        let rejected = |status: u16| (400..500).contains(&status) && status != 408;
        self.0.kind == ErrorKind::InvalidInput
            || self.0.category == Some(ErrorCategory::User)
            || (self.0.kind != ErrorKind::Expired && self.0.status.is_some_and(rejected))
    }
}

/// Converts an argument of the method `call`. The error contains the name of the method.
pub fn convert<T>(call: &str, value: impl TryInto<T, Error: Into<Error>>) -> Result<T> {
    value.try_into().map_err(|error| error.into().during(call))
}

/// Returns the title of an HTML page as ` ("TITLE")`, or an empty text if the page has none; `None`
/// if the body is not HTML. A Tinker server never sends HTML: a proxy or another web server sent
/// the page.
fn html_title(body: &[u8]) -> Option<String> {
    /// Longest title in characters.
    const MAX_TITLE: usize = 80;
    let start = body.trim_ascii_start();
    // Read only the start of the page, which has the title: the page may be long.
    let text = String::from_utf8_lossy(&start[..start.len().min(4096)]);
    let lower = text.to_ascii_lowercase();
    if !["<!doctype html", "<html", "<head"].iter().any(|tag| lower.starts_with(tag)) {
        return None;
    }
    let title = lower.find("<title>").map(|at| &text[at + "<title>".len()..]);
    let title = title.and_then(|rest| rest.split('<').next()).map(str::trim).unwrap_or_default();
    let title: String = title.chars().filter(|c| !c.is_control()).take(MAX_TITLE).collect();
    Some(if title.is_empty() { String::new() } else { format!(" ({title:?})") })
}

/// Returns the message of a panic with `payload`.
pub fn panic_message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Returns whether a response with this status may be retried.
pub fn is_retryable_status(status: u16) -> bool {
    matches!(status, 408 | 409 | 429 | 500..600)
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let details = &self.0;
        if !details.operation.is_empty() {
            write!(f, "{} failed", details.operation)?;
            if details.attempts > 1 {
                let seconds = details.elapsed.as_secs_f64();
                write!(f, " after {} attempts ({seconds:.1} s)", details.attempts)?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&details.message)?;
        if let Some(unapplied) = &details.unapplied {
            write!(f, "; {unapplied}")?;
        } else {
            for (i, datums) in details.accumulated.iter().enumerate() {
                f.write_str(if i == 0 { "; the server holds the gradients of " } else { ", " })?;
                write!(f, "data[{}..{}]", datums.start, datums.end)?;
            }
        }
        match details.hint {
            Some(hint) if f.alternate() => write!(f, "; hint: {hint}"),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("message", &self.to_string())
            .field("hint", &self.0.hint)
            .field("status", &self.0.status)
            .field("attempts", &self.0.attempts)
            .field("retry_after", &self.0.retry_after)
            .field("source", &self.0.source)
            .finish_non_exhaustive()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

impl From<InvalidInput> for Error {
    fn from(error: InvalidInput) -> Self {
        Self::new(ErrorKind::InvalidInput, error.to_string())
    }
}

/// For arguments of type `impl TryInto<T>` that already are a `T`.
impl From<Infallible> for Error {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl Error {
    /// Creates the error for a successful response whose body cannot be decoded.
    pub(crate) fn from_body(error: DecodeError, body: &[u8]) -> Self {
        let Some(title) = html_title(body) else { return error.into() };
        let message = format!("server responded with an HTML page{title} instead of JSON");
        Self::new(ErrorKind::Decode, message).with_hint(Hint::CheckServer).with_source(error)
    }
}

impl From<DecodeError> for Error {
    fn from(error: DecodeError) -> Self {
        Self::new(ErrorKind::Decode, format!("cannot decode the server's response: {error}"))
            .with_hint(Hint::CheckServer)
            .with_source(error)
    }
}

#[cfg(test)]
mod tests;
