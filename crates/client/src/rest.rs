//! Arguments and results of [`RestClient`](crate::RestClient) and
//! [`AdminClient`](crate::AdminClient).

#[doc(inline)]
pub use tinkex_wire::rest::{
    AccessScope, AdapterImported, AuditEntry, AuditKind, AuditLog, AuditLogRequest, BillingUsage,
    Checkpoint, CheckpointPage, Cursor, ExternalWeightsUrls, FinishReasonFilter, ListSessions,
    ListTrainingRuns, ListUserCheckpoints, SamplerInfo, SearchCursor, SearchOwner, SearchSessions,
    SessionFailureCategory, SessionFailureReason, SessionInfo, SessionPage, SessionSearchPage,
    SessionStatus, SessionStatusFilter, SessionSummary, StorageItem, StorageUsage,
    StorageUsageRequest, TrainingRun, TrainingRunPage, UsageEvent, UsageKind, UsageSession,
};
#[doc(inline)]
pub use tinkex_wire::{
    ApiKeyDetails, ApiKeyInfo, FinishReason, OrgDetails, UserDetails, WeightsInfo,
};
