//! Sessions, looked at from outside.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::InvalidInput;
use crate::codec::json;
use crate::ids::{ModelId, SamplerId, SessionId};
use crate::metadata::Metadata;
use crate::request::{ApiRequest, RequestBody, bare_request, json_response};
use crate::route::Route;
use crate::secret::Address;

use super::{AccessScope, ScopeQuery};

/// Asks for a page of session ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListSessions {
    /// How many at most.
    pub limit: u64,
    /// How many to skip.
    pub offset: u64,
    /// Whose.
    pub access_scope: AccessScope,
}

impl Default for ListSessions {
    fn default() -> Self {
        Self { limit: 20, offset: 0, access_scope: AccessScope::Owned }
    }
}

/// Session ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionPage {
    /// The ids, newest first.
    pub sessions: Vec<SessionId>,
}

/// Asks for one session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GetSession {
    /// The session.
    pub session_id: SessionId,
    /// Whose sessions may be looked at.
    pub query: ScopeQuery,
}

/// What a session made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionInfo {
    /// Its models.
    pub training_run_ids: Vec<ModelId>,
    /// Its sampling sessions.
    pub sampler_ids: Vec<SamplerId>,
    /// What was remembered with it.
    #[serde(default)]
    pub user_metadata: Option<Metadata>,
    /// Its name for people.
    #[serde(default)]
    pub display_name: Option<String>,
}

/// Moves a session to a project.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssignSessionProject {
    /// The session.
    pub session_id: SessionId,
    /// The project.
    pub project: SessionProject,
}

/// The body of [`AssignSessionProject`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionProject {
    /// The project.
    pub project_id: String,
}

/// Asks for a session's trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceExportRequest {
    /// The session.
    pub session_id: SessionId,
}

/// How far a trace is.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceExport {
    /// How far.
    pub status: TraceStatus,
    /// Where to download it, once it is ready. It needs no credential, so never log it.
    #[serde(default)]
    pub url: Option<String>,
    /// Why there will be none.
    #[serde(default)]
    pub error: Option<String>,
}

impl fmt::Debug for TraceExport {
    /// Tells who has the trace, without the way in.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceExport")
            .field("status", &self.status)
            .field("url", &self.url.as_deref().map(Address::Host))
            .field("error", &self.error)
            .finish()
    }
}

/// How far a trace is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TraceStatus {
    /// Being made.
    Pending,
    /// Ready to download.
    Ready,
    /// There will be none.
    Failed,
}

impl ApiRequest for AssignSessionProject {
    type Response = ();
    const ROUTE: Route = Route::AssignSessionProject;

    fn params(&self) -> Vec<&str> {
        vec![self.session_id.as_str()]
    }

    fn body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Json(json::encode(&self.project)?))
    }
}

json_response!(SessionPage, SessionInfo, TraceExport);

bare_request! {
    ListSessions: ListSessions => SessionPage, |c| params [], query c;
    GetSession: GetSession => SessionInfo, |c| params [c.session_id.as_str()], query &c.query;
    TraceExportRequest: TraceExport => TraceExport, |c| params [c.session_id.as_str()];
}
