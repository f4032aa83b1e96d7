//! [`Fault`]: why an upstream did not execute a request.

use std::time::Duration;

use tinkex::{Error, ErrorCategory, ErrorKind, Hint, SubmitError};

use crate::store::FailureCategory;

/// Maximum number of [unexpected](Fault::Unexpected) responses to one request before it fails.
pub(super) const MAX_UNEXPECTED: u32 = 3;
/// Delay before the second attempt after a fault. Later delays are twice the previous one.
pub(super) const FIRST_DELAY: Duration = Duration::from_millis(200);
/// Maximum delay between two attempts.
pub(super) const MAX_DELAY: Duration = Duration::from_secs(10);

/// Why an upstream did not execute a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The upstream does not respond, or cannot execute the request now.
    Unavailable(String),
    /// The upstream no longer has the model.
    Lost(String),
    /// The upstream may or may not have accepted the request, so that the state of the model is not
    /// known.
    InDoubt(String),
    /// The upstream responded with status 500, without the endpoint, or with something that cannot
    /// be decoded. It may have executed the request, as after [`InDoubt`](Self::InDoubt), and may
    /// respond to every repetition in the same way: the number of attempts is limited.
    Unexpected(String),
    /// The request failed, and would fail again.
    Failed(FailureCategory, String),
    /// The model cannot be created again, so that no request of it can be executed.
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

    /// Returns the fault for a request that the upstream has accepted: if it does not respond now,
    /// it may execute the request all the same.
    pub(super) fn into_doubt(self) -> Self {
        match self {
            Self::Unavailable(reason) => Self::InDoubt(reason),
            other => other,
        }
    }
}

/// Parts of the messages with which upstreams report that they do not have a model, a session or a
/// future any more.
const LOST: [&str; 5] =
    ["not loaded", "Model not found", "no longer exists", "does not exist", "has ended"];

/// Parts of the messages with which upstreams report that they do not have a checkpoint: those of
/// SkyRL and of this server. A new model does not change that.
const NO_CHECKPOINT: [&str; 2] = ["Checkpoint not found", "checkpoint tinker://"];

/// Part of the message with which SkyRL reports that no slot is free for a model.
const NO_SLOT: &str = "Maximum number of LoRA adapters";

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
            ErrorKind::Connect
            | ErrorKind::Timeout
            | ErrorKind::RateLimited
            | ErrorKind::Billing
            | ErrorKind::Auth
            | ErrorKind::Certificate => Self::Unavailable(message),
            ErrorKind::Server | ErrorKind::Decode => Self::Unexpected(message),
            // A proxy may respond with it while its server starts.
            ErrorKind::NotFound if error.hint() == Some(Hint::CheckEndpoint) => {
                Self::Unexpected(message)
            }
            ErrorKind::NotFound if contains(&NO_CHECKPOINT) => {
                Self::Failed(FailureCategory::User, message)
            }
            ErrorKind::Expired | ErrorKind::NotFound => Self::Lost(message),
            _ if contains(&LOST) => Self::Lost(message),
            _ if message.contains(NO_SLOT) => Self::Unavailable(message),
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
        let SubmitError { error, in_doubt, .. } = failed;
        match Self::from(error) {
            fault @ Self::Unexpected(_) => fault,
            fault if in_doubt => Self::InDoubt(fault.reason().to_owned()),
            fault => fault,
        }
    }
}
