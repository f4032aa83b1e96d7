//! Requests about the client's API key.

use tinkex_wire::{ApiKeyInfo, ApiKeyRequest, ApiRequest, DeleteApiKey};

use crate::error::Result;

use super::RestClient;

/// Each method sends a single request, with the credential itself and without fetching the
/// configuration first, so that a rejected key fails at once.
impl RestClient {
    /// Returns the owner and name of the client's API key.
    ///
    /// # Errors
    /// If the server rejects the key.
    pub async fn get_api_key(&self) -> Result<ApiKeyInfo> {
        self.send_bare(&ApiKeyRequest).await
    }

    /// Deletes the client's API key.
    ///
    /// # Errors
    /// If the server rejects the key.
    pub async fn delete_api_key(&self) -> Result<()> {
        self.send_bare(&DeleteApiKey).await
    }

    async fn send_bare<R: ApiRequest>(&self, request: &R) -> Result<R::Response> {
        let (transport, options) = (self.service.bare_transport()?, self.service.options());
        options.limit(transport.send(request, &options.request_options())).await
    }
}
