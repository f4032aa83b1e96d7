//! Search for sessions.
//!
//! A page ends when it has the requested number of sessions, or [`MAX_METADATA`] bytes of metadata;
//! its cursor continues the search.

use std::cmp::Reverse;

use bytes::Bytes;
use parking_lot::MutexGuard;
use tinkex_store::clock::timestamp;
use tinkex_store::disk::MetadataReader;
use tinkex_store::error::ServerError;
use tinkex_store::store::{SessionEnd, SessionRecord, Store, UnixMicros, UserStore};
use tinkex_wire::codec::json;
use tinkex_wire::rest::{
    FinishReasonFilter, SearchCursor, SearchSessions, SessionSearchPage, SessionStatus,
    SessionStatusFilter, SessionSummary,
};
use tinkex_wire::{ApiRequest as _, Metadata, SessionId};

use super::metadata::{MAX_METADATA, MetadataOf, ReadMetadata, string_metadata};
use super::{Caller, RouteResult};
use crate::expiry;

/// Project of sessions that have no project id.
const PROJECT: &str = "default";

/// A session that may match.
struct Candidate {
    created_at: UnixMicros,
    id: SessionId,
    metadata_bytes: u64,
}

/// Sessions of one page, and whether further sessions match.
struct FoundPage {
    sessions: Vec<Candidate>,
    has_more: bool,
}

pub(super) async fn search(caller: Caller<'_>, body: &Bytes) -> RouteResult {
    let request: SearchSessions = json::decode(body)?;
    request.validate()?;
    let state = caller.state;
    let candidates = candidates(&caller.store(), &request);
    let limit = usize::try_from(request.limit).unwrap_or(usize::MAX);
    let wanted = request.user_metadata;
    let page = if wanted.is_empty() {
        find(candidates, limit, |_| Ok(true)).map_err(|error| ServerError::read_failed(&error))?
    } else {
        let bytes: u64 = candidates.iter().map(|candidate| candidate.metadata_bytes).sum();
        let reader = state.store.metadata().clone();
        let search = move || {
            find_by_metadata(&reader, candidates, limit, &wanted)
                .map_err(|error| ServerError::read_failed(&error))
        };
        state.decode_jobs.run(usize::try_from(bytes).unwrap_or(usize::MAX), search).await?
    };
    let next_cursor = page.sessions.last().filter(|_| page.has_more).map(|last| {
        // Sessions are sorted by these two values.
        SearchCursor::new(timestamp(last.created_at), last.id.clone())
    });
    let objects = page.sessions.iter();
    let objects = objects.map(|found| MetadataOf::new(&found.id, found.metadata_bytes)).collect();
    let mut metadata = ReadMetadata::read(state, objects).await?;
    let mut sessions: Vec<SessionSummary> = {
        let store = caller.store();
        let rows = page.sessions.iter().filter_map(|found| store.session(&found.id).ok());
        rows.map(|entry| summary(store.all(), &entry.row)).collect()
    };
    for session in &mut sessions {
        session.user_metadata = metadata.take(session.session_id.as_str());
    }
    metadata.respond(&SessionSearchPage::new(sessions, next_cursor))
}

/// Returns the sessions after the cursor that match the request except for the metadata, newest
/// first.
fn candidates(
    store: &UserStore<'_, MutexGuard<'_, Store>>,
    request: &SearchSessions,
) -> Vec<Candidate> {
    let cursor = request.cursor.as_ref();
    let last = cursor.map(|last| (last.last_created_at.unix_micros(), &last.last_session_id));
    let rows =
        store.sessions().filter(|row| last.is_none_or(|last| (row.created_at, &row.id) < last));
    let mut found: Vec<Candidate> = rows
        .filter(|row| matches(row, request))
        .map(|row| Candidate {
            created_at: row.created_at,
            id: row.id.clone(),
            metadata_bytes: row.metadata_bytes,
        })
        .collect();
    found.sort_unstable_by(|a, b| {
        Reverse((a.created_at, &a.id)).cmp(&Reverse((b.created_at, &b.id)))
    });
    found
}

/// Reads the metadata of candidates, one at a time, until the page is full.
fn find_by_metadata(
    reader: &MetadataReader,
    candidates: Vec<Candidate>,
    limit: usize,
    wanted: &Metadata,
) -> std::io::Result<FoundPage> {
    let connection = reader.connect()?;
    find(candidates, limit, |candidate| {
        let metadata = connection.get(candidate.id.as_str())?.unwrap_or_default();
        let metadata = string_metadata(&metadata);
        Ok(wanted.iter().all(|(key, value)| metadata.get(key) == Some(value)))
    })
}

/// Collects the candidates of a page that match.
fn find(
    candidates: Vec<Candidate>,
    limit: usize,
    matches: impl Fn(&Candidate) -> std::io::Result<bool>,
) -> std::io::Result<FoundPage> {
    let mut page = FoundPage { sessions: Vec::new(), has_more: false };
    let mut bytes = 0;
    for candidate in candidates {
        if !matches(&candidate)? {
            continue;
        }
        bytes += candidate.metadata_bytes;
        let is_full = page.sessions.len() >= limit || bytes > MAX_METADATA;
        if is_full && !page.sessions.is_empty() {
            page.has_more = true;
            break;
        }
        page.sessions.push(candidate);
    }
    Ok(page)
}

/// Returns whether a session matches a request, except for the metadata.
fn matches(row: &SessionRecord, request: &SearchSessions) -> bool {
    let project = row.project_id.as_deref().unwrap_or(PROJECT);
    request.session_id.as_ref().is_none_or(|id| *id == row.id)
        && request.project_ids.as_ref().is_none_or(|ids| ids.iter().any(|id| id == project))
        && (row.metadata_bytes > 0 || request.user_metadata.is_empty())
        && request.display_name.as_ref().is_none_or(|name| row.display_name.as_ref() == Some(name))
        && request.statuses.as_ref().is_none_or(|all| all.iter().any(|s| has_status(row, s)))
        && match &request.owner {
            tinkex_wire::rest::SearchOwner::User { owner_urns } => {
                owner_urns.iter().any(|owner| *owner == row.owner.as_str())
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

/// Describes a session, without its metadata.
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
    SessionSummary::new(row.id.clone(), timestamp(row.created_at), row.owner.as_str(), project)
        .status(status)
        .checkpoints_count(u64::try_from(checkpoints.len()).unwrap_or(u64::MAX))
        .display_name(row.display_name.clone())
        .checkpoint_storage_bytes(Some(checkpoints.iter().map(|entry| entry.row.size_bytes).sum()))
}
