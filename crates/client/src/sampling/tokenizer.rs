//! The tokenizer of weights to sample from.

use crate::error::Result;
use crate::tokenizer::Tokenizer;

use super::SamplingClient;

impl SamplingClient {
    /// The tokenizer of the base model. It is looked for as [`Hub`](crate::Hub) says, with this
    /// client's environment and network.
    ///
    /// # Errors
    /// If the server cannot be asked, or the tokenizer is nowhere to be found.
    pub async fn tokenizer(&self) -> Result<Tokenizer> {
        let sampler = self.get_sampler().await?;
        self.0.session.hub()?.tokenizer_of(&sampler.base_model, None).await
    }
}
