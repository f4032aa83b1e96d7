//! Sessions: creation, heartbeats, end and listing.

use bytes::Bytes;
use tinkex_store::error::ServerError;
use tinkex_store::store::{
    AuditEvent, MetadataRecord, Record, SessionEnd, SessionRecord, cost_of_records,
};
use tinkex_wire::codec::json;
use tinkex_wire::rest::{ListSessions, SessionInfo, SessionPage, SessionProject};
use tinkex_wire::{
    CreateSession, FinishDetails, HeartbeatAcknowledged, SessionCreated, SessionHeartbeat,
    SessionId,
};

use super::metadata::{MetadataOf, ReadMetadata};
use super::{Caller, RouteResult, empty, from_query, to_json};

/// Maximum size of a name, a project id, a description or all tags of a session, in bytes.
const MAX_LABEL: usize = 1_024;
/// Maximum number of tags of a session.
const MAX_TAGS: usize = 64;
/// Maximum number of items on a page.
const MAX_PAGE: usize = 1_000;

pub(super) async fn create(Caller { state, principal }: Caller<'_>, body: &Bytes) -> RouteResult {
    let request: CreateSession = json::decode(body)?;
    validate_labels(&request)?;
    let id = SessionId::from(state.random.uuid().to_string());
    let metadata = MetadataRecord::new(&id, request.user_metadata.as_ref());
    let row = SessionRecord {
        id: id.clone(),
        owner: principal.user.clone(),
        created_at: state.clock.now(),
        tags: request.tags,
        metadata_bytes: metadata.bytes(),
        project_id: request.project_id,
        display_name: request.display_name,
        end: None,
        ended_at: None,
    };
    let owner = row.owner.clone();
    let records = vec![Record::Session(row), Record::Metadata(metadata)];
    state
        .store
        .create(|store| {
            store.reserve_records(&owner, cost_of_records(&records))?;
            Ok((records, ()))
        })
        .await?;
    to_json(&SessionCreated::new(id))
}

/// Checks the lengths of the texts that stay in memory for as long as the session is listed.
fn validate_labels(request: &CreateSession) -> Result<(), ServerError> {
    let tags: usize = request.tags.iter().map(String::len).sum();
    if request.tags.len() > MAX_TAGS || tags > MAX_LABEL {
        return Err(ServerError::invalid(format!(
            "tags: {} tags with {tags} bytes, the limits are {MAX_TAGS} tags and {MAX_LABEL} bytes",
            request.tags.len()
        )));
    }
    validate_label("display_name", request.display_name.as_deref())?;
    validate_label("project_id", request.project_id.as_deref())
}

/// Checks the length of a text that stays in memory.
pub(super) fn validate_label(field: &str, text: Option<&str>) -> Result<(), ServerError> {
    let length = text.map_or(0, str::len);
    if length > MAX_LABEL {
        let message = format!("{field}: {length} bytes, the limit is {MAX_LABEL}");
        return Err(ServerError::invalid(message));
    }
    Ok(())
}

pub(super) fn heartbeat(caller: Caller<'_>, body: &Bytes) -> RouteResult {
    let request: SessionHeartbeat = json::decode(body)?;
    let id = request.session_id;
    let mut store = caller.store();
    if store.session(&id)?.row.end.is_some() {
        return Err(ServerError::Gone(format!("session {id} has ended")).into());
    }
    store.all_mut().touch(&id);
    to_json(&HeartbeatAcknowledged {})
}

pub(super) async fn finish(caller: Caller<'_>, id: &str, body: &Bytes) -> RouteResult {
    let mut details: FinishDetails = json::decode(body)?;
    // The end of a session must succeed: shorten the text instead of refusing it.
    if let Some(detail) = &mut details.detail {
        detail.truncate(detail.floor_char_boundary(MAX_LABEL));
    }
    let id = SessionId::from(id);
    caller.store().session(&id)?;
    let state = caller.state;
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

pub(super) fn list(caller: Caller<'_>, query: &str) -> RouteResult {
    let request: ListSessions = from_query(query)?;
    let store = caller.store();
    let mut all: Vec<&SessionRecord> = store.sessions().collect();
    all.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.id.clone())));
    let sessions = page(all, request.offset, request.limit).map(|row| row.id.clone()).collect();
    to_json(&SessionPage::new(sessions))
}

/// Returns one page of a list, of at most [`MAX_PAGE`] items.
pub(super) fn page<T>(all: Vec<T>, offset: u64, limit: u64) -> impl Iterator<Item = T> {
    let count = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    all.into_iter().skip(count(offset)).take(count(limit).min(MAX_PAGE))
}

pub(super) async fn get(caller: Caller<'_>, id: &str) -> RouteResult {
    let (info, metadata) = info(caller, &SessionId::from(id))?;
    let object = metadata.object.clone();
    let mut metadata = ReadMetadata::read(caller.state, vec![metadata]).await?;
    let info = info.user_metadata(metadata.take(&object));
    metadata.respond(&info)
}

fn info(caller: Caller<'_>, id: &SessionId) -> Result<(SessionInfo, MetadataOf), ServerError> {
    let store = caller.store();
    let row = &store.session(id)?.row;
    let store = store.all();
    let mut runs: Vec<_> = store.runs_of(id).collect();
    runs.sort_by_key(|run| run.number);
    let open = store.samplers.values().filter(|entry| entry.row.end.is_none());
    let samplers = open.filter(|entry| entry.row.session == *id);
    let mut sampler_ids: Vec<_> = samplers.map(|entry| entry.row.id.clone()).collect();
    sampler_ids.sort();
    let training_run_ids = runs.into_iter().map(|run| run.id.clone()).collect();
    let info = SessionInfo::default()
        .training_run_ids(training_run_ids)
        .sampler_ids(sampler_ids)
        .display_name(row.display_name.clone());
    Ok((info, MetadataOf::new(id, row.metadata_bytes)))
}

pub(super) async fn assign_project(caller: Caller<'_>, id: &str, body: &Bytes) -> RouteResult {
    let request: SessionProject = json::decode(body)?;
    validate_label("project_id", Some(&request.project_id))?;
    let id = SessionId::from(id);
    caller
        .change(|store| {
            let row = store.session(&id)?.row.clone();
            let event = AuditEvent::new("session.project")
                .detail("session_id", id.as_str())
                .detail("project_id", &*request.project_id);
            let audit = store.audit(event);
            let row = SessionRecord { project_id: Some(request.project_id), ..row };
            Ok((vec![Record::Session(row), audit], ()))
        })
        .await?;
    empty()
}
