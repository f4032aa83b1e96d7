//! Tokenizer of the weights that a client samples from.

use crate::error::Result;
use crate::tokenizer::{Tokenizer, before_colon};

use super::SamplingClient;

impl SamplingClient {
    /// Loads the base model's tokenizer: the one that the server names, or else the one that the
    /// model's name implies.
    ///
    /// Looks in the local hub cache first and downloads missing files; see [`Hub`](crate::Hub). The
    /// download uses this client's environment and network settings.
    ///
    /// # Errors
    /// Fails if the request to the server fails, or if the tokenizer is neither in the cache nor on
    /// the hub.
    pub async fn tokenizer(&self) -> Result<Tokenizer> {
        let sampler = self.get_sampler().await?;
        let tokenizer_id = sampler.tokenizer_id.as_deref().map(before_colon);
        self.0.shared.session.hub()?.tokenizer_of(&sampler.base_model, tokenizer_id).await
    }
}
