//! Accounting: what was used, what is stored, who did what.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::JsonObject;
use crate::codec::query;
use crate::ids::SessionId;
use crate::metadata::Metadata;
use crate::request::{bare_request, json_response};
use crate::time::Timestamp;

/// Asks what was used, by the hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BillingUsageRequest {
    /// From this hour on.
    pub starting_on: Timestamp,
    /// To before this hour.
    pub ending_before: Timestamp,
}

/// What was used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BillingUsage {
    /// Use, by hour and kind.
    pub data: Vec<UsageEvent>,
    /// The sessions that are mentioned.
    #[serde(default)]
    pub sessions: BTreeMap<SessionId, UsageSession>,
    /// Until when costs are known.
    #[serde(default)]
    pub cost_data_through: Option<Timestamp>,
}

/// A session that used something.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageSession {
    /// What was remembered with it.
    #[serde(default)]
    pub user_metadata: Option<Metadata>,
}

/// Use of one kind in one hour.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UsageEvent {
    /// When the hour begins.
    pub bucket_start: Timestamp,
    /// When it ends.
    pub bucket_end: Timestamp,
    /// The model used.
    #[serde(default)]
    pub base_model: Option<String>,
    /// Who used it.
    #[serde(default)]
    pub user_id: Option<String>,
    /// Their name.
    #[serde(default)]
    pub user_name: Option<String>,
    /// In which session.
    #[serde(default)]
    pub session_id: Option<SessionId>,
    /// For which project.
    #[serde(default)]
    pub project_id: Option<String>,
    /// What it cost, about.
    #[serde(default)]
    pub estimated_cost_usd: Option<f64>,
    /// The price of tokens.
    #[serde(default)]
    pub effective_rate_usd_per_million_tokens: Option<f64>,
    /// The price of storage.
    #[serde(default)]
    pub effective_rate_usd_per_gigabyte_month: Option<f64>,
    /// What was used.
    pub event_info: UsageKind,
}

/// What was used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum UsageKind {
    /// Training.
    Training {
        /// Tokens trained on.
        token_count: u64,
    },
    /// Reading prompts.
    SamplingPrefill {
        /// Whether they had been read before.
        cached: bool,
        /// Tokens read.
        token_count: u64,
    },
    /// Sampling.
    SamplingSample {
        /// Tokens sampled.
        token_count: u64,
    },
    /// Saving checkpoints.
    Checkpoint {
        /// How many.
        count: u64,
    },
    /// Keeping checkpoints.
    Storage {
        /// How much, for how long.
        gigabyte_hours: f64,
    },
}

/// Asks how much storage checkpoints take now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StorageUsageRequest {
    /// Only those of this project.
    #[serde(skip_serializing_if = "query::is_blank")]
    pub project_id: Option<String>,
}

/// How much storage checkpoints take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StorageUsage {
    /// The price of storage.
    #[serde(default)]
    pub effective_rate_usd_per_gigabyte_month: Option<f64>,
    /// By project and person.
    pub data: Vec<StorageItem>,
}

/// How much storage one person's checkpoints in one project take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StorageItem {
    /// The project.
    #[serde(default)]
    pub project_id: Option<String>,
    /// The person.
    #[serde(default)]
    pub org_user_urn: Option<String>,
    /// Their address.
    #[serde(default)]
    pub user_email: Option<String>,
    /// Their name.
    #[serde(default)]
    pub user_name: Option<String>,
    /// How many checkpoints.
    pub checkpoint_count: u64,
    /// How large, in bytes.
    pub size_bytes: u64,
    /// How large, in gigabytes.
    pub size_gigabytes: f64,
    /// What a month costs, about.
    #[serde(default)]
    pub estimated_monthly_cost_usd: Option<f64>,
}

/// Asks who did what.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AuditLogRequest {
    /// What kind of deeds.
    pub event_type: AuditKind,
    /// On this day, as `YYYY-MM-DD`.
    #[serde(skip_serializing_if = "query::is_blank")]
    pub day: Option<String>,
}

/// What kind of deeds to list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuditKind {
    /// All.
    #[default]
    All,
    /// Those on checkpoints.
    Checkpoints,
    /// Those on projects.
    Projects,
    /// Those on teams.
    Teams,
    /// Those on organizations.
    Organizations,
}

/// Who did what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditLog {
    /// The deeds.
    pub entries: Vec<AuditEntry>,
}

/// One deed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// When.
    pub timestamp: Timestamp,
    /// What.
    pub event: String,
    /// More about it.
    #[serde(default)]
    pub event_details: JsonObject,
    /// To which model.
    #[serde(default)]
    pub model_id: Option<String>,
    /// To which checkpoint.
    #[serde(default)]
    pub tinker_path: Option<String>,
    /// What for.
    #[serde(default)]
    pub purpose: Option<String>,
}

json_response!(BillingUsage, StorageUsage, AuditLog);

bare_request! {
    BillingUsageRequest: BillingUsage => BillingUsage, |c| params [], query c;
    StorageUsageRequest: StorageUsage => StorageUsage, |c| params [], query c;
    AuditLogRequest: AuditLog => AuditLog, |c| params [], query c;
}
