//! The tokenizer of a model in training.

use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::{Tokenizer, before_colon};

use super::TrainingClient;

impl TrainingClient {
    /// This model's tokenizer: the one that the server names, or that the model's name implies. It is
    /// looked for as [`Hub`](crate::Hub) says, with this client's environment and network.
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
    /// If the server cannot be asked, or the tokenizer is nowhere to be found.
    pub async fn tokenizer(&self) -> Result<Tokenizer> {
        let info = self.get_info().await?;
        let Some(name) = info.model_data.model_name.or(info.model_name) else {
            return Err(Error::new(ErrorKind::Decode, "the server does not say which model it is"));
        };
        let named = info.model_data.tokenizer_id.as_deref().map(before_colon);
        self.0.session.hub()?.tokenizer_of(&name, named).await
    }
}
