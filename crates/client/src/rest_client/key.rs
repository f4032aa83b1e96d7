//! Requests about the client's API key.

use tinkex_wire::{ApiKeyInfo, ApiKeyRequest, ApiRequest, DeleteApiKey};

use crate::call_options::ApplyOptions as _;
use crate::future::RequestFuture;

use super::RestClient;

/// Each method sends a single request, with the credential itself and without fetching the
/// configuration first, so that a rejected key fails at once.
impl RestClient {
    /// Returns the owner and name of the client's API key.
    ///
    /// # Errors
    /// If the server rejects the key.
    pub fn get_api_key(&self) -> RequestFuture<ApiKeyInfo> {
        self.start_bare(ApiKeyRequest)
    }

    /// Deletes the client's API key.
    ///
    /// # Errors
    /// If the server rejects the key.
    pub fn delete_api_key(&self) -> RequestFuture<()> {
        self.start_bare(DeleteApiKey)
    }

    fn start_bare<R>(&self, request: R) -> RequestFuture<R::Response>
    where
        R: ApiRequest<Response: Send> + Send + Sync + 'static,
    {
        let service = self.service.clone();
        self.service.start(async move {
            let options = service.options().request_options();
            service.bare_transport()?.send(&request, &options).await
        })
    }
}
