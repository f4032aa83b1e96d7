//! The API key itself.

use tinkex_wire::{ApiKeyInfo, ApiKeyRequest, DeleteApiKey};

use crate::error::Result;
use crate::transport::RequestOptions;

use super::RestClient;

/// Each is a single request, made with the credential itself: nothing is set up before, and a key
/// that is refused is told at once.
impl RestClient {
    /// What the server knows about the client's API key.
    ///
    /// # Errors
    /// If the key is refused.
    pub async fn get_api_key(&self) -> Result<ApiKeyInfo> {
        self.service.bare_transport()?.send(&ApiKeyRequest, &RequestOptions::default()).await
    }

    /// Deletes the client's API key: it cannot be used any more.
    ///
    /// # Errors
    /// If the key is refused.
    pub async fn delete_api_key(&self) -> Result<()> {
        self.service.bare_transport()?.send(&DeleteApiKey, &RequestOptions::default()).await
    }
}
