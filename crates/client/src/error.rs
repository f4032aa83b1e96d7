//! [`Error`]: why a call failed.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tinkex_wire::{DecodeError, ErrorBody, ErrorCategory, InvalidInput, RequestFailed, RequestId};

/// The result of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed. Ask it questions; print it for people.
///
/// It never holds a credential. A clone says the same.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    what: String,
    why: String,
    hint: Option<&'static str>,
    status: Option<u16>,
    body: Option<String>,
    category: Option<ErrorCategory>,
    request_id: Option<RequestId>,
    attempts: u32,
    elapsed: Duration,
    retry_after: Option<Duration>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
    /// Whether the caller wanted it to end.
    wanted: bool,
    /// Whether there was no credential at all.
    no_credential: bool,
}

/// What kind of failure it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The credential is missing, malformed or refused (401).
    Auth,
    /// The account has to be settled first (402).
    Billing,
    /// The client was closed.
    Closed,
    /// A setting makes no sense.
    Config,
    /// Something of that name is there already, or changed meanwhile (409).
    Conflict,
    /// No connection, or it broke.
    Connect,
    /// The server's answer could not be understood.
    Decode,
    /// The answer was not fetched in time (410 on a ticket).
    Expired,
    /// The request makes no sense, and was not sent.
    InvalidInput,
    /// There is no such thing (404).
    NotFound,
    /// The credential may not do that (403).
    Permission,
    /// Too much was asked for (429).
    RateLimited,
    /// The server refused the request (400, 422 and other 4xx).
    Rejected,
    /// The server failed (5xx).
    Server,
    /// The answer did not come in time.
    Timeout,
    /// The work was done and failed; see [`Error::category`] for whose fault it was.
    WorkFailed,
}

impl ErrorKind {
    pub(crate) fn of_status(status: u16) -> Self {
        match status {
            401 => Self::Auth,
            402 => Self::Billing,
            403 => Self::Permission,
            404 => Self::NotFound,
            409 => Self::Conflict,
            429 => Self::RateLimited,
            500.. => Self::Server,
            _ => Self::Rejected,
        }
    }
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, why: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            what: String::new(),
            why: why.into(),
            hint: None,
            status: None,
            body: None,
            category: None,
            request_id: None,
            attempts: 0,
            elapsed: Duration::ZERO,
            retry_after: None,
            source: None,
            wanted: false,
            no_credential: false,
        }))
    }

    /// Nothing that could be a credential was found anywhere.
    pub(crate) fn no_credential() -> Self {
        let hint = "set TINKER_API_KEY, or store a key with `auth login`";
        let mut error = Self::new(ErrorKind::Auth, "there is no API key").with_hint(hint);
        error.0.no_credential = true;
        error
    }

    /// The server answered with an error status.
    pub(crate) fn of_reply(status: u16, body: &[u8], retry_after: Option<Duration>) -> Self {
        let said = ErrorBody::message(body);
        let why = match &said {
            Some(said) => format!("the server answered {status}: {said}"),
            None => format!("the server answered {status}"),
        };
        let mut error = Self::new(ErrorKind::of_status(status), why);
        error.0.hint = hint(status, said.as_deref()).or_else(|| context_hint(said.as_deref()?));
        error.0.status = Some(status);
        error.0.retry_after = retry_after;
        error.0.body = (!body.is_empty()).then(|| String::from_utf8_lossy(body).into_owned());
        error
    }

    /// Nothing is sent any more.
    pub(crate) fn closed() -> Self {
        let hint = "make another ServiceClient to go on";
        Self::new(ErrorKind::Closed, "the client was closed").with_hint(hint)
    }

    /// The request never got an answer.
    pub(crate) fn of_transport(kind: ErrorKind, source: Box<dyn StdError + Send + Sync>) -> Self {
        let why = match kind {
            ErrorKind::Timeout => "no answer in time",
            _ => "no connection to the server",
        };
        let mut error = Self::new(kind, why);
        error.0.source = Some(source.into());
        error
    }

    /// The server did the work, and it failed.
    pub(crate) fn of_work(failed: RequestFailed) -> Self {
        let mut error = Self::new(ErrorKind::WorkFailed, failed.error);
        error.0.hint = context_hint(&error.0.why);
        error.0.category = Some(failed.category);
        error
    }

    /// The caller did not want to wait any longer.
    pub(crate) fn deadline() -> Self {
        let mut error = Self::new(ErrorKind::Timeout, "the answer did not come in time");
        error.0.wanted = true;
        error
    }

    /// Says which request it was.
    pub(crate) fn about(mut self, request_id: RequestId) -> Self {
        self.0.request_id = Some(request_id);
        self
    }

    /// The same, where a status means that an answer was not fetched in time.
    pub(crate) fn expired(mut self) -> Self {
        self.0.kind = ErrorKind::Expired;
        self
    }

    pub(crate) fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    pub(crate) fn with_boxed_source(mut self, source: Box<dyn StdError + Send + Sync>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    pub(crate) fn with_hint(mut self, hint: &'static str) -> Self {
        self.0.hint = Some(hint);
        self
    }

    /// Says what was tried, if nobody did yet.
    pub(crate) fn during(mut self, what: impl Into<String>) -> Self {
        if self.0.what.is_empty() {
            self.0.what = what.into();
        }
        self
    }

    pub(crate) fn after(mut self, attempts: u32, elapsed: Duration) -> Self {
        self.0.attempts = attempts;
        self.0.elapsed = elapsed;
        self
    }

    /// What kind of failure it was.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What was tried, if that is known: for a request its method and path.
    #[must_use]
    pub fn tried(&self) -> Option<&str> {
        Some(self.0.what.as_str()).filter(|what| !what.is_empty())
    }

    /// The HTTP status, if the server answered.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        self.0.status
    }

    /// The body of the server's answer, if it had one.
    #[must_use]
    pub fn body(&self) -> Option<&str> {
        self.0.body.as_deref()
    }

    /// Whose fault it was, if the server said so about failed work.
    #[must_use]
    pub fn category(&self) -> Option<ErrorCategory> {
        self.0.category
    }

    /// The request that failed, if it had got a ticket.
    #[must_use]
    pub fn request_id(&self) -> Option<&RequestId> {
        self.0.request_id.as_ref()
    }

    /// How often the request was sent.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.0.attempts
    }

    /// How long it was tried.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed
    }

    /// When the server wants to be asked again, if it said so.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// What to do about it, where there is something to say.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        self.0.hint
    }

    /// Whether there was no credential at all: none was given, in the environment or stored. A
    /// program can ask for one then; others of [`ErrorKind::Auth`] had one that was of no use.
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
        self.0.no_credential
    }

    /// Whether the same request may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        if let Some(category) = self.0.category {
            return category != ErrorCategory::User;
        }
        match self.0.status {
            _ if self.0.wanted => false,
            Some(status) => retryable_status(status),
            None => matches!(self.0.kind, ErrorKind::Connect | ErrorKind::Timeout),
        }
    }

    /// Whether the request itself was at fault: a status of 400 to 499 except 408, or failed work
    /// that the server blames on the user. An answer that expired is nobody's fault.
    #[must_use]
    pub fn is_user_error(&self) -> bool {
        let refused = |status: u16| (400..500).contains(&status) && status != 408;
        self.0.category == Some(ErrorCategory::User)
            || (self.0.kind != ErrorKind::Expired && self.0.status.is_some_and(refused))
    }
}

/// The statuses that are worth another try, listed once.
pub(crate) fn retryable_status(status: u16) -> bool {
    matches!(status, 408 | 409 | 429 | 500..600)
}

/// What servers say of a path that they do not know, in place of naming the thing that is not there.
const UNKNOWN_PATH: &str = "Not Found";
const NO_CALL: &str =
    "this server may not have this call at all; check the base URL (TINKER_BASE_URL)";

fn hint(status: u16, said: Option<&str>) -> Option<&'static str> {
    match status {
        404 if said == Some(UNKNOWN_PATH) => Some(NO_CALL),
        405 | 501 => Some(NO_CALL),
        401 => Some("check the API key (TINKER_API_KEY)"),
        402 => Some("settle the account, or ask whoever pays for it"),
        403 => Some("the API key may not do this; check its project and organization"),
        404 => Some("check the id and the base URL (TINKER_BASE_URL)"),
        _ => None,
    }
}

/// Servers say in their own words that a prompt does not fit; all of them speak of the context.
fn context_hint(said: &str) -> Option<&'static str> {
    let said = said.to_ascii_lowercase();
    let too_long = ["length", "long", "exceed", "window"].iter().any(|word| said.contains(word));
    (said.contains("context") && too_long).then_some(
        "shorten the prompt or lower max_tokens; the model's limit is in server_capabilities",
    )
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &self.0;
        if !inner.what.is_empty() {
            write!(f, "{} failed", inner.what)?;
            if inner.attempts > 1 {
                let seconds = inner.elapsed.as_secs_f64();
                write!(f, " after {} attempts ({seconds:.1} s)", inner.attempts)?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&inner.why)
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
    fn from(why: InvalidInput) -> Self {
        Self::new(ErrorKind::InvalidInput, why.to_string())
    }
}

impl From<DecodeError> for Error {
    fn from(why: DecodeError) -> Self {
        Self::new(ErrorKind::Decode, format!("the server's answer makes no sense: {why}"))
            .with_source(why)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture;

    /// Covers T2.2.6.
    #[test]
    fn statuses_become_kinds_that_keep_what_was_said() {
        for case in fixture::cases("error_mapping.json") {
            let status = u16::try_from(case["status"].as_u64().unwrap()).unwrap();
            let body = case["body"].as_str().unwrap();
            let error = Error::of_reply(status, body.as_bytes(), None);
            let kind = match case["error_kind"].as_str().unwrap() {
                "BadRequestError" | "UnprocessableEntityError" | "APIStatusError" => {
                    ErrorKind::Rejected
                }
                "AuthenticationError" => ErrorKind::Auth,
                "BillingError" => ErrorKind::Billing,
                "PermissionDeniedError" => ErrorKind::Permission,
                "NotFoundError" => ErrorKind::NotFound,
                "ConflictError" => ErrorKind::Conflict,
                "RateLimitError" => ErrorKind::RateLimited,
                "InternalServerError" => ErrorKind::Server,
                other => panic!("{other}"),
            };
            assert_eq!(error.kind(), kind, "{case}");
            assert_eq!(json!(error.status()), case["status_code_attr"]);
            assert_eq!(error.body().unwrap_or(""), body);
        }
    }

    #[test]
    fn what_may_succeed_later_and_whose_fault_it_was() {
        let transport = |kind| Error::of_transport(kind, "scripted".into());
        for case in fixture::cases("retry_classification.json") {
            let name = case["error"].as_str().unwrap();
            let error = if let Some(status) = name.strip_prefix("status ") {
                Error::of_reply(status.parse().unwrap(), b"", None)
            } else {
                match name {
                    "timeout" | "api_timeout" | "transport_timeout" => {
                        transport(ErrorKind::Timeout)
                    }
                    "connection" => transport(ErrorKind::Connect),
                    "value_error" | "generic_sdk_error" => {
                        Error::new(ErrorKind::InvalidInput, "scripted")
                    }
                    "promise_expired(410)" => Error::of_reply(410, b"", None).expired(),
                    failed if failed.starts_with("request_failed") => {
                        let category = failed.rsplit(['=', '_']).next().unwrap();
                        let category = ErrorCategory::from_name(category);
                        Error::of_work(RequestFailed { error: String::new(), category })
                    }
                    // A raw error of an HTTP library never leaves the transport here; causes of
                    // causes are the journal's business.
                    "raw_connect_error" => continue,
                    cause if cause.contains("caused by") => continue,
                    other => panic!("no test for {other}"),
                }
            };
            assert_eq!(json!(error.is_user_error()), case["is_user_error"], "{case}");
            let anew = crate::sampling::is_resubmittable(&error);
            assert_eq!(json!(anew), case["sampling_handler_retryable"], "{case}");
            // Unlike in the reference, failed work says whether it may be worth asking for again;
            // nobody here does so by themselves.
            if error.kind() != ErrorKind::WorkFailed {
                assert_eq!(json!(error.is_retryable()), case["holder_retryable"], "{case}");
            }
        }
    }

    #[test]
    fn a_hint_says_what_to_do_where_that_is_known() {
        let long = b"{\"detail\":\"prompt exceeds the context window of 4096\"}";
        assert!(Error::of_reply(400, long, None).hint().unwrap().contains("max_tokens"));
        let failed = RequestFailed {
            error: "Context length exceeded".to_owned(),
            category: ErrorCategory::User,
        };
        assert!(Error::of_work(failed).hint().is_some());
        assert!(Error::of_reply(401, b"", None).hint().unwrap().contains("TINKER_API_KEY"));
        assert!(Error::of_reply(400, b"odd", None).hint().is_none());
        let unknown = Error::of_reply(404, br#"{"detail":"Not Found"}"#, None);
        assert!(unknown.hint().unwrap().contains("may not have this call"));
        let gone = Error::of_reply(404, br#"{"detail":"Model not found"}"#, None);
        assert!(gone.hint().unwrap().contains("check the id"));
    }

    #[test]
    fn an_error_reads_as_a_sentence() {
        let error = Error::of_reply(503, b"{\"detail\":\"busy\"}", None)
            .after(3, Duration::from_secs(41))
            .during("GET /api/v1/sessions");
        assert_eq!(
            error.to_string(),
            "GET /api/v1/sessions failed after 3 attempts (41.0 s): the server answered 503: busy"
        );
    }
}
