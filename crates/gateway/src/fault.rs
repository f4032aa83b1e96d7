//! [`Fault`]: why an upstream did not execute a request.

use std::time::Duration;

use tinkex::{Error, ErrorCategory, ErrorKind, Hint};
use tinkex_backoff::Backoff;
use tinkex_store::record::FailureCategory;

use crate::upstream_session::SubmitError;

/// Number of [unexpected](Fault::Unexpected) responses to one request after which the request
/// fails.
pub(super) const MAX_UNEXPECTED: u32 = 3;
/// Delays between attempts after a fault.
pub(super) const BACKOFF: Backoff =
    Backoff::new(Duration::from_millis(200)).cap(Duration::from_secs(10));

/// Reason why an upstream did not execute a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The upstream does not respond, or cannot execute the request now.
    Unavailable(String),
    /// The upstream no longer has the model.
    Lost(String),
    /// The upstream may or may not have accepted the request, so that the state of the model is not
    /// known.
    InDoubt(String),
    /// The upstream responded with status 500, does not have the endpoint, or sent a response that
    /// cannot be decoded. The upstream may have executed the request, as with
    /// [`InDoubt`](Self::InDoubt). The upstream may respond to every repetition in the same way, so
    /// the number of attempts is limited.
    Unexpected(String),
    /// The request failed, and would fail again.
    Failed(FailureCategory, String),
    /// The model cannot be created again, so none of its requests can be executed.
    Unrestorable(FailureCategory, String),
}

impl Fault {
    pub(super) fn reason(&self) -> &str {
        match self {
            Self::Unavailable(reason)
            | Self::Lost(reason)
            | Self::InDoubt(reason)
            | Self::Unexpected(reason)
            | Self::Failed(_, reason)
            | Self::Unrestorable(_, reason) => reason,
        }
    }

    /// Converts the fault of a request that the upstream has accepted: [`Unavailable`] becomes
    /// [`InDoubt`], because the upstream may execute the request although it does not respond.
    ///
    /// [`Unavailable`]: Self::Unavailable
    /// [`InDoubt`]: Self::InDoubt
    pub(super) fn into_doubt(self) -> Self {
        match self {
            Self::Unavailable(reason) => Self::InDoubt(reason),
            other => other,
        }
    }
}

/// Parts of the messages with which upstreams report that they no longer have a model, a session or
/// a future.
const LOST_MESSAGES: [&str; 5] =
    ["not loaded", "Model not found", "no longer exists", "does not exist", "has ended"];

/// Parts of the messages with which SkyRL and this server report that they do not have a
/// checkpoint. Creating the model again would not help: the new model would not have the checkpoint
/// either.
const NO_CHECKPOINT_MESSAGES: [&str; 2] = ["Checkpoint not found", "checkpoint tinker://"];

/// Part of the message with which SkyRL reports that no slot is free for a model.
const NO_SLOT_MESSAGE: &str = "Maximum number of LoRA adapters";

/// Status with which a server reports that the session has ended.
const GONE: u16 = 410;

/// Returns whether a status comes from an overloaded server, or from a proxy whose server does not
/// respond.
fn is_temporary(status: u16) -> bool {
    matches!(status, 408 | 425 | 429 | 502..=504 | 520..=530)
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        let contains = |parts: &[&str]| parts.iter().any(|part| message.contains(part));
        match error.kind() {
            _ if error.status().is_some_and(is_temporary) => Self::Unavailable(message),
            _ if error.status() == Some(GONE) => Self::Lost(message),
            ErrorKind::Connect
            | ErrorKind::Timeout
            | ErrorKind::RateLimited
            | ErrorKind::Billing
            | ErrorKind::Auth
            | ErrorKind::Certificate => Self::Unavailable(message),
            ErrorKind::Server | ErrorKind::Decode => Self::Unexpected(message),
            // A proxy may respond with this status while the server behind it starts.
            ErrorKind::NotFound if error.hint() == Some(Hint::CheckEndpoint) => {
                Self::Unexpected(message)
            }
            ErrorKind::NotFound if contains(&NO_CHECKPOINT_MESSAGES) => {
                Self::Failed(FailureCategory::User, message)
            }
            ErrorKind::Expired | ErrorKind::NotFound => Self::Lost(message),
            _ if contains(&LOST_MESSAGES) => Self::Lost(message),
            _ if message.contains(NO_SLOT_MESSAGE) => Self::Unavailable(message),
            ErrorKind::WorkFailed if error.category() == Some(ErrorCategory::Server) => {
                Self::Failed(FailureCategory::Server, message)
            }
            ErrorKind::Conflict => Self::Failed(FailureCategory::Conflict, message),
            _ => Self::Failed(FailureCategory::User, message),
        }
    }
}

impl From<SubmitError> for Fault {
    fn from(failed: SubmitError) -> Self {
        let SubmitError { error, in_doubt } = failed;
        match Self::from(error) {
            fault @ Self::Unexpected(_) => fault,
            fault if in_doubt => Self::InDoubt(fault.reason().to_owned()),
            fault => fault,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_has_ended_is_lost_and_not_a_failure_of_the_request() {
        let error = Error::from_response(410, b"{\"detail\":\"gone\"}", None);
        assert!(matches!(Fault::from(error), Fault::Lost(_)));
        let error = Error::from_response(400, b"{\"detail\":\"rank must be positive\"}", None);
        assert!(matches!(Fault::from(error), Fault::Failed(FailureCategory::User, _)));
    }
}
