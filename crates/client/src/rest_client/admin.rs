//! [`AdminClient`]: usage, storage and the audit log.

use tinkex_wire::Timestamp;
use tinkex_wire::rest::{
    AuditLog, AuditLogRequest, BillingUsage, BillingUsageRequest, StorageUsage, StorageUsageRequest,
};

use crate::future::RequestFuture;
use crate::service::ServiceClient;

use super::start;

/// Client for usage, storage and the audit log of an organization; made by
/// [`ServiceClient::admin`]. Cheap to clone.
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
}
