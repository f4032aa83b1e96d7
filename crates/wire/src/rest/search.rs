//! Session search.

use serde::{Deserialize, Serialize};

use crate::InvalidInput;
use crate::ids::{ModelId, RequestId, SamplerId, SessionId};
use crate::metadata::Metadata;
use crate::request::{json_request, json_response};
use crate::session::FinishReason;
use crate::setters::setters;
use crate::time::Timestamp;

/// Searches sessions. A session is returned if it matches every filter that is set.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::rest::{SearchSessions, SessionStatusFilter};
///
/// let search = SearchSessions::default()
///     .display_name("ablation")
///     .statuses([SessionStatusFilter::Active])
///     .limit(200);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SearchSessions {
    /// Session id to match.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// Projects to search; all projects by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project_ids: Option<Vec<String>>,
    /// Metadata that the session must contain.
    pub user_metadata: Metadata,
    /// Display name to match. Must not be empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub display_name: Option<String>,
    /// Owners to search. Defaults to [`SearchOwner::Own`].
    pub owner: SearchOwner,
    /// States to match; all states by default. Must not be empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub statuses: Option<Vec<SessionStatusFilter>>,
    /// Maximum number of sessions to return, 1 to 200. Defaults to 50.
    pub limit: u64,
    /// Position to continue from: the [`SessionSearchPage::next_cursor`] of the previous page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<SearchCursor>,
}

impl Default for SearchSessions {
    fn default() -> Self {
        Self {
            session_id: None,
            project_ids: None,
            user_metadata: Metadata::new(),
            display_name: None,
            owner: SearchOwner::Own,
            statuses: None,
            limit: 50,
            cursor: None,
        }
    }
}

setters!(SearchSessions {
    session_id: impl Into<SessionId> => Some(session_id.into());
    project_ids: impl Into<Vec<String>> => Some(project_ids.into());
    user_metadata: Metadata;
    display_name: impl Into<String> => Some(display_name.into());
    owner: SearchOwner;
    statuses: impl Into<Vec<SessionStatusFilter>> => Some(statuses.into());
    limit: u64;
    cursor: Option<SearchCursor>;
});

impl SearchSessions {
    fn validate_filters(&self) -> Result<(), InvalidInput> {
        let invalid = |field: &str, reason: &str| Err(InvalidInput::new(field, reason));
        if !(1..=200).contains(&self.limit) {
            return invalid("limit", "must be from 1 to 200");
        }
        if self.display_name.as_deref() == Some("") {
            return invalid("display_name", "must not be empty");
        }
        if self.statuses.as_deref().is_some_and(<[_]>::is_empty) {
            return invalid("statuses", "must not be empty; omit the field to match all states");
        }
        let no_reasons = |status: &SessionStatusFilter| match status {
            SessionStatusFilter::ClientFinished { reasons: Some(reasons) } => reasons.is_empty(),
            _ => false,
        };
        if self.statuses.iter().flatten().any(no_reasons) {
            return invalid(
                "statuses.reasons",
                "must not be empty; omit the field to match all reasons",
            );
        }
        if let SearchOwner::User { owner_urns } = &self.owner
            && !(1..=10).contains(&owner_urns.len())
        {
            return invalid("owner.owner_urns", "must have 1 to 10 entries");
        }
        if self.cursor.as_ref().is_some_and(|cursor| !cursor.last_created_at.has_offset()) {
            return invalid("cursor.last_created_at", "must have a UTC offset");
        }
        Ok(())
    }
}

/// Owners whose sessions are searched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
#[non_exhaustive]
pub enum SearchOwner {
    /// The caller.
    #[default]
    Own,
    /// All users whose sessions the caller may read.
    Accessible,
    /// The listed users.
    User {
        /// URNs of the users, 1 to 10.
        owner_urns: Vec<String>,
    },
}

/// Session state to match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum SessionStatusFilter {
    /// Matches sessions that are running.
    Active,
    /// Matches sessions that the server cancelled.
    Cancelled,
    /// Matches sessions that failed.
    Failed,
    /// Matches sessions that their client finished.
    ClientFinished {
        /// Finish reasons to match; all reasons by default. Must not be empty.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reasons: Option<Vec<FinishReasonFilter>>,
    },
}

/// [`FinishReason`] in a search, where it is encoded as a string instead of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum FinishReasonFilter {
    /// The program completed.
    Success,
    /// The program failed.
    Errored,
    /// The user interrupted the program.
    Interrupted,
}

impl From<FinishReason> for FinishReasonFilter {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Success => Self::Success,
            FinishReason::Errored => Self::Errored,
            FinishReason::Interrupted => Self::Interrupted,
        }
    }
}

/// Last session of a page, from which the next page continues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SearchCursor {
    /// Creation time of the session.
    pub last_created_at: Timestamp,
    /// Id of the session.
    pub last_session_id: SessionId,
}

impl SearchCursor {
    /// Creates the cursor of a page that ends with this session.
    #[must_use]
    pub fn new(last_created_at: Timestamp, last_session_id: SessionId) -> Self {
        Self { last_created_at, last_session_id }
    }
}

/// One page of matching sessions: the response to [`SearchSessions`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SessionSearchPage {
    /// Matching sessions, newest first.
    pub sessions: Vec<SessionSummary>,
    /// Cursor of the next page; `None` on the last page.
    #[serde(default)]
    pub next_cursor: Option<SearchCursor>,
}

impl SessionSearchPage {
    /// Creates a page.
    #[must_use]
    pub fn new(sessions: Vec<SessionSummary>, next_cursor: Option<SearchCursor>) -> Self {
        Self { sessions, next_cursor }
    }
}

/// A session found by a search.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SessionSummary {
    /// Id of the session.
    pub session_id: SessionId,
    /// Time at which the session was created.
    pub created_at: Timestamp,
    /// Owner of the session.
    pub owner: String,
    /// Project of the session.
    pub project_id: String,
    /// State of the session, if the server reports it.
    #[serde(default)]
    pub status: Option<SessionStatus>,
    /// Number of checkpoints that the session saved.
    pub checkpoints_count: u64,
    /// Display name of the session.
    #[serde(default)]
    pub display_name: Option<String>,
    /// Metadata that the user attached to the session.
    #[serde(default)]
    pub user_metadata: Option<Metadata>,
    /// Total size of the session's checkpoints, in bytes.
    #[serde(default)]
    pub checkpoint_storage_bytes: Option<u64>,
}

impl SessionSummary {
    /// Creates a summary of a session without checkpoints, state, name or metadata.
    pub fn new(
        session_id: SessionId,
        created_at: Timestamp,
        owner: impl Into<String>,
        project_id: impl Into<String>,
    ) -> Self {
        Self {
            session_id,
            created_at,
            owner: owner.into(),
            project_id: project_id.into(),
            status: None,
            checkpoints_count: 0,
            display_name: None,
            user_metadata: None,
            checkpoint_storage_bytes: None,
        }
    }
}

setters!(SessionSummary {
    status: Option<SessionStatus>;
    checkpoints_count: u64;
    display_name: Option<String>;
    user_metadata: Option<Metadata>;
    checkpoint_storage_bytes: Option<u64>;
});

/// State of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum SessionStatus {
    /// The session is running.
    Active,
    /// The server cancelled the session.
    Cancelled {
        /// Description of the cause.
        #[serde(default)]
        detail: Option<String>,
    },
    /// The session failed.
    Failed {
        /// Side that caused the failure.
        category: SessionFailureCategory,
        /// Object that failed.
        reason: SessionFailureReason,
        /// Description of the failure.
        message: String,
    },
    /// The client finished the session.
    ClientFinished {
        /// Outcome that the client reported.
        reason: FinishReason,
        /// Description that the client sent.
        #[serde(default)]
        detail: Option<String>,
    },
}

/// Side that caused a session to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum SessionFailureCategory {
    /// A user error, such as an invalid request.
    User,
    /// A server error.
    Internal,
}

/// Object whose failure made a session fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum SessionFailureReason {
    /// A request failed.
    Request {
        /// Id of the request.
        request_id: RequestId,
        /// Type of the request.
        request_type: String,
    },
    /// A training run failed.
    TrainingRun {
        /// Id of the run.
        training_run_id: ModelId,
    },
    /// A sampling session failed.
    SamplingSession {
        /// Id of the sampling session.
        sampling_session_id: SamplerId,
    },
}

json_response!(SessionSearchPage);

json_request! {
    SearchSessions: SearchSessions => SessionSearchPage, validate SearchSessions::validate_filters;
}
