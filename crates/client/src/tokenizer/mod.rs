//! [`Tokenizer`]: converts text to a model's tokens and back.
//!
//! [`tinkex_text`] implements it; [`hub`] finds a tokenizer's files; the `chat` feature formats
//! conversations.

mod cache;
mod hub;
mod hub_file;
mod hub_snapshot;
mod id;

use std::fmt;
use std::path::Path;

use tinkex_text::files;
use tinkex_wire::{ModelInput, Tokens};

use crate::config::Env;
use crate::error::{Error, ErrorKind, Result};

pub use hub::Hub;
pub(crate) use hub::OfflineSource;
pub use id::TokenizerId;
pub(crate) use id::before_colon;

/// A model's tokenizer. Cheap to clone, and safe to share between threads.
///
/// ```
/// use tinkex::Tokenizer;
///
/// # let json = r#"{"version":"1.0","model":{"type":"WordLevel","unk_token":"?",
/// #   "vocab":{"?":0,"hello":1,"world":2}},"pre_tokenizer":{"type":"Whitespace"},
/// #   "added_tokens":[{"id":3,"content":"<end>","special":true,"single_word":false,
/// #   "lstrip":false,"rstrip":false,"normalized":false}]}"#;
/// let tokenizer = Tokenizer::from_json(json)?; // or from_folder, or load
/// let tokens = tokenizer.encode("hello world<end>")?;
/// assert_eq!(tokens[..], [1, 2, 3]);
/// assert_eq!(tokenizer.decode_text(&tokens)?, "hello world");
/// # Ok::<_, tinkex::Error>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer(tinkex_text::Tokenizer);

impl Tokenizer {
    /// Loads the tokenizer of a model, or of a folder, with the settings of the process
    /// environment: from memory, the local hub cache, or the hub (see [`Hub`]).
    ///
    /// ```no_run
    /// # async fn run() -> tinkex::Result<()> {
    /// let tokenizer = tinkex::Tokenizer::load("Qwen/Qwen3-8B").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Fails like [`Hub::tokenizer`].
    ///
    /// # Cancel safety
    /// Dropping the future stops a download; the next one resumes it.
    pub async fn load(model: &str) -> Result<Self> {
        Hub::from_env(&Env::from_process())?.tokenizer(model).await
    }

    /// Reads the tokenizer in a folder: `tokenizer.json`, and `tokenizer_config.json`,
    /// `special_tokens_map.json` and `chat_template.jinja` if they exist. The `tiktoken.model` of
    /// the Kimi models is supported too.
    ///
    /// Blocks while it reads files of several megabytes.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the folder has no tokenizer, [`ErrorKind::Decode`] if a file is
    /// malformed.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        Ok(Self(tinkex_text::Tokenizer::from_folder(folder)?))
    }

    /// Creates a tokenizer from the text of a `tokenizer.json`, without named special tokens and
    /// chat templates.
    ///
    /// # Errors
    /// [`ErrorKind::Decode`] if the text is not a tokenizer.
    pub fn from_json(json: impl AsRef<[u8]>) -> Result<Self> {
        Ok(Self(tinkex_text::Tokenizer::from_json(json)?))
    }

    /// Returns the repository or folder that the tokenizer was loaded from.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Encodes a text, with the special tokens that the tokenizer adds to every text (often one at
    /// the beginning). Special tokens written in the text are recognized.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the tokenizer cannot encode the text; byte-level and
    /// SentencePiece tokenizers can encode every text.
    pub fn encode(&self, text: &str) -> Result<Tokens> {
        Ok(self.0.encode(text)?)
    }

    /// Encodes a piece of a larger text, without the special tokens that [`encode`](Self::encode)
    /// adds.
    ///
    /// # Errors
    /// Fails like [`Tokenizer::encode`].
    pub fn encode_piece(&self, text: &str) -> Result<Tokens> {
        Ok(self.0.encode_piece(text)?)
    }

    /// Encodes a text as a model input with one chunk.
    ///
    /// ```no_run
    /// # async fn run(sampler: tinkex::SamplingClient) -> tinkex::Result<()> {
    /// use tinkex::SamplingParams;
    ///
    /// let tokenizer = sampler.tokenizer().await?;
    /// let prompt = tokenizer.input("The capital of France is")?;
    /// let response = sampler.sample(prompt, SamplingParams::new().max_tokens(8)).send().await?;
    /// println!("{}", tokenizer.decode_text(&response.sequences[0].tokens)?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Fails like [`Tokenizer::encode`].
    pub fn input(&self, text: &str) -> Result<ModelInput> {
        self.encode(text).map(ModelInput::from_tokens)
    }

    /// Decodes tokens, special tokens included. Ids that are not in the vocabulary are skipped: the
    /// embedding of a model may have more rows than its vocabulary has tokens.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the tokenizer cannot decode them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        Ok(self.0.decode(tokens)?)
    }

    /// Decodes tokens without special tokens, for display.
    ///
    /// # Errors
    /// Fails like [`Tokenizer::decode`].
    pub fn decode_text(&self, tokens: &[u32]) -> Result<String> {
        Ok(self.0.decode_text(tokens)?)
    }

    /// Returns the id of a token, written as in the vocabulary.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.token_id(token)
    }

    /// Returns a token as the vocabulary writes it, which may differ from its text.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.0.token(id)
    }

    /// Returns the bytes of a token, which may be a part of a UTF-8 character. `None` for an id
    /// that is not in the vocabulary, and for word-level tokenizers, whose tokens have no bytes of
    /// their own.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.0.token_bytes(id)
    }

    /// Returns whether a token is special, such as the end token, and therefore not part of the
    /// text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.0.is_special(id)
    }

    /// Returns the number of tokens, special tokens included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }

    /// Returns the id of the token that begins a text.
    #[must_use]
    pub fn bos_id(&self) -> Option<u32> {
        self.0.bos_id()
    }

    /// Returns the id of the token that ends a text, or a turn of a conversation.
    #[must_use]
    pub fn eos_id(&self) -> Option<u32> {
        self.0.eos_id()
    }

    /// Returns the id of the padding token.
    #[must_use]
    pub fn pad_id(&self) -> Option<u32> {
        self.0.pad_id()
    }

    /// Returns the implementation.
    #[cfg(feature = "chat")]
    pub(crate) fn inner(&self) -> &tinkex_text::Tokenizer {
        &self.0
    }
}

/// Converts errors of tokenizers and chat templates.
impl From<tinkex_text::Error> for Error {
    fn from(error: tinkex_text::Error) -> Self {
        let kind = match error.kind() {
            tinkex_text::ErrorKind::Malformed => ErrorKind::Decode,
            tinkex_text::ErrorKind::NotFound => ErrorKind::NotFound,
            tinkex_text::ErrorKind::Unreadable => ErrorKind::Config,
            _ => ErrorKind::InvalidInput,
        };
        let mut converted = Self::new(kind, error.message());
        if let Some(operation) = error.operation() {
            converted = converted.during(operation);
        }
        match error.hint() {
            Some(hint) => converted.with_hint(hint),
            None => converted,
        }
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
