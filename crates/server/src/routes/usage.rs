//! Usage in tokens and stored bytes. A local server has no costs.

use std::collections::BTreeMap;

use tinkex_store::clock::timestamp;
use tinkex_store::error::ServerError;
use tinkex_store::store::{INFERENCE_SESSION, UsageMeter};
use tinkex_wire::rest::{
    BillingUsage, BillingUsageRequest, StorageItem, StorageUsage, UsageEvent, UsageKind,
    UsageSession,
};
use tinkex_wire::{ApiKeyDetails, ApiKeyInfo};

use super::session::{OWNER, string_metadata};
use super::{RouteResult, from_query, to_json};
use crate::state::ServerState;

/// One hour in microseconds.
const HOUR: i64 = 3_600_000_000;
/// Longest period of one request in microseconds: 14 days.
const MAX_PERIOD: i64 = 14 * 24 * HOUR;

pub(super) fn events(state: &ServerState, query: &str) -> RouteResult {
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
    let store = state.store();
    let mut sessions = BTreeMap::new();
    let mut data = Vec::new();
    for (key, &count) in &store.usage {
        let start = key.hour.saturating_mul(HOUR);
        if !(from..to).contains(&start) {
            continue;
        }
        let session = store.sessions.get(&key.session);
        // Inference requests without a sampling session belong to no session.
        let session_id = (key.session.as_str() != INFERENCE_SESSION).then(|| key.session.clone());
        let user_metadata =
            session.and_then(|entry| string_metadata(entry.row.user_metadata.as_ref()));
        if let Some(id) = &session_id {
            sessions.insert(id.clone(), UsageSession::default().user_metadata(user_metadata));
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
                .user_id(Some(OWNER.to_owned()))
                .session_id(session_id)
                .project_id(session.and_then(|entry| entry.row.project_id.clone()))
                .estimated_cost_usd(Some(0.0))
                .effective_rate_usd_per_million_tokens(Some(0.0)),
        );
    }
    to_json(&BillingUsage::new(data, sessions))
}

pub(super) fn storage(state: &ServerState) -> RouteResult {
    let store = state.store();
    let now = state.clock.now();
    let mut checkpoint_count = 0;
    let mut size_bytes = 0;
    for entry in store.checkpoints.values().filter(|entry| !entry.row.is_expired(now)) {
        checkpoint_count += 1;
        size_bytes += entry.row.size_bytes;
    }
    #[expect(clippy::cast_precision_loss, reason = "a rounded size for display")]
    let size_gigabytes = size_bytes as f64 / 1e9;
    let item = StorageItem::default()
        .org_user_urn(Some(OWNER.to_owned()))
        .checkpoint_count(checkpoint_count)
        .size_bytes(size_bytes)
        .size_gigabytes(size_gigabytes)
        .estimated_monthly_cost_usd(Some(0.0));
    to_json(
        &StorageUsage::default().effective_rate_usd_per_gigabyte_month(Some(0.0)).data(vec![item]),
    )
}

/// Describes the API key that the server was started with.
pub(super) fn key() -> RouteResult {
    let details = ApiKeyDetails::new(OWNER, "user@localhost");
    to_json(&ApiKeyInfo::new(0, OWNER, details).note("the key of this server"))
}
