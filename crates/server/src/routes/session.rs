//! Sessions.

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use tinkex_wire::codec::json;
use tinkex_wire::rest::{
    FinishReasonFilter, ListSessions, SearchCursor, SearchSessions, SessionInfo, SessionPage,
    SessionProject, SessionSearchPage, SessionStatus, SessionStatusFilter, SessionSummary,
};
use tinkex_wire::{
    ApiRequest as _, CreateSession, FinishDetails, HeartbeatAcknowledged, JsonObject, Metadata,
    SessionCreated, SessionHeartbeat, SessionId,
};

use super::{Reply, done, from_query, to_json};
use crate::commit;
use crate::error::ApiError;
use crate::state::Shared;
use crate::store::{End, Fact, Session, Store, now, timestamp};
use crate::sweep;

/// Whose everything is.
pub(super) const OWNER: &str = "local";
/// The project of those who name none.
const PROJECT: &str = "default";

pub(super) async fn create(shared: &Arc<Shared>, body: &Bytes) -> Reply {
    let call: CreateSession = json::decode(body)?;
    let id = SessionId::from(uuid::Uuid::new_v4().to_string());
    let row = Session {
        id: id.clone(),
        created_at: now(),
        tags: call.tags,
        user_metadata: call.user_metadata.filter(|metadata| !metadata.is_empty()),
        project_id: call.project_id,
        display_name: call.display_name,
        end: None,
        ended_at: None,
    };
    commit::create(shared, |_| Ok((vec![Fact::Session(row)], ()))).await?;
    to_json(&SessionCreated::new(id))
}

pub(super) fn heartbeat(shared: &Shared, body: &Bytes) -> Reply {
    let call: SessionHeartbeat = json::decode(body)?;
    let id = call.session_id;
    let mut store = shared.store();
    if store.open_session(&id).is_some() {
        store.touch(&id);
        return to_json(&HeartbeatAcknowledged {});
    }
    Err(match store.sessions.contains_key(&id) {
        true => ApiError::new(StatusCode::GONE, format!("session {id} is over")),
        false => missing(&id),
    })
}

fn missing(id: &SessionId) -> ApiError {
    ApiError::not_found(format!("there is no session {id}"))
}

pub(super) async fn finish(shared: &Arc<Shared>, id: &str, body: &Bytes) -> Reply {
    let call: FinishDetails = json::decode(body)?;
    let id = SessionId::from(id);
    if !shared.store().sessions.contains_key(&id) {
        return Err(missing(&id));
    }
    let turn = Arc::clone(&shared.changes).lock_owned().await;
    let (sent, received) = tokio::sync::oneshot::channel();
    let then = Box::new(move |written| drop(sent.send(written)));
    sweep::end_sessions(shared, turn, vec![(id, End::Finished(call))], then);
    match received.await {
        Ok(Ok(())) => done(),
        Ok(Err(why)) => Err(ApiError::disk(&why)),
        Err(_) => Err(ApiError::busy("the server is stopping", 1_000)),
    }
}

pub(super) fn list(shared: &Shared, query: &str) -> Reply {
    let call: ListSessions = from_query(query)?;
    let store = shared.store();
    let mut all: Vec<&Session> = store.sessions.values().map(|kept| &kept.row).collect();
    all.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.id.clone())));
    let sessions = page(all, call.offset, call.limit).map(|row| row.id.clone()).collect();
    to_json(&SessionPage::new(sessions))
}

/// A page of a list.
pub(super) fn page<T>(all: Vec<T>, offset: u64, limit: u64) -> impl Iterator<Item = T> {
    let count = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    all.into_iter().skip(count(offset)).take(count(limit).min(1_000))
}

pub(super) fn get(shared: &Shared, id: &str) -> Reply {
    let id = SessionId::from(id);
    let store = shared.store();
    let row = &store.sessions.get(&id).ok_or_else(|| missing(&id))?.row;
    let mut runs: Vec<_> = store.runs_of(&id).collect();
    runs.sort_by_key(|run| run.number);
    let samplers = store.samplers.values().filter(|kept| kept.row.session == id);
    let mut sampler_ids: Vec<_> = samplers.map(|kept| kept.row.id.clone()).collect();
    sampler_ids.sort();
    let training_run_ids = runs.into_iter().map(|run| run.id.clone()).collect();
    to_json(
        &SessionInfo::default()
            .training_run_ids(training_run_ids)
            .sampler_ids(sampler_ids)
            .user_metadata(texts(row.user_metadata.as_ref()))
            .display_name(row.display_name.clone()),
    )
}

/// Metadata as texts, which is how it is shown.
pub(super) fn texts(metadata: Option<&JsonObject>) -> Option<Metadata> {
    let text = |value: &serde_json::Value| match value {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Some(metadata?.iter().map(|(key, value)| (key.clone(), text(value))).collect())
}

pub(super) async fn assign_project(shared: &Arc<Shared>, id: &str, body: &Bytes) -> Reply {
    let call: SessionProject = json::decode(body)?;
    let id = SessionId::from(id);
    commit::change(shared, |store| {
        let kept = store.sessions.get(&id).ok_or_else(|| missing(&id))?;
        let row = Session { project_id: Some(call.project_id), ..kept.row.clone() };
        Ok((vec![Fact::Session(row)], ()))
    })
    .await?;
    done()
}

pub(super) fn search(shared: &Shared, body: &Bytes) -> Reply {
    let call: SearchSessions = json::decode(body)?;
    call.validate()?;
    let store = shared.store();
    let mut all: Vec<&Session> =
        store.sessions.values().map(|kept| &kept.row).filter(|row| matches(row, &call)).collect();
    all.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.id.clone())));
    if let Some(cursor) = &call.cursor {
        let last = (cursor.last_created_at.unix_micros(), cursor.last_session_id.clone());
        all.retain(|row| (row.created_at, row.id.clone()) < last);
    }
    let limit = usize::try_from(call.limit).unwrap_or(usize::MAX);
    let more = all.len() > limit;
    all.truncate(limit);
    let next_cursor = all.last().filter(|_| more).map(|row| SearchCursor {
        last_created_at: timestamp(row.created_at),
        last_session_id: row.id.clone(),
    });
    let sessions = all.into_iter().map(|row| summary(&store, row)).collect();
    to_json(&SessionSearchPage::new(sessions, next_cursor))
}

fn matches(row: &Session, call: &SearchSessions) -> bool {
    let metadata = texts(row.user_metadata.as_ref()).unwrap_or_default();
    let project = row.project_id.as_deref().unwrap_or(PROJECT);
    call.session_id.as_ref().is_none_or(|id| *id == row.id)
        && call.project_ids.as_ref().is_none_or(|ids| ids.iter().any(|id| id == project))
        && call.user_metadata.iter().all(|(key, value)| metadata.get(key) == Some(value))
        && call.display_name.as_ref().is_none_or(|name| row.display_name.as_ref() == Some(name))
        && call.statuses.as_ref().is_none_or(|all| all.iter().any(|s| has_status(row, s)))
        && match &call.owner {
            tinkex_wire::rest::SearchOwner::User { owner_urns } => {
                owner_urns.iter().any(|o| o == OWNER)
            }
            _ => true,
        }
}

fn has_status(row: &Session, wanted: &SessionStatusFilter) -> bool {
    match (wanted, &row.end) {
        (SessionStatusFilter::Active, None)
        | (SessionStatusFilter::Cancelled, Some(End::Expired)) => true,
        (SessionStatusFilter::ClientFinished { reasons }, Some(End::Finished(finish))) => {
            let word = FinishReasonFilter::from(finish.reason);
            reasons.as_ref().is_none_or(|reasons| reasons.contains(&word))
        }
        _ => false,
    }
}

fn summary(store: &Store, row: &Session) -> SessionSummary {
    let own = format!("{}:train:", row.id);
    let checkpoints: Vec<_> = store
        .checkpoints
        .values()
        .filter(|kept| kept.row.path.run().as_str().starts_with(&own) && !kept.row.is_expired())
        .collect();
    let project = row.project_id.clone().unwrap_or_else(|| PROJECT.to_owned());
    let status = Some(match &row.end {
        None => SessionStatus::Active,
        Some(End::Expired) => {
            SessionStatus::Cancelled { detail: Some("nothing was heard of its client".to_owned()) }
        }
        Some(End::Finished(finish)) => {
            SessionStatus::ClientFinished { reason: finish.reason, detail: finish.detail.clone() }
        }
    });
    SessionSummary::new(row.id.clone(), timestamp(row.created_at), OWNER, project)
        .status(status)
        .checkpoints_count(u64::try_from(checkpoints.len()).unwrap_or(u64::MAX))
        .display_name(row.display_name.clone())
        .user_metadata(texts(row.user_metadata.as_ref()))
        .checkpoint_storage_bytes(Some(checkpoints.iter().map(|kept| kept.row.size_bytes).sum()))
}
