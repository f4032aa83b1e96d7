//! Finding sessions by what they are.

use serde::{Deserialize, Serialize};

use crate::InvalidInput;
use crate::ids::{ModelId, RequestId, SamplerId, SessionId};
use crate::metadata::Metadata;
use crate::request::{json_request, json_response};
use crate::session::FinishReason;
use crate::time::Timestamp;

/// Asks for a page of sessions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SearchSessions {
    /// The session with this id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// Those of these projects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project_ids: Option<Vec<String>>,
    /// Those with all of this remembered.
    pub user_metadata: Metadata,
    /// Those with this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub display_name: Option<String>,
    /// Whose.
    pub owner: SearchOwner,
    /// Those in one of these states.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub statuses: Option<Vec<SessionStatusFilter>>,
    /// How many at most, 1 to 200.
    pub limit: u64,
    /// Where the last page ended.
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

impl SearchSessions {
    fn check_limits(&self) -> Result<(), InvalidInput> {
        let wrong = |field: &str, why: &str| Err(InvalidInput::new(field, why));
        if !(1..=200).contains(&self.limit) {
            return wrong("limit", "must be from 1 to 200");
        }
        if self.display_name.as_deref() == Some("") {
            return wrong("display_name", "must not be empty");
        }
        if self.statuses.as_deref().is_some_and(<[_]>::is_empty) {
            return wrong("statuses", "must not be empty; leave it out for all");
        }
        let no_reasons = |status: &SessionStatusFilter| matches!(status, SessionStatusFilter::ClientFinished { reasons: Some(reasons) } if reasons.is_empty());
        if self.statuses.iter().flatten().any(no_reasons) {
            return wrong("statuses.reasons", "must not be empty; leave it out for all");
        }
        if let SearchOwner::User { owner_urns } = &self.owner
            && !(1..=10).contains(&owner_urns.len())
        {
            return wrong("owner.owner_urns", "must name 1 to 10 owners");
        }
        if self.cursor.as_ref().is_some_and(|cursor| !cursor.last_created_at.has_offset()) {
            return wrong("cursor.last_created_at", "must have an offset from UTC");
        }
        Ok(())
    }
}

/// Whose sessions are searched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum SearchOwner {
    /// The caller's own.
    #[default]
    Own,
    /// All that the caller may see.
    Accessible,
    /// Those of these people.
    User {
        /// Their URNs, 1 to 10.
        owner_urns: Vec<String>,
    },
}

/// A state to search for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SessionStatusFilter {
    /// Still running.
    Active,
    /// Cancelled.
    Cancelled,
    /// Failed.
    Failed,
    /// Ended by its client.
    ClientFinished {
        /// For one of these reasons.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reasons: Option<Vec<FinishReasonFilter>>,
    },
}

/// Why a client ended a session, as one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReasonFilter {
    /// All was done.
    Success,
    /// Something failed.
    Errored,
    /// Someone stopped it.
    Interrupted,
}

/// Where a page ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SearchCursor {
    /// When its last session began.
    pub last_created_at: Timestamp,
    /// That session.
    pub last_session_id: SessionId,
}

/// A page of sessions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSearchPage {
    /// The sessions.
    pub sessions: Vec<SessionSummary>,
    /// Where to go on, if there are more.
    #[serde(default)]
    pub next_cursor: Option<SearchCursor>,
}

/// One session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSummary {
    /// Its id.
    pub session_id: SessionId,
    /// When it began.
    pub created_at: Timestamp,
    /// Whose it is.
    pub owner: String,
    /// Its project.
    pub project_id: String,
    /// Its state, if known.
    #[serde(default)]
    pub status: Option<SessionStatus>,
    /// How many checkpoints it has.
    pub checkpoints_count: u64,
    /// Its name for people.
    #[serde(default)]
    pub display_name: Option<String>,
    /// What was remembered with it.
    #[serde(default)]
    pub user_metadata: Option<Metadata>,
    /// How much storage its checkpoints take.
    #[serde(default)]
    pub checkpoint_storage_bytes: Option<u64>,
}

/// The state of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SessionStatus {
    /// Still running.
    Active,
    /// Cancelled.
    Cancelled {
        /// More about it.
        #[serde(default)]
        detail: Option<String>,
    },
    /// Failed.
    Failed {
        /// Whose fault it was.
        category: SessionFailureCategory,
        /// What failed.
        reason: SessionFailureReason,
        /// More about it.
        message: String,
    },
    /// Ended by its client.
    ClientFinished {
        /// Why.
        reason: FinishReason,
        /// More about it.
        #[serde(default)]
        detail: Option<String>,
    },
}

/// Whose fault it was that a session failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionFailureCategory {
    /// The user's.
    User,
    /// The server's.
    Internal,
}

/// What made a session fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SessionFailureReason {
    /// A request.
    Request {
        /// Which.
        request_id: RequestId,
        /// Of what type.
        request_type: String,
    },
    /// A model.
    TrainingRun {
        /// Which.
        training_run_id: ModelId,
    },
    /// A sampling session.
    SamplingSession {
        /// Which.
        sampling_session_id: SamplerId,
    },
}

json_response!(SessionSearchPage);

json_request! {
    SearchSessions: SearchSessions => SessionSearchPage, check SearchSessions::check_limits;
}
