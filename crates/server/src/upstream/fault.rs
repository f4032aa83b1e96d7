//! [`Fault`]: why an upstream did not execute a request.

use tinkex::{Error, ErrorCategory, ErrorKind, SubmitError};

use crate::store::FailureCategory;

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
    /// The request failed, and would fail again.
    Failed(FailureCategory, String),
}

impl Fault {
    pub(super) fn reason(&self) -> &str {
        match self {
            Self::Unavailable(reason)
            | Self::Lost(reason)
            | Self::InDoubt(reason)
            | Self::Failed(_, reason) => reason,
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

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        let is_lost = || LOST.iter().any(|part| message.contains(part));
        match error.kind() {
            ErrorKind::Connect
            | ErrorKind::Timeout
            | ErrorKind::Server
            | ErrorKind::RateLimited
            | ErrorKind::Billing
            | ErrorKind::Auth
            | ErrorKind::Certificate => Self::Unavailable(message),
            ErrorKind::NotFound if NO_CHECKPOINT.iter().any(|part| message.contains(part)) => {
                Self::Failed(FailureCategory::User, message)
            }
            ErrorKind::Expired | ErrorKind::NotFound => Self::Lost(message),
            _ if is_lost() => Self::Lost(message),
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
        if in_doubt { Self::InDoubt(error.to_string()) } else { error.into() }
    }
}
