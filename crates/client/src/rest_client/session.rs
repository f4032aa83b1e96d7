//! Sessions, looked at from outside.

use std::time::Duration;

use futures_util::stream::{Stream, TryStreamExt, iter, try_unfold};
use tinkex_wire::SessionId;
use tinkex_wire::rest::{
    AccessScope, AssignSessionProject, GetSession, ListSessions, SearchSessions, SessionInfo,
    SessionPage, SessionSearchPage, SessionSummary, TraceExportRequest, TraceStatus,
};

use crate::error::{Error, ErrorKind, Result};

use super::RestClient;

/// How often a trace is asked for while it is being made.
const TRACE_PAUSE: Duration = Duration::from_secs(5);

impl RestClient {
    /// One page of session ids, newest first.
    ///
    /// # Errors
    /// If the server cannot be asked.
    pub async fn list_sessions(&self, list: &ListSessions) -> Result<SessionPage> {
        self.call("list_sessions", list).await
    }

    /// What a session made.
    ///
    /// # Errors
    /// If there is none of that id among those in scope.
    pub async fn get_session(
        &self,
        session_id: impl Into<SessionId>,
        access_scope: AccessScope,
    ) -> Result<SessionInfo> {
        self.call("get_session", &GetSession::new(session_id).query(access_scope)).await
    }

    /// One page of the sessions that match.
    ///
    /// # Errors
    /// If the search makes no sense, or the server cannot be asked.
    pub async fn search_sessions(&self, search: &SearchSessions) -> Result<SessionSearchPage> {
        self.call("search_sessions", search).await
    }

    /// All sessions that match, fetched as they are asked for.
    pub fn sessions_found(
        &self,
        search: SearchSessions,
    ) -> impl Stream<Item = Result<SessionSummary>> {
        let pages = try_unfold(Some(search), move |search| async move {
            let Some(mut search) = search else { return Ok::<_, Error>(None) };
            let page = self.search_sessions(&search).await?;
            let next = page.next_cursor.map(|cursor| {
                search.cursor = Some(cursor);
                search
            });
            Ok(Some((iter(page.sessions.into_iter().map(Ok)), next)))
        });
        pages.try_flatten()
    }

    /// Moves a session to a project.
    ///
    /// # Errors
    /// If there is no such session or project.
    pub async fn assign_session_project(
        &self,
        session_id: impl Into<SessionId>,
        project_id: impl Into<String>,
    ) -> Result<()> {
        let call = AssignSessionProject::new(session_id, project_id);
        self.call("assign_session_project", &call).await
    }

    /// Where to download a session's trace, once it is made. Waits for that; drop the future to
    /// stop waiting.
    ///
    /// # Errors
    /// If the trace cannot be made.
    pub async fn export_session_trace(&self, session_id: impl Into<SessionId>) -> Result<String> {
        let call = TraceExportRequest::new(session_id);
        let mut waited = false;
        loop {
            let trace = self.call("export_session_trace", &call).await?;
            match trace.status {
                TraceStatus::Ready => {
                    let missing = || Error::new(ErrorKind::Decode, "a ready trace without a URL");
                    return trace.url.ok_or_else(missing);
                }
                TraceStatus::Failed => {
                    let why = trace.error.unwrap_or_else(|| "the server gave no reason".to_owned());
                    return Err(Error::new(ErrorKind::Server, format!("no trace: {why}")));
                }
                // `Pending`, or a state that a later version of the protocol adds.
                _ => {
                    if !waited {
                        tracing::warn!("the trace is being made; this may take a while");
                        waited = true;
                    }
                    tokio::time::sleep(TRACE_PAUSE).await;
                }
            }
        }
    }
}
