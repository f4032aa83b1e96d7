//! [`Tokenizer`]: text to tokens and back, as a model sees them.
//!
//! Where its files come from is [`hub`]'s concern, what a conversation looks like is the `chat`
//! feature's. Code that comes with a model is never run.

mod cache;
mod download;
pub(crate) mod files;
mod hub;
mod id;
mod pieces;
mod tiktoken;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use tinkex_wire::{ModelInput, Tokens};
use tokenizers::Tokenizer as Core;

use crate::config::Env;
use crate::error::{Error, ErrorKind, Result};

use files::{Special, TokenizerFiles};
pub use hub::Hub;
pub use id::TokenizerId;
pub(crate) use id::before_colon;
use pieces::Pieces;

/// A model's tokenizer. Cheap to clone and shared safely between threads.
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
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    name: String,
    core: Core,
    files: TokenizerFiles,
    pieces: Pieces,
}

impl Tokenizer {
    /// The tokenizer of a model, or of a folder, by the environment's settings (see [`Hub`]): from
    /// this process's memory, the local hub cache, or the hub.
    ///
    /// ```no_run
    /// # async fn run() -> tinkex::Result<()> {
    /// let tokenizer = tinkex::Tokenizer::load("Qwen/Qwen3-8B").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If it is nowhere to be found; the error says where it was looked for.
    pub async fn load(model: &str) -> Result<Self> {
        Hub::from_env(&Env::from_process())?.tokenizer(model).await
    }

    /// The tokenizer in a folder: its `tokenizer.json`, and `tokenizer_config.json`,
    /// `special_tokens_map.json` and `chat_template.jinja` where there are any. The `tiktoken.model`
    /// of the Kimi models is read too.
    ///
    /// Reads files of some megabytes; call it where that may take its time.
    ///
    /// # Errors
    /// If there is no tokenizer, or a file cannot be understood.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let read = |file: &str| {
            let path = folder.join(file);
            std::fs::read(&path).map_err(|why| {
                let why = format!("{} cannot be read: {why}", path.display());
                let hint = "a tokenizer's folder has a tokenizer.json in it";
                Error::new(ErrorKind::NotFound, why).with_hint(hint)
            })
        };
        let name = folder.display().to_string();
        let (file, core) = match read(files::TOKENIZER) {
            Ok(json) => (files::TOKENIZER, Core::from_bytes(json)),
            Err(missing) => {
                let model = read(files::TIKTOKEN).map_err(|_| missing)?;
                (files::TIKTOKEN, tiktoken::read(&model, &read(files::CONFIG)?))
            }
        };
        let core = core.map_err(|why| not_understood(&name, file, &*why))?;
        Self::new(name, core, TokenizerFiles::of_folder(folder)?)
    }

    /// A tokenizer from the text of its `tokenizer.json` alone, without named special tokens.
    ///
    /// # Errors
    /// If the text is not a tokenizer.
    pub fn from_json(json: impl AsRef<[u8]>) -> Result<Self> {
        let name = files::TOKENIZER.to_owned();
        let core = Core::from_bytes(json).map_err(|why| not_understood("it", &name, &*why))?;
        Self::new(name, core, TokenizerFiles::default())
    }

    fn new(name: String, mut core: Core, files: TokenizerFiles) -> Result<Self> {
        // Files carry the settings of some old batch job; what is encoded here stays whole.
        core.with_truncation(None).map_err(|why| Error::new(ErrorKind::Decode, why.to_string()))?;
        core.with_padding(None);
        let pieces = Pieces::of(&core);
        Ok(Self(Arc::new(Inner { name, core, files, pieces })))
    }

    /// The same under another name; only while nobody shares it yet.
    fn named(mut self, name: String) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.name = name;
        }
        self
    }

    /// Where it came from: a repository or a folder.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The tokens of a text, with what the tokenizer puts around every text (often a token that
    /// begins it). Special tokens that stand in the text are recognised.
    ///
    /// # Errors
    /// If the tokenizer cannot encode the text, which those in use today always can.
    pub fn encode(&self, text: &str) -> Result<Tokens> {
        self.ids(text, true).map(Tokens::from)
    }

    /// The tokens of a text and nothing else: for a piece of something larger.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_piece(&self, text: &str) -> Result<Tokens> {
        self.ids(text, false).map(Tokens::from)
    }

    /// What a model reads: the text, encoded, as one chunk.
    ///
    /// ```no_run
    /// # async fn run(sampler: tinkex::SamplingClient) -> tinkex::Result<()> {
    /// use tinkex::SamplingParams;
    ///
    /// let tokenizer = sampler.tokenizer().await?;
    /// let prompt = tokenizer.input("The capital of France is")?;
    /// let answer = sampler.sample(prompt, SamplingParams::new().max_tokens(8)).send().await?;
    /// println!("{}", tokenizer.decode_text(&answer.sequences[0].tokens)?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn input(&self, text: &str) -> Result<ModelInput> {
        self.encode(text).map(ModelInput::from_tokens)
    }

    /// The text of tokens, special ones included. Ids that the vocabulary lacks are left out: models
    /// have more ids than tokens.
    ///
    /// # Errors
    /// If the tokenizer cannot decode them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.text(tokens, false)
    }

    /// The text of tokens without special ones, as people want to read it.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn decode_text(&self, tokens: &[u32]) -> Result<String> {
        self.text(tokens, true)
    }

    /// The id of a token, written as in the vocabulary.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.core.token_to_id(token)
    }

    /// A token as the vocabulary writes it, which is not always its text.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.0.core.id_to_token(id)
    }

    /// The bytes a token stands for; one token may hold half a character. `None` for an id that the
    /// vocabulary lacks, and for kinds of tokenizers whose tokens have no bytes of their own.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let added = self.0.core.get_added_vocabulary().get_added_tokens_decoder();
        match added.get(&id) {
            Some(added) => Some(added.content.clone().into_bytes()),
            None => self.0.pieces.bytes(&self.0.core.id_to_token(id)?),
        }
    }

    /// Whether a token is special: it marks something and is not text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.0.core.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&id).is_some_and(|token| token.special)
    }

    /// How many tokens there are.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.0.core.get_vocab_size(true)
    }

    /// The token that begins a text, if there is one.
    #[must_use]
    pub fn bos_id(&self) -> Option<u32> {
        self.token_id(self.special().bos_token.as_deref()?)
    }

    /// The token that ends a text (or a turn, in models made for conversations), if there is one.
    #[must_use]
    pub fn eos_id(&self) -> Option<u32> {
        self.token_id(self.special().eos_token.as_deref()?)
    }

    /// The token that fills up, if there is one.
    #[must_use]
    pub fn pad_id(&self) -> Option<u32> {
        self.token_id(self.special().pad_token.as_deref()?)
    }

    pub(crate) fn special(&self) -> &Special {
        &self.0.files.special
    }

    #[cfg(feature = "chat")]
    pub(crate) fn files(&self) -> &TokenizerFiles {
        &self.0.files
    }

    /// Whether texts may be encoded piece by piece, each as it would be within the whole.
    #[cfg(feature = "chat")]
    pub(crate) fn joins(&self) -> bool {
        self.0.pieces.join()
    }

    /// Whether a text ends with a special token.
    #[cfg(feature = "chat")]
    pub(crate) fn ends_specially(&self, text: &str) -> bool {
        let added = self.0.core.get_added_vocabulary().get_added_tokens_decoder();
        added.values().any(|token| token.special && text.ends_with(&token.content))
    }

    pub(crate) fn ids(&self, text: &str, around: bool) -> Result<Vec<u32>> {
        let encoding = self.0.core.encode_fast(text, around).map_err(|why| self.failed(&*why))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Tokens, each with where it ends in the text, in bytes.
    #[cfg(feature = "chat")]
    pub(crate) fn ids_with_ends(&self, text: &str, around: bool) -> Result<Vec<(u32, usize)>> {
        let encoding = self.0.core.encode(text, around).map_err(|why| self.failed(&*why))?;
        let ends = encoding.get_offsets().iter().map(|(_, end)| *end);
        Ok(encoding.get_ids().iter().copied().zip(ends).collect())
    }

    fn text(&self, tokens: &[u32], without_special: bool) -> Result<String> {
        self.0.core.decode(tokens, without_special).map_err(|why| self.failed(&*why))
    }

    fn failed(&self, why: &(dyn std::error::Error + Send + Sync)) -> Error {
        let why = format!("the tokenizer of {} cannot do that: {why}", self.name());
        Error::new(ErrorKind::InvalidInput, why)
    }
}

fn not_understood(name: &str, file: &str, why: &(dyn std::error::Error + Send + Sync)) -> Error {
    Error::new(ErrorKind::Decode, format!("the {file} of {name} cannot be understood: {why}"))
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("name", &self.0.name)
            .field("vocab_size", &self.vocab_size())
            .finish_non_exhaustive()
    }
}
