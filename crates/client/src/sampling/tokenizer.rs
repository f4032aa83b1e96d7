//! [`SamplingClient::tokenizer`]: loads the tokenizer of the base model.

use tinkex_hub::before_colon;

use crate::error::Result;
use crate::future::RequestFuture;
use crate::tokenizer::{Tokenizer, hub};

use super::SamplingClient;

impl SamplingClient {
    /// Loads the base model's tokenizer. The server names the tokenizer; if it does not, the name
    /// of the model determines it (see [`TokenizerId::of_model`](crate::TokenizerId::of_model)).
    ///
    /// Looks in the local hub cache first and downloads missing files; see [`Hub`](crate::Hub). The
    /// download uses this client's environment and network settings.
    ///
    /// # Errors
    /// Fails if the request to the server fails, or if the tokenizer is neither in the cache nor on
    /// the hub.
    pub fn tokenizer(&self) -> RequestFuture<Tokenizer> {
        let client = self.clone();
        let _entered = self.0.shared.session.settings().enter_runtime();
        RequestFuture::start(async move { client.load_tokenizer().await })
    }

    async fn load_tokenizer(&self) -> Result<Tokenizer> {
        let sampler = self.get_sampler().await?;
        let tokenizer_id = sampler.tokenizer_id.as_deref().map(before_colon);
        let hub = hub(self.0.shared.session.settings())?;
        Tokenizer::of_model(&hub, &sampler.base_model, tokenizer_id).await
    }
}
