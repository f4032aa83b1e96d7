//! Accounting.

use tinkex_wire::Timestamp;
use tinkex_wire::rest::{
    AuditLog, AuditLogRequest, BillingUsage, BillingUsageRequest, StorageUsage, StorageUsageRequest,
};

use crate::error::Result;
use crate::service::ServiceClient;

use super::send;

/// Usage, storage and the audit log of an organization.
#[derive(Clone, Debug)]
pub struct AdminClient {
    service: ServiceClient,
}

impl AdminClient {
    pub(crate) fn new(service: ServiceClient) -> Self {
        Self { service }
    }

    /// What was used from one hour to before another; at most 14 days.
    ///
    /// # Errors
    /// If the credential may not ask, or the times are not full hours.
    pub async fn get_billing_usage(
        &self,
        starting_on: Timestamp,
        ending_before: Timestamp,
    ) -> Result<BillingUsage> {
        let call = BillingUsageRequest::new(starting_on, ending_before);
        send(&self.service, "get_billing_usage", &call).await
    }

    /// How much storage checkpoints take now.
    ///
    /// # Errors
    /// If the credential may not ask.
    pub async fn get_checkpoint_storage(
        &self,
        query: &StorageUsageRequest,
    ) -> Result<StorageUsage> {
        send(&self.service, "get_current_checkpoint_storage_usage", query).await
    }

    /// Who did what.
    ///
    /// # Errors
    /// If the credential may not ask.
    pub async fn get_audit_log(&self, query: &AuditLogRequest) -> Result<AuditLog> {
        send(&self.service, "get_audit_log", query).await
    }
}
