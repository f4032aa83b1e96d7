//! Usage in tokens and stored bytes, metrics, and the audit log. A local server has no costs.

use std::collections::{BTreeMap, BTreeSet};

use tinkex_store::clock::timestamp;
use tinkex_store::error::ServerError;
use tinkex_store::store::{AuditRecord, INFERENCE_SESSION, MERGED_SESSION, UnixMicros, UsageMeter};
use tinkex_store::user::UserId;
use tinkex_wire::SessionId;
use tinkex_wire::rest::{
    AuditEntry, AuditKind, AuditLog, AuditLogRequest, BillingUsage, BillingUsageRequest, KeyRole,
    StorageItem, StorageUsage, UsageEvent, UsageKind, UsageSession, UserLimits,
};

use super::keys::use_of;
use super::metadata::{MetadataOf, ReadMetadata};
use super::{Caller, RouteResult, from_query, to_json};
use crate::metrics::GaugeValues;
use crate::state::ServerState;

/// One hour in microseconds.
const HOUR: i64 = 3_600_000_000;
/// Longest period of one request in microseconds: 14 days.
const MAX_PERIOD: i64 = 14 * 24 * HOUR;

pub(super) async fn events(caller: Caller<'_>, query: &str) -> RouteResult {
    let request: BillingUsageRequest = from_query(query)?;
    let from = request.starting_on.unix_micros();
    let to = request.ending_before.unix_micros();
    if from % HOUR != 0 || to % HOUR != 0 {
        let message = "starting_on and ending_before must be full hours";
        return Err(ServerError::invalid(message).into());
    }
    if from >= to || to - from > MAX_PERIOD {
        let message = "ending_before must be after starting_on, by at most 14 days";
        return Err(ServerError::invalid(message).into());
    }
    let (data, objects) = usage_between(caller, from, to);
    let ids: Vec<String> = objects.iter().map(|object| object.object.clone()).collect();
    let mut metadata = ReadMetadata::read(caller.state, objects).await?;
    let sessions: BTreeMap<SessionId, UsageSession> = ids
        .into_iter()
        .map(|id| {
            let session = UsageSession::default().user_metadata(metadata.take(&id));
            (id.into(), session)
        })
        .collect();
    metadata.respond(&BillingUsage::new(data, sessions))
}

/// Returns the usage from one time to another, in microseconds, and the sessions that it refers to.
fn usage_between(
    caller: Caller<'_>,
    from: UnixMicros,
    to: UnixMicros,
) -> (Vec<UsageEvent>, Vec<MetadataOf>) {
    let store = caller.store();
    let store = store.all();
    let mut sessions = BTreeMap::new();
    let mut data = Vec::new();
    for (key, &count) in &store.usage {
        let start = key.hour.saturating_mul(HOUR);
        if !(from..to).contains(&start) || !caller.principal.controls(&key.owner) {
            continue;
        }
        let session = store.sessions.get(&key.session);
        // Inference requests without a sampling session, and merged counters, belong to no session.
        let has_session = ![INFERENCE_SESSION, MERGED_SESSION].contains(&key.session.as_str());
        let session_id = has_session.then(|| key.session.clone());
        if let Some(id) = &session_id {
            sessions.insert(id.clone(), session.map_or(0, |entry| entry.row.metadata_bytes));
        }
        let event_info = match key.meter {
            UsageMeter::Training => UsageKind::Training { token_count: count },
            UsageMeter::Prefill => UsageKind::SamplingPrefill { cached: false, token_count: count },
            UsageMeter::CachedPrefill => {
                UsageKind::SamplingPrefill { cached: true, token_count: count }
            }
            UsageMeter::Sampled => UsageKind::SamplingSample { token_count: count },
            UsageMeter::Checkpoints => UsageKind::Checkpoint { count },
        };
        data.push(
            UsageEvent::new(timestamp(start), timestamp(start.saturating_add(HOUR)), event_info)
                .base_model(Some(key.base_model.clone()))
                .user_id(Some(key.owner.to_string()))
                .session_id(session_id)
                .project_id(session.and_then(|entry| entry.row.project_id.clone()))
                .estimated_cost_usd(Some(0.0))
                .effective_rate_usd_per_million_tokens(Some(0.0)),
        );
    }
    let sessions = sessions.iter().map(|(id, bytes)| MetadataOf::new(id, *bytes)).collect();
    (data, sessions)
}

/// Returns the size of the checkpoints of each user whom the caller may see.
pub(super) fn storage(caller: Caller<'_>) -> RouteResult {
    let store = caller.store();
    let now = caller.state.clock.now();
    let mut users: BTreeMap<&UserId, (u64, u64)> = BTreeMap::new();
    users.entry(&caller.principal.user).or_default();
    for row in store.checkpoints().filter(|row| !row.is_expired(now)) {
        let Ok(run) = store.own_run(row.path.run()) else { continue };
        let (count, bytes) = users.entry(&run.row.owner).or_default();
        *count += 1;
        *bytes += row.size_bytes;
    }
    let items = users.into_iter().map(|(user, (count, bytes))| {
        #[expect(clippy::cast_precision_loss, reason = "a rounded size for display")]
        let size_gigabytes = bytes as f64 / 1e9;
        StorageItem::default()
            .org_user_urn(Some(user.to_string()))
            .checkpoint_count(count)
            .size_bytes(bytes)
            .size_gigabytes(size_gigabytes)
            .estimated_monthly_cost_usd(Some(0.0))
    });
    let items = items.collect();
    to_json(&StorageUsage::default().effective_rate_usd_per_gigabyte_month(Some(0.0)).data(items))
}

/// Returns the entries of the audit log of one day, or of all days, oldest first.
pub(super) fn audit_log(caller: Caller<'_>, query: &str) -> RouteResult {
    let request: AuditLogRequest = from_query(query)?;
    let day = request.day.as_deref().filter(|day| !day.is_empty());
    let store = caller.store();
    let entries = store.audit_log().filter(|entry| is_of_kind(entry, request.event_type));
    let entries = entries.filter_map(|entry| {
        let time = timestamp(entry.at);
        if day.is_some_and(|day| !time.to_string().starts_with(day)) {
            return None;
        }
        let mut details = entry.details.clone();
        details.insert("user".to_owned(), entry.user.as_str().into());
        details.insert("key".to_owned(), (&*entry.key).into());
        Some(
            AuditEntry::new(time, &*entry.event)
                .event_details(details)
                .model_id(entry.run.as_ref().map(ToString::to_string))
                .tinker_path(entry.path.as_ref().map(ToString::to_string)),
        )
    });
    to_json(&AuditLog::new(entries.collect()))
}

/// Returns whether an entry belongs to a kind of events of the protocol: shares of runs are events
/// of teams, and keys and users are events of the organization.
fn is_of_kind(entry: &AuditRecord, kind: AuditKind) -> bool {
    let group = entry.event.split('.').next().unwrap_or_default();
    match kind {
        AuditKind::Checkpoints => group == "checkpoint",
        AuditKind::Projects => group == "session",
        AuditKind::Teams => group == "run",
        AuditKind::Organizations => group == "key" || group == "user",
        _ => true,
    }
}

/// Returns the metrics: of the server and of all users for an administrator, of the caller's user
/// otherwise.
pub(super) fn metrics(caller: Caller<'_>) -> String {
    let state = caller.state;
    if caller.principal.role != KeyRole::Admin {
        return user_metrics(state, std::slice::from_ref(&caller.principal.user));
    }
    let users = {
        let store = caller.store();
        let store = store.all();
        let sessions = store.sessions.values().map(|entry| &entry.row.owner);
        let keys = store.keys.values().map(|key| &key.user);
        let all: BTreeSet<&UserId> = sessions.chain(keys).chain(store.limits.keys()).collect();
        all.into_iter().cloned().collect::<Vec<_>>()
    };
    server_metrics(state) + &user_metrics(state, &users)
}

/// Formats the current use by users.
fn user_metrics(state: &ServerState, users: &[UserId]) -> String {
    let store = state.store();
    let figures: Vec<(&UserId, UserLimits)> =
        users.iter().map(|user| (user, use_of(state, &store, user))).collect();
    drop(store);
    let mut text = String::new();
    type Figure = fn(&UserLimits) -> Option<u64>;
    let metrics: [(&str, &str, Figure); 4] = [
        ("samples", "samples of the user that are queued or sampled", |figures| figures.samples),
        ("requests", "requests of the user without a result", |figures| figures.queued),
        ("trained_tokens_today", "tokens trained on today (UTC)", |figures| figures.tokens_per_day),
        ("stored_bytes", "size of the user's checkpoints", |figures| figures.bytes),
    ];
    for (name, help, figure) in metrics {
        text += &format!("# HELP tinkex_user_{name} {help}\n# TYPE tinkex_user_{name} gauge\n");
        for (user, figures) in &figures {
            let value = figure(figures).unwrap_or(0);
            text += &format!("tinkex_user_{name}{{user=\"{user}\"}} {value}\n");
        }
    }
    text
}

fn server_metrics(state: &ServerState) -> String {
    let gauges = GaugeValues::read(&state.backends, &state.store(), state.drain.is_active());
    let mut text = state.metrics.to_text(&gauges, &state.options.limits);
    let upstreams: Vec<_> = state.backends.upstreams().collect();
    if !upstreams.is_empty() {
        text.push_str(
            "# HELP tinkex_upstream_up whether an upstream responds\n\
             # TYPE tinkex_upstream_up gauge\n",
        );
        for upstream in upstreams {
            let name = &upstream.name;
            let up = u8::from(upstream.status().down.is_none());
            text.push_str(&format!("tinkex_upstream_up{{upstream=\"{name}\"}} {up}\n"));
        }
    }
    text
}
