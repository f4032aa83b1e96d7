//! Listing and managing sessions.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::InvalidInput;
use crate::codec::json;
use crate::ids::{ModelId, SamplerId, SessionId};
use crate::metadata::Metadata;
use crate::request::{ApiRequest, RequestBody, bare_request, json_response};
use crate::route::Route;
use crate::secret::RedactedUrl;
use crate::setters::setters;

use super::{AccessScope, ScopeQuery};

/// Lists session ids, one page at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ListSessions {
    /// Maximum number of sessions to return. Defaults to 20.
    pub limit: u64,
    /// Number of sessions to skip. Defaults to 0.
    pub offset: u64,
    /// Ownership filter. Defaults to [`AccessScope::Owned`].
    pub access_scope: AccessScope,
}

impl Default for ListSessions {
    fn default() -> Self {
        Self { limit: 20, offset: 0, access_scope: AccessScope::Owned }
    }
}

setters!(ListSessions {
    limit: u64;
    offset: u64;
    access_scope: AccessScope;
});

/// One page of session ids: the response to [`ListSessions`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SessionPage {
    /// Session ids, newest first.
    pub sessions: Vec<SessionId>,
}

impl SessionPage {
    /// Creates a page.
    #[must_use]
    pub fn new(sessions: Vec<SessionId>) -> Self {
        Self { sessions }
    }
}

/// Returns one session.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GetSession {
    /// Id of the session.
    pub session_id: SessionId,
    /// Ownership filter.
    pub query: ScopeQuery,
}

impl GetSession {
    /// Requests the session `session_id` if it belongs to the caller.
    pub fn new(session_id: impl Into<SessionId>) -> Self {
        Self { session_id: session_id.into(), query: ScopeQuery::default() }
    }
}

setters!(GetSession { query: impl Into<ScopeQuery> => query.into(); });

/// Models, sampling sessions and metadata of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SessionInfo {
    /// Models created in the session.
    pub training_run_ids: Vec<ModelId>,
    /// Sampling sessions created in the session.
    pub sampler_ids: Vec<SamplerId>,
    /// Metadata that the user attached to the session.
    #[serde(default)]
    pub user_metadata: Option<Metadata>,
    /// Display name of the session.
    #[serde(default)]
    pub display_name: Option<String>,
}

setters!(SessionInfo {
    training_run_ids: Vec<ModelId>;
    sampler_ids: Vec<SamplerId>;
    user_metadata: Option<Metadata>;
    display_name: Option<String>;
});

/// Moves a session to a project.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AssignSessionProject {
    /// Id of the session.
    pub session_id: SessionId,
    /// Request body: the new project.
    pub project: SessionProject,
}

impl AssignSessionProject {
    /// Moves the session `session_id` to the project `project_id`.
    pub fn new(session_id: impl Into<SessionId>, project_id: impl Into<String>) -> Self {
        Self { session_id: session_id.into(), project: SessionProject::new(project_id) }
    }
}

/// Body of [`AssignSessionProject`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SessionProject {
    /// Id of the project.
    pub project_id: String,
}

impl SessionProject {
    /// Creates the body that assigns the project `project_id`.
    pub fn new(project_id: impl Into<String>) -> Self {
        Self { project_id: project_id.into() }
    }
}

/// Starts or polls the trace export of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TraceExportRequest {
    /// Id of the session.
    pub session_id: SessionId,
}

impl TraceExportRequest {
    /// Requests the trace of the session `session_id`.
    pub fn new(session_id: impl Into<SessionId>) -> Self {
        Self { session_id: session_id.into() }
    }
}

/// State of a trace export.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TraceExport {
    /// Progress of the export.
    pub status: TraceStatus,
    /// Download URL, once the export is ready. The URL is a credential: never log it.
    #[serde(default)]
    pub url: Option<String>,
    /// Cause of a failed export.
    #[serde(default)]
    pub error: Option<String>,
}

impl fmt::Debug for TraceExport {
    /// Prints the host of the URL and omits its path and query, which contain the signature.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceExport")
            .field("status", &self.status)
            .field("url", &self.url.as_deref().map(RedactedUrl::Host))
            .field("error", &self.error)
            .finish()
    }
}

/// Progress of a trace export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TraceStatus {
    /// The server is preparing the trace.
    Pending,
    /// The trace can be downloaded.
    Ready,
    /// The export failed.
    Failed,
}

impl ApiRequest for AssignSessionProject {
    type Response = ();
    const ROUTE: Route = Route::AssignSessionProject;

    fn params(&self) -> Vec<&str> {
        vec![self.session_id.as_str()]
    }

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Json(json::encode(&self.project)?))
    }
}

json_response!(SessionPage, SessionInfo, TraceExport);

bare_request! {
    ListSessions: ListSessions => SessionPage, |r| params [], query r;
    GetSession: GetSession => SessionInfo, |r| params [r.session_id.as_str()], query &r.query;
    TraceExportRequest: TraceExport => TraceExport, |r| params [r.session_id.as_str()];
}
