//! Requests about sessions.

use std::time::Duration;

use futures_util::stream::{Stream, TryStreamExt, iter, try_unfold};
use tinkex_wire::SessionId;
use tinkex_wire::rest::{
    AccessScope, AssignSessionProject, GetSession, ListSessions, SearchSessions, SessionInfo,
    SessionPage, SessionSearchPage, SessionSummary, TraceExportRequest, TraceStatus,
};

use crate::error::{Error, ErrorKind, Result};
use crate::future::RequestFuture;

use super::RestClient;

/// Interval between requests for a trace that is being prepared.
const TRACE_INTERVAL: Duration = Duration::from_secs(5);

impl RestClient {
    /// Returns one page of session ids, newest first.
    ///
    /// # Errors
    /// If the request fails.
    pub fn list_sessions(&self, list: &ListSessions) -> RequestFuture<SessionPage> {
        self.call("list_sessions", *list)
    }

    /// Returns the training runs and sampling sessions of a session.
    ///
    /// # Errors
    /// If the session does not exist or is out of scope.
    pub fn get_session(
        &self,
        session_id: impl Into<SessionId>,
        access_scope: AccessScope,
    ) -> RequestFuture<SessionInfo> {
        self.call("get_session", GetSession::new(session_id).query(access_scope))
    }

    /// Returns one page of the sessions that match.
    ///
    /// # Errors
    /// If the search is invalid or the request fails.
    pub fn search_sessions(&self, search: &SearchSessions) -> RequestFuture<SessionSearchPage> {
        self.call("search_sessions", search.clone())
    }

    /// Returns a stream of all sessions that match. Pages are fetched on demand.
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
    /// If the session or the project does not exist.
    pub fn assign_session_project(
        &self,
        session_id: impl Into<SessionId>,
        project_id: impl Into<String>,
    ) -> RequestFuture<()> {
        let request = AssignSessionProject::new(session_id, project_id);
        self.call("assign_session_project", request)
    }

    /// Requests the trace of a session, waits until the server has prepared it, and returns its
    /// download URL.
    ///
    /// # Errors
    /// If the server cannot prepare the trace.
    ///
    /// # Cancel safety
    /// Dropping the future stops waiting; a later call continues.
    pub fn export_session_trace(&self, session_id: impl Into<SessionId>) -> RequestFuture<String> {
        let rest = self.clone();
        let request = TraceExportRequest::new(session_id);
        // The time limit of the client applies to each request, because the server may take long
        // to prepare the trace.
        let _entered = self.service.settings().enter_runtime();
        RequestFuture::start(async move { rest.wait_for_trace(request).await })
    }

    async fn wait_for_trace(&self, request: TraceExportRequest) -> Result<String> {
        let mut logged = false;
        loop {
            let trace = self.call("export_session_trace", request.clone()).await?;
            match trace.status {
                TraceStatus::Ready => {
                    let missing =
                        || Error::new(ErrorKind::Decode, "server reported a trace without a URL");
                    return trace.url.ok_or_else(missing);
                }
                TraceStatus::Failed => {
                    let cause = trace.error.unwrap_or_else(|| "no reason given".to_owned());
                    let id = &request.session_id;
                    let message = format!("cannot export the trace of session {id}: {cause}");
                    return Err(Error::new(ErrorKind::Server, message));
                }
                // `Pending`, or a state that a later version of the protocol adds.
                _ => {
                    if !logged {
                        tracing::warn!("server is preparing the trace; this may take a while");
                        logged = true;
                    }
                    tokio::time::sleep(TRACE_INTERVAL).await;
                }
            }
        }
    }
}
