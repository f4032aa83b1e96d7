//! Billing usage, checkpoint storage and the audit log.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::JsonObject;
use crate::codec::query;
use crate::ids::SessionId;
use crate::metadata::Metadata;
use crate::request::{bare_request, json_response};
use crate::setters::setters;
use crate::time::Timestamp;

/// Returns usage by hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BillingUsageRequest {
    /// Start of the period, inclusive.
    pub starting_on: Timestamp,
    /// End of the period, exclusive.
    pub ending_before: Timestamp,
}

impl BillingUsageRequest {
    /// Requests the usage from `starting_on` until before `ending_before`.
    #[must_use]
    pub fn new(starting_on: Timestamp, ending_before: Timestamp) -> Self {
        Self { starting_on, ending_before }
    }
}

/// Usage by hour: the response to [`BillingUsageRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BillingUsage {
    /// Usage, one event per hour, session and kind.
    pub data: Vec<UsageEvent>,
    /// Sessions that the events refer to.
    #[serde(default)]
    pub sessions: BTreeMap<SessionId, UsageSession>,
    /// Time up to which costs are complete.
    #[serde(default)]
    pub cost_data_through: Option<Timestamp>,
}

impl BillingUsage {
    /// Creates a response without a completeness time.
    #[must_use]
    pub fn new(data: Vec<UsageEvent>, sessions: BTreeMap<SessionId, UsageSession>) -> Self {
        Self { data, sessions, cost_data_through: None }
    }
}

/// Metadata of a session in a usage report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UsageSession {
    /// Metadata that the user attached to the session.
    #[serde(default)]
    pub user_metadata: Option<Metadata>,
}

setters!(UsageSession { user_metadata: Option<Metadata>; });

/// Usage of one kind in one hour.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UsageEvent {
    /// Start of the hour.
    pub bucket_start: Timestamp,
    /// End of the hour.
    pub bucket_end: Timestamp,
    /// Name of the base model.
    #[serde(default)]
    pub base_model: Option<String>,
    /// Id of the user.
    #[serde(default)]
    pub user_id: Option<String>,
    /// Name of the user.
    #[serde(default)]
    pub user_name: Option<String>,
    /// Id of the session.
    #[serde(default)]
    pub session_id: Option<SessionId>,
    /// Id of the project.
    #[serde(default)]
    pub project_id: Option<String>,
    /// Estimated cost in US dollars.
    #[serde(default)]
    pub estimated_cost_usd: Option<f64>,
    /// Price per million tokens in US dollars.
    #[serde(default)]
    pub effective_rate_usd_per_million_tokens: Option<f64>,
    /// Price per gigabyte and month in US dollars.
    #[serde(default)]
    pub effective_rate_usd_per_gigabyte_month: Option<f64>,
    /// Kind and amount of usage.
    pub event_info: UsageKind,
}

impl UsageEvent {
    /// Creates an event without a user, project or cost.
    #[must_use]
    pub fn new(bucket_start: Timestamp, bucket_end: Timestamp, event_info: UsageKind) -> Self {
        Self {
            bucket_start,
            bucket_end,
            base_model: None,
            user_id: None,
            user_name: None,
            session_id: None,
            project_id: None,
            estimated_cost_usd: None,
            effective_rate_usd_per_million_tokens: None,
            effective_rate_usd_per_gigabyte_month: None,
            event_info,
        }
    }
}

setters!(UsageEvent {
    base_model: Option<String>;
    user_id: Option<String>;
    session_id: Option<SessionId>;
    project_id: Option<String>;
    estimated_cost_usd: Option<f64>;
    effective_rate_usd_per_million_tokens: Option<f64>;
});

/// Kind and amount of usage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum UsageKind {
    /// Training.
    Training {
        /// Number of tokens trained on.
        token_count: u64,
    },
    /// Processing of prompts.
    SamplingPrefill {
        /// Whether the prompt tokens were in the prefix cache.
        cached: bool,
        /// Number of prompt tokens.
        token_count: u64,
    },
    /// Sampling.
    SamplingSample {
        /// Number of sampled tokens.
        token_count: u64,
    },
    /// Saving of checkpoints.
    Checkpoint {
        /// Number of checkpoints.
        count: u64,
    },
    /// Storage of checkpoints.
    Storage {
        /// Gigabytes multiplied by hours.
        gigabyte_hours: f64,
    },
}

/// Returns the current size of the stored checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct StorageUsageRequest {
    /// Restricts the report to one project.
    #[serde(skip_serializing_if = "query::is_blank")]
    pub project_id: Option<String>,
}

setters!(StorageUsageRequest { project_id: Option<String>; });

/// Size of the stored checkpoints: the response to [`StorageUsageRequest`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StorageUsage {
    /// Price per gigabyte and month in US dollars.
    #[serde(default)]
    pub effective_rate_usd_per_gigabyte_month: Option<f64>,
    /// One item per project and user.
    pub data: Vec<StorageItem>,
}

setters!(StorageUsage {
    effective_rate_usd_per_gigabyte_month: Option<f64>;
    data: Vec<StorageItem>;
});

/// Size of one user's checkpoints in one project.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StorageItem {
    /// Id of the project.
    #[serde(default)]
    pub project_id: Option<String>,
    /// URN of the user.
    #[serde(default)]
    pub org_user_urn: Option<String>,
    /// Email address of the user.
    #[serde(default)]
    pub user_email: Option<String>,
    /// Name of the user.
    #[serde(default)]
    pub user_name: Option<String>,
    /// Number of checkpoints.
    pub checkpoint_count: u64,
    /// Total size in bytes.
    pub size_bytes: u64,
    /// Total size in gigabytes.
    pub size_gigabytes: f64,
    /// Estimated cost per month in US dollars.
    #[serde(default)]
    pub estimated_monthly_cost_usd: Option<f64>,
}

setters!(StorageItem {
    org_user_urn: Option<String>;
    checkpoint_count: u64;
    size_bytes: u64;
    size_gigabytes: f64;
    estimated_monthly_cost_usd: Option<f64>;
});

/// Returns the audit log of one day.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct AuditLogRequest {
    /// Kind of events to return. Defaults to [`AuditKind::All`].
    pub event_type: AuditKind,
    /// Day to return, as `YYYY-MM-DD`.
    #[serde(skip_serializing_if = "query::is_blank")]
    pub day: Option<String>,
}

setters!(AuditLogRequest {
    event_type: AuditKind;
    day: Option<String>;
});

/// Kind of audited events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum AuditKind {
    /// All events.
    #[default]
    All,
    /// Events that concern checkpoints.
    Checkpoints,
    /// Events that concern projects.
    Projects,
    /// Events that concern teams.
    Teams,
    /// Events that concern organizations.
    Organizations,
}

/// Audit log: the response to [`AuditLogRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AuditLog {
    /// Audited events.
    pub entries: Vec<AuditEntry>,
}

impl AuditLog {
    /// Creates a log.
    #[must_use]
    pub fn new(entries: Vec<AuditEntry>) -> Self {
        Self { entries }
    }
}

/// One audited event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AuditEntry {
    /// Time of the event.
    pub timestamp: Timestamp,
    /// Name of the event.
    pub event: String,
    /// Further properties of the event.
    #[serde(default)]
    pub event_details: JsonObject,
    /// Id of the affected model.
    #[serde(default)]
    pub model_id: Option<String>,
    /// `tinker://` path of the affected checkpoint.
    #[serde(default)]
    pub tinker_path: Option<String>,
    /// Stated purpose.
    #[serde(default)]
    pub purpose: Option<String>,
}

impl AuditEntry {
    /// Creates an event without further properties.
    pub fn new(timestamp: Timestamp, event: impl Into<String>) -> Self {
        let event_details = JsonObject::new();
        let event = event.into();
        Self { timestamp, event, event_details, model_id: None, tinker_path: None, purpose: None }
    }
}

setters!(AuditEntry {
    event_details: JsonObject;
    model_id: Option<String>;
    tinker_path: Option<String>;
});

json_response!(BillingUsage, StorageUsage, AuditLog);

bare_request! {
    BillingUsageRequest: BillingUsage => BillingUsage, |r| params [], query r;
    StorageUsageRequest: StorageUsage => StorageUsage, |r| params [], query r;
    AuditLogRequest: AuditLog => AuditLog, |r| params [], query r;
}
