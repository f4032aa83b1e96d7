//! Sessions: creation, heartbeats, end, listing and search.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_store::clock::timestamp;
use tinkex_store::error::ServerError;
use tinkex_store::store::{Record, SessionEnd, SessionRecord, Store};
use tinkex_wire::codec::json;
use tinkex_wire::rest::{
    FinishReasonFilter, ListSessions, SearchCursor, SearchSessions, SessionInfo, SessionPage,
    SessionProject, SessionSearchPage, SessionStatus, SessionStatusFilter, SessionSummary,
};
use tinkex_wire::{
    ApiRequest as _, CreateSession, FinishDetails, HeartbeatAcknowledged, JsonObject, Metadata,
    SessionCreated, SessionHeartbeat, SessionId,
};

use super::{RouteResult, empty, from_query, to_json};
use crate::expiry;
use crate::state::ServerState;

/// Owner of all objects: a local server has one user.
pub(super) const OWNER: &str = "local";
/// Project of sessions that have no project id.
const PROJECT: &str = "default";
/// Maximum number of items on a page.
const MAX_PAGE: usize = 1_000;

pub(super) async fn create(state: &Arc<ServerState>, body: &Bytes) -> RouteResult {
    let request: CreateSession = json::decode(body)?;
    let id = SessionId::from(state.random.uuid().to_string());
    let row = SessionRecord {
        id: id.clone(),
        created_at: state.clock.now(),
        tags: request.tags,
        user_metadata: request.user_metadata.filter(|metadata| !metadata.is_empty()),
        project_id: request.project_id,
        display_name: request.display_name,
        end: None,
        ended_at: None,
    };
    state.store.create(|_| Ok((vec![Record::Session(row)], ()))).await?;
    to_json(&SessionCreated::new(id))
}

pub(super) fn heartbeat(state: &ServerState, body: &Bytes) -> RouteResult {
    let request: SessionHeartbeat = json::decode(body)?;
    let id = request.session_id;
    let mut store = state.store();
    if store.open_session(&id).is_some() {
        store.touch(&id);
        return to_json(&HeartbeatAcknowledged {});
    }
    let error = if store.sessions.contains_key(&id) {
        ServerError::Gone(format!("session {id} has ended"))
    } else {
        ServerError::no_session(&id)
    };
    Err(error.into())
}

pub(super) async fn finish(state: &Arc<ServerState>, id: &str, body: &Bytes) -> RouteResult {
    let details: FinishDetails = json::decode(body)?;
    let id = SessionId::from(id);
    if !state.store().sessions.contains_key(&id) {
        return Err(ServerError::no_session(&id).into());
    }
    let guard = state.store.lock_changes().await;
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let on_written = Box::new(move |written| drop(sender.send(written)));
    state.expiry.end_sessions(guard, vec![(id, SessionEnd::Finished(details))], on_written);
    match receiver.await {
        Ok(Ok(())) => empty(),
        Ok(Err(error)) => Err(ServerError::write_failed(&error).into()),
        Err(_) => Err(ServerError::shutting_down().into()),
    }
}

pub(super) fn list(state: &ServerState, query: &str) -> RouteResult {
    let request: ListSessions = from_query(query)?;
    let store = state.store();
    let mut all: Vec<&SessionRecord> = store.sessions.values().map(|entry| &entry.row).collect();
    all.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.id.clone())));
    let sessions = page(all, request.offset, request.limit).map(|row| row.id.clone()).collect();
    to_json(&SessionPage::new(sessions))
}

/// Returns one page of a list, of at most [`MAX_PAGE`] items.
pub(super) fn page<T>(all: Vec<T>, offset: u64, limit: u64) -> impl Iterator<Item = T> {
    let count = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    all.into_iter().skip(count(offset)).take(count(limit).min(MAX_PAGE))
}

pub(super) fn get(state: &ServerState, id: &str) -> RouteResult {
    let id = SessionId::from(id);
    let store = state.store();
    let row = &store.sessions.get(&id).ok_or_else(|| ServerError::no_session(&id))?.row;
    let mut runs: Vec<_> = store.runs_of(&id).collect();
    runs.sort_by_key(|run| run.number);
    let open = store.samplers.values().filter(|entry| entry.row.end.is_none());
    let samplers = open.filter(|entry| entry.row.session == id);
    let mut sampler_ids: Vec<_> = samplers.map(|entry| entry.row.id.clone()).collect();
    sampler_ids.sort();
    let training_run_ids = runs.into_iter().map(|run| run.id.clone()).collect();
    to_json(
        &SessionInfo::default()
            .training_run_ids(training_run_ids)
            .sampler_ids(sampler_ids)
            .user_metadata(string_metadata(row.user_metadata.as_ref()))
            .display_name(row.display_name.clone()),
    )
}

/// Converts metadata values to strings, as the API returns them.
pub(super) fn string_metadata(metadata: Option<&JsonObject>) -> Option<Metadata> {
    let text = |value: &serde_json::Value| match value {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Some(metadata?.iter().map(|(key, value)| (key.clone(), text(value))).collect())
}

pub(super) async fn assign_project(
    state: &Arc<ServerState>,
    id: &str,
    body: &Bytes,
) -> RouteResult {
    let request: SessionProject = json::decode(body)?;
    let id = SessionId::from(id);
    state
        .store
        .change(|store| {
            let entry = store.sessions.get(&id).ok_or_else(|| ServerError::no_session(&id))?;
            let row = SessionRecord { project_id: Some(request.project_id), ..entry.row.clone() };
            Ok((vec![Record::Session(row)], ()))
        })
        .await?;
    empty()
}

pub(super) fn search(state: &ServerState, body: &Bytes) -> RouteResult {
    let request: SearchSessions = json::decode(body)?;
    request.validate()?;
    let store = state.store();
    let mut all: Vec<&SessionRecord> = store
        .sessions
        .values()
        .map(|entry| &entry.row)
        .filter(|row| matches(row, &request))
        .collect();
    all.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.id.clone())));
    if let Some(cursor) = &request.cursor {
        let last = (cursor.last_created_at.unix_micros(), cursor.last_session_id.clone());
        all.retain(|row| (row.created_at, row.id.clone()) < last);
    }
    let limit = usize::try_from(request.limit).unwrap_or(usize::MAX);
    let has_more = all.len() > limit;
    all.truncate(limit);
    let next_cursor = all.last().filter(|_| has_more).map(|row| {
        // Sessions are sorted by these two values.
        SearchCursor::new(timestamp(row.created_at), row.id.clone())
    });
    let sessions = all.into_iter().map(|row| summary(&store, row)).collect();
    to_json(&SessionSearchPage::new(sessions, next_cursor))
}

fn matches(row: &SessionRecord, request: &SearchSessions) -> bool {
    let metadata = string_metadata(row.user_metadata.as_ref()).unwrap_or_default();
    let project = row.project_id.as_deref().unwrap_or(PROJECT);
    request.session_id.as_ref().is_none_or(|id| *id == row.id)
        && request.project_ids.as_ref().is_none_or(|ids| ids.iter().any(|id| id == project))
        && request.user_metadata.iter().all(|(key, value)| metadata.get(key) == Some(value))
        && request.display_name.as_ref().is_none_or(|name| row.display_name.as_ref() == Some(name))
        && request.statuses.as_ref().is_none_or(|all| all.iter().any(|s| has_status(row, s)))
        && match &request.owner {
            tinkex_wire::rest::SearchOwner::User { owner_urns } => {
                owner_urns.iter().any(|owner| owner == OWNER)
            }
            _ => true,
        }
}

fn has_status(row: &SessionRecord, filter: &SessionStatusFilter) -> bool {
    match (filter, &row.end) {
        (SessionStatusFilter::Active, None)
        | (SessionStatusFilter::Cancelled, Some(SessionEnd::Expired)) => true,
        (SessionStatusFilter::ClientFinished { reasons }, Some(SessionEnd::Finished(details))) => {
            let reason = FinishReasonFilter::from(details.reason);
            reasons.as_ref().is_none_or(|reasons| reasons.contains(&reason))
        }
        _ => false,
    }
}

fn summary(store: &Store, row: &SessionRecord) -> SessionSummary {
    let prefix = format!("{}:train:", row.id);
    let now = store.clock.now();
    let checkpoints: Vec<_> = store
        .checkpoints
        .values()
        .filter(|entry| {
            entry.row.path.run().as_str().starts_with(&prefix) && !entry.row.is_expired(now)
        })
        .collect();
    let project = row.project_id.clone().unwrap_or_else(|| PROJECT.to_owned());
    let status = Some(match &row.end {
        None => SessionStatus::Active,
        Some(SessionEnd::Expired) => {
            SessionStatus::Cancelled { detail: Some(expiry::EXPIRED.to_owned()) }
        }
        Some(SessionEnd::Finished(details)) => {
            SessionStatus::ClientFinished { reason: details.reason, detail: details.detail.clone() }
        }
    });
    SessionSummary::new(row.id.clone(), timestamp(row.created_at), OWNER, project)
        .status(status)
        .checkpoints_count(u64::try_from(checkpoints.len()).unwrap_or(u64::MAX))
        .display_name(row.display_name.clone())
        .user_metadata(string_metadata(row.user_metadata.as_ref()))
        .checkpoint_storage_bytes(Some(checkpoints.iter().map(|entry| entry.row.size_bytes).sum()))
}
