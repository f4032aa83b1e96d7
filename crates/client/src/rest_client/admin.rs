//! [`AdminClient`]: usage, storage, the audit log, and the administration of a server.

use tinkex_wire::Timestamp;
use tinkex_wire::rest::{
    AuditLog, AuditLogRequest, BackupStatus, BillingUsage, BillingUsageRequest, CancelDrain,
    CreateKey, DiskUsage, DrainStatus, GetBackupStatus, GetDiskUsage, GetDrainStatus, KeyCreated,
    KeyList, ListKeys, ListUsers, RevokeKey, RotateKey, SetUserLimits, StartBackup, StartDrain,
    StorageUsage, StorageUsageRequest, UserLimits, UserList,
};

use crate::future::RequestFuture;
use crate::service::ServiceClient;

use super::start;

/// Client for usage, storage and the audit log of an organization, and for the administration of a
/// `tinkex` server; made by [`ServiceClient::admin`]. Cheap to clone.
#[derive(Clone, Debug)]
pub struct AdminClient {
    service: ServiceClient,
}

impl AdminClient {
    pub(crate) fn new(service: ServiceClient) -> Self {
        Self { service }
    }

    /// Returns the usage from `starting_on` (inclusive) to `ending_before` (exclusive), at most 14
    /// days.
    ///
    /// # Errors
    /// If the credential lacks the permission, or the times are not full hours.
    pub fn get_billing_usage(
        &self,
        starting_on: Timestamp,
        ending_before: Timestamp,
    ) -> RequestFuture<BillingUsage> {
        let request = BillingUsageRequest::new(starting_on, ending_before);
        start(&self.service, "get_billing_usage", request)
    }

    /// Returns the storage that checkpoints use now.
    ///
    /// # Errors
    /// If the credential lacks the permission.
    pub fn get_checkpoint_storage(
        &self,
        query: &StorageUsageRequest,
    ) -> RequestFuture<StorageUsage> {
        start(&self.service, "get_current_checkpoint_storage_usage", query.clone())
    }

    /// Returns a page of the audit log.
    ///
    /// # Errors
    /// If the credential lacks the permission.
    pub fn get_audit_log(&self, query: &AuditLogRequest) -> RequestFuture<AuditLog> {
        start(&self.service, "get_audit_log", query.clone())
    }

    /// Creates an API key. Only `tinkex` servers can.
    ///
    /// # Errors
    /// If the credential is not the key of an administrator;
    /// [`ErrorKind::Conflict`](crate::ErrorKind::Conflict) if a key with the name exists;
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if the server does not know the request.
    pub fn create_key(&self, request: &CreateKey) -> RequestFuture<KeyCreated> {
        start(&self.service, "create_key", request.clone())
    }

    /// Lists the API keys of a `tinkex` server.
    ///
    /// # Errors
    /// If the credential is not the key of an administrator;
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if the server does not know the request.
    pub fn list_keys(&self) -> RequestFuture<KeyList> {
        start(&self.service, "list_keys", ListKeys::default())
    }

    /// Revokes the API key with an id or name. Requests and streams with the key end at once.
    ///
    /// # Errors
    /// If the credential is not the key of an administrator;
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if there is no such key.
    pub fn revoke_key(&self, key: impl Into<String>) -> RequestFuture<()> {
        start(&self.service, "revoke_key", RevokeKey::new(key))
    }

    /// Replaces the API key with an id or name. Requests and streams with the old key end at once.
    ///
    /// # Errors
    /// If the credential is not the key of an administrator;
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if there is no such key.
    pub fn rotate_key(&self, key: impl Into<String>) -> RequestFuture<KeyCreated> {
        start(&self.service, "rotate_key", RotateKey::new(key))
    }

    /// Lists the users of a `tinkex` server, with their limits and current use.
    ///
    /// # Errors
    /// If the credential is not the key of an administrator.
    pub fn list_users(&self) -> RequestFuture<UserList> {
        start(&self.service, "list_users", ListUsers::default())
    }

    /// Replaces the limits of a user of a `tinkex` server.
    ///
    /// # Errors
    /// If the credential is not the key of an administrator.
    pub fn set_user_limits(
        &self,
        user: impl Into<String>,
        limits: UserLimits,
    ) -> RequestFuture<()> {
        start(&self.service, "set_user_limits", SetUserLimits::new(user, limits))
    }

    /// Makes the server refuse new work, before it is stopped. Accepted requests are executed. Only
    /// `tinkex` servers can.
    ///
    /// # Errors
    /// If the credential lacks the permission;
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if the server does not know the request.
    pub fn start_drain(&self) -> RequestFuture<DrainStatus> {
        start(&self.service, "start_drain", StartDrain)
    }

    /// Makes the server accept new work again.
    ///
    /// # Errors
    /// The errors of [`start_drain`](Self::start_drain).
    pub fn cancel_drain(&self) -> RequestFuture<DrainStatus> {
        start(&self.service, "cancel_drain", CancelDrain)
    }

    /// Returns whether the server refuses new work, and what it still executes.
    ///
    /// # Errors
    /// The errors of [`start_drain`](Self::start_drain).
    pub fn get_drain_status(&self) -> RequestFuture<DrainStatus> {
        start(&self.service, "get_drain_status", GetDrainStatus)
    }

    /// Starts a backup of the server's data folder into `folder`, an absolute path on the server's
    /// machine. A retry with the same `id` does not start another backup. Only `tinkex` servers can,
    /// and only for clients on their machine.
    ///
    /// # Errors
    /// The errors of [`start_drain`](Self::start_drain);
    /// [`ErrorKind::Conflict`](crate::ErrorKind::Conflict) if another backup is running.
    pub fn start_backup(&self, id: &str, folder: &str) -> RequestFuture<BackupStatus> {
        start(&self.service, "start_backup", StartBackup::new(id, folder))
    }

    /// Returns the status of the last backup.
    ///
    /// # Errors
    /// The errors of [`start_drain`](Self::start_drain).
    pub fn get_backup_status(&self) -> RequestFuture<BackupStatus> {
        start(&self.service, "get_backup_status", GetBackupStatus)
    }

    /// Returns the sizes of the files in the server's data folder.
    ///
    /// # Errors
    /// The errors of [`start_drain`](Self::start_drain).
    pub fn get_disk_usage(&self) -> RequestFuture<DiskUsage> {
        start(&self.service, "get_disk_usage", GetDiskUsage)
    }
}
