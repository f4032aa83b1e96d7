//! What was used, in tokens. Nothing here costs money.

use std::collections::BTreeMap;

use tinkex_wire::rest::{
    BillingUsage, BillingUsageRequest, StorageItem, StorageUsage, UsageEvent, UsageKind,
    UsageSession,
};
use tinkex_wire::{ApiKeyDetails, ApiKeyInfo};

use super::session::{OWNER, texts};
use super::{Reply, from_query, to_json};
use crate::error::ApiError;
use crate::state::Shared;
use crate::store::{What, timestamp};

const HOUR: i64 = 3_600_000_000;
const MOST: i64 = 14 * 24 * HOUR;

pub(super) fn events(shared: &Shared, query: &str) -> Reply {
    let call: BillingUsageRequest = from_query(query)?;
    let (from, to) = (call.starting_on.unix_micros(), call.ending_before.unix_micros());
    if from % HOUR != 0 || to % HOUR != 0 {
        return Err(ApiError::bad("starting_on and ending_before must be full hours"));
    }
    if from >= to || to - from > MOST {
        return Err(ApiError::bad("ending_before must be after starting_on, by at most 14 days"));
    }
    let store = shared.store();
    let mut sessions = BTreeMap::new();
    let mut data = Vec::new();
    for (key, &count) in &store.usage {
        let start = key.hour.saturating_mul(HOUR);
        if !(from..to).contains(&start) {
            continue;
        }
        let session = store.sessions.get(&key.session);
        let user_metadata = session.and_then(|kept| texts(kept.row.user_metadata.as_ref()));
        sessions.insert(key.session.clone(), UsageSession::default().user_metadata(user_metadata));
        let event_info = match key.what {
            What::Training => UsageKind::Training { token_count: count },
            What::Prefill => UsageKind::SamplingPrefill { cached: false, token_count: count },
            What::CachedPrefill => UsageKind::SamplingPrefill { cached: true, token_count: count },
            What::Sampled => UsageKind::SamplingSample { token_count: count },
            What::Checkpoints => UsageKind::Checkpoint { count },
        };
        data.push(
            UsageEvent::new(timestamp(start), timestamp(start.saturating_add(HOUR)), event_info)
                .base_model(Some(key.base_model.clone()))
                .user_id(Some(OWNER.to_owned()))
                .session_id(Some(key.session.clone()))
                .project_id(session.and_then(|kept| kept.row.project_id.clone()))
                .estimated_cost_usd(Some(0.0))
                .effective_rate_usd_per_million_tokens(Some(0.0)),
        );
    }
    to_json(&BillingUsage::new(data, sessions))
}

pub(super) fn storage(shared: &Shared) -> Reply {
    let store = shared.store();
    let kept = store.checkpoints.values().filter(|kept| !kept.row.is_expired());
    let (mut checkpoint_count, mut size_bytes) = (0, 0);
    for checkpoint in kept {
        checkpoint_count += 1;
        size_bytes += checkpoint.row.size_bytes;
    }
    #[expect(clippy::cast_precision_loss, reason = "for people")]
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

/// What the key in use is: the one that the server was started with.
pub(super) fn key() -> Reply {
    let details = ApiKeyDetails::new(OWNER, "user@localhost");
    to_json(&ApiKeyInfo::new(0, OWNER, details).note("the key of this server"))
}
