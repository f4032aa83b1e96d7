//! The tokenizer of weights to sample from.

use crate::error::Result;
use crate::tokenizer::{Tokenizer, before_colon};

use super::SamplingClient;

impl SamplingClient {
    /// The tokenizer of the base model: the one that the server names, or that the model's name
    /// implies. It is looked for as [`Hub`](crate::Hub) says, with this
    /// client's environment and network.
    ///
    /// # Errors
    /// If the server cannot be asked, or the tokenizer is nowhere to be found.
    pub async fn tokenizer(&self) -> Result<Tokenizer> {
        let sampler = self.get_sampler().await?;
        let named = sampler.tokenizer_id.as_deref().map(before_colon);
        self.0.session.hub()?.tokenizer_of(&sampler.base_model, named).await
    }
}
