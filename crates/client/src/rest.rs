//! Arguments and results of [`RestClient`](crate::RestClient) and
//! [`AdminClient`](crate::AdminClient).

#[doc(inline)]
pub use tinkex_wire::rest::{
    AccessScope, AdapterImported, AuditEntry, AuditKind, AuditLog, AuditLogRequest, BackupState,
    BackupStatus, BillingUsage, Checkpoint, CheckpointPage, CreateKey, Cursor, DiskUsage,
    DrainStatus, ExternalWeightsUrls, FinishReasonFilter, KeyCreated, KeyInfo, KeyList, KeyRole,
    KindUsage, ListSessions, ListTrainingRuns, ListUserCheckpoints, RunUsage, SamplerInfo,
    SearchCursor, SearchOwner, SearchSessions, SessionFailureCategory, SessionFailureReason,
    SessionInfo, SessionPage, SessionSearchPage, SessionStatus, SessionStatusFilter,
    SessionSummary, StorageItem, StorageUsage, StorageUsageRequest, TrainingRun, TrainingRunPage,
    UsageEvent, UsageKind, UsageSession, UserInfo, UserLimits, UserList, UserUsage,
};
#[doc(inline)]
pub use tinkex_wire::{
    ApiKeyDetails, ApiKeyInfo, FinishReason, OrgDetails, UserDetails, WeightsInfo,
};
