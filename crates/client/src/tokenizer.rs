//! [`Tokenizer`]: converts text to a model's tokens and back.
//!
//! [`tinkex_text`] implements it; [`tinkex_hub`] finds a tokenizer's files; the `chat` feature
//! formats conversations.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use tinkex_text::files;
use tinkex_wire::{ModelInput, Tokens};
use tokio::sync::OnceCell;

use crate::config::{BaseUrl, Env};
use crate::error::{Error, ErrorKind, Result};
use crate::settings::ClientSettings;
use crate::transport::download::resume::blocking;

pub use tinkex_hub::{Hub, TokenizerId};

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
    /// environment; see [`from_hub`](Self::from_hub).
    ///
    /// ```no_run
    /// # async fn run() -> tinkex::Result<()> {
    /// let tokenizer = tinkex::Tokenizer::load("Qwen/Qwen3-8B").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Fails like [`Tokenizer::from_hub`].
    ///
    /// # Cancel safety
    /// Dropping the future stops a download; the next one resumes it.
    pub async fn load(model: &str) -> Result<Self> {
        Self::from_hub(&Hub::from_env(&Env::from_process())?, model).await
    }

    /// Loads the tokenizer of a model, or of a folder, from the first of these that has it:
    ///
    /// 1. a folder of that name with a `tokenizer.json` (or the `tiktoken.model` of the Kimi
    ///    models);
    /// 2. the memory of this process;
    /// 3. the local hub cache, which is shared with the Python tools. A cached revision is not
    ///    compared with the hub again;
    /// 4. the hub. An interrupted download is resumed.
    ///
    /// ```no_run
    /// use tinkex::{Env, Hub, Tokenizer};
    ///
    /// # async fn run() -> tinkex::Result<()> {
    /// let hub = Hub::from_env(&Env::from_process())?.endpoint("https://hub.example".parse()?);
    /// let tokenizer = Tokenizer::from_hub(&hub, "Qwen/Qwen3-8B").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none; [`ErrorKind::Connect`] if it is not cached and the
    /// hub cannot be reached. The message names the cache folder and the hub.
    ///
    /// # Cancel safety
    /// Dropping the future stops a download; the next one resumes it.
    pub async fn from_hub(hub: &Hub, model: &str) -> Result<Self> {
        Self::of_model(hub, model, None).await
    }

    /// Loads the tokenizer of a model: the one that the server named, or else the model's own.
    pub(crate) async fn of_model(
        hub: &Hub,
        model: &str,
        named_by_server: Option<&str>,
    ) -> Result<Self> {
        // A server on this machine may name a model by its folder.
        let folder = PathBuf::from(named_by_server.unwrap_or(model));
        let path = folder.clone();
        if blocking(move || Ok(files::has_tokenizer(&path))).await? {
            return read(folder, None).await;
        }
        Self::from_hub_id(hub, &TokenizerId::of_model(model, named_by_server)?).await
    }

    /// Loads a tokenizer by its id, from memory, the cache or the hub. Concurrent calls share one
    /// download.
    ///
    /// # Errors
    /// Fails like [`Tokenizer::from_hub`].
    ///
    /// # Cancel safety
    /// Dropping the future stops a download; the next one resumes it.
    pub async fn from_hub_id(hub: &Hub, id: &TokenizerId) -> Result<Self> {
        let cell = memory_cell(hub, id);
        let load = async || read(hub.tokenizer_files(id).await?, Some(id.to_string())).await;
        let loaded = cell.get_or_try_init(load).await;
        loaded.cloned().map_err(|error| error.during(format!("loading the tokenizer of {id}")))
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
        tinkex_text::Tokenizer::from_folder(folder).map(Self).map_err(text_error)
    }

    /// Creates a tokenizer from the text of a `tokenizer.json`, without named special tokens and
    /// chat templates.
    ///
    /// # Errors
    /// [`ErrorKind::Decode`] if the text is not a tokenizer.
    pub fn from_json(json: impl AsRef<[u8]>) -> Result<Self> {
        tinkex_text::Tokenizer::from_json(json).map(Self).map_err(text_error)
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
        self.0.encode(text).map_err(text_error)
    }

    /// Encodes a piece of a larger text, without the special tokens that [`encode`](Self::encode)
    /// adds.
    ///
    /// # Errors
    /// Fails like [`Tokenizer::encode`].
    pub fn encode_piece(&self, text: &str) -> Result<Tokens> {
        self.0.encode_piece(text).map_err(text_error)
    }

    /// Encodes a text as a model input with one chunk.
    ///
    /// ```no_run
    /// # async fn run(sampler: tinkex::SamplingClient) -> tinkex::Result<()> {
    /// use tinkex::SamplingParams;
    ///
    /// let tokenizer = sampler.tokenizer().await?;
    /// let prompt = tokenizer.input("The capital of France is")?;
    /// let response = sampler.sample(prompt, SamplingParams::new().max_tokens(8)).await?;
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
        self.0.decode(tokens).map_err(text_error)
    }

    /// Decodes tokens without special tokens, for display.
    ///
    /// # Errors
    /// Fails like [`Tokenizer::decode`].
    pub fn decode_text(&self, tokens: &[u32]) -> Result<String> {
        self.0.decode_text(tokens).map_err(text_error)
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
    pub(crate) fn inner(&self) -> &tinkex_text::Tokenizer {
        &self.0
    }
}

/// Returns the model hub in the environment of a client, reached through the client's HTTP service.
pub(crate) fn hub(settings: &ClientSettings) -> Result<Hub> {
    Ok(Hub::from_env(settings.env())?.shared_http(Arc::clone(settings.http())))
}

/// Reads a tokenizer, which is megabytes of text, on the blocking thread pool.
async fn read(folder: PathBuf, name: Option<String>) -> Result<Tokenizer> {
    blocking(move || {
        let tokenizer = tinkex_text::Tokenizer::from_folder(&folder).map_err(text_error)?;
        Ok(match name {
            Some(name) => Tokenizer(tokenizer.with_name(name)),
            None => Tokenizer(tokenizer),
        })
    })
    .await
}

/// Id, folder of the cache and URL of the hub.
type MemoryKey = (TokenizerId, PathBuf, BaseUrl);
type MemoryCell = Arc<OnceCell<Tokenizer>>;

/// Tokenizers that this process has loaded or is loading. They stay in memory until it ends.
static LOADED: LazyLock<Mutex<HashMap<MemoryKey, MemoryCell>>> = LazyLock::new(Mutex::default);

/// Returns the cell that the first call for a tokenizer fills. A failure leaves it empty.
fn memory_cell(hub: &Hub, id: &TokenizerId) -> MemoryCell {
    let key = (id.clone(), hub.cache_folder().to_owned(), hub.url().clone());
    let mut loaded = LOADED.lock();
    Arc::clone(loaded.entry(key).or_default())
}

/// Converts an error of a tokenizer or a chat template.
#[expect(clippy::needless_pass_by_value, reason = "the argument of `map_err` is a value")]
pub(crate) fn text_error(error: tinkex_text::Error) -> Error {
    let kind = match error.kind() {
        tinkex_text::ErrorKind::Malformed => ErrorKind::Decode,
        tinkex_text::ErrorKind::NotFound => ErrorKind::NotFound,
        tinkex_text::ErrorKind::Unreadable => ErrorKind::Io,
        _ => ErrorKind::InvalidInput,
    };
    let mut converted = Error::new(kind, error.message());
    if let Some(operation) = error.operation() {
        converted = converted.during(operation);
    }
    match error.hint() {
        Some(hint) => converted.with_hint(hint),
        None => converted,
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
