//! [`TrainingClient::tokenizer`]: loads the tokenizer of the model.

use tinkex_hub::before_colon;

use crate::error::{Error, ErrorKind, Result};
use crate::future::RequestFuture;
use crate::tokenizer::{Tokenizer, hub};

use super::TrainingClient;

impl TrainingClient {
    /// Loads the model's tokenizer. The server names the tokenizer; if it does not, the name of the
    /// base model determines it (see [`TokenizerId::of_model`](crate::TokenizerId::of_model)).
    ///
    /// Looks in the local hub cache first and downloads missing files; see [`Hub`](crate::Hub). The
    /// download uses this client's environment and network settings.
    ///
    /// ```no_run
    /// # async fn run(model: tinkex::TrainingClient) -> tinkex::Result<()> {
    /// use tinkex::Datum;
    ///
    /// let tokenizer = model.tokenizer().await?;
    /// let prompt = tokenizer.encode("English: banana split\nPig Latin:")?;
    /// let datum = Datum::completion(prompt, tokenizer.encode_piece(" anana-bay plit-say")?)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Fails if the request to the server fails, or if the tokenizer is neither in the cache nor on
    /// the hub.
    pub fn tokenizer(&self) -> RequestFuture<Tokenizer> {
        let client = self.clone();
        let _entered = self.0.session.settings().enter_runtime();
        RequestFuture::start(async move { client.load_tokenizer().await })
    }

    async fn load_tokenizer(&self) -> Result<Tokenizer> {
        let info = self.get_info().await?;
        let Some(name) = info.model_data.model_name.or(info.model_name) else {
            return Err(Error::new(
                ErrorKind::Decode,
                "cannot determine the tokenizer: the server did not name the base model",
            ));
        };
        let tokenizer_id = info.model_data.tokenizer_id.as_deref().map(before_colon);
        Tokenizer::of_model(&hub(self.0.session.settings())?, &name, tokenizer_id).await
    }
}
