//! [`Tokenizer`]: converts text to a model's tokens and back.
//!
//! [`files`] reads the files of a tokenizer's folder, `tiktoken` converts vocabularies in the
//! tiktoken format, and `token_bytes` provides the bytes of each token.

pub mod files;
mod tiktoken;
mod token_bytes;

use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use tinkex_wire::Tokens;
use tokenizers::Tokenizer as Core;

use crate::error::{Error, ErrorKind, Result};

use files::{SpecialTokens, TokenizerFiles};
use token_bytes::TokenBytes;
#[cfg(test)]
pub(crate) use token_bytes::byte_level;
pub(crate) use token_bytes::raw_byte;

/// A model's tokenizer. Cheap to clone, and safe to share between threads.
///
/// ```
/// use tinkex_text::Tokenizer;
///
/// # let json = r#"{"version":"1.0","model":{"type":"WordLevel","unk_token":"?",
/// #   "vocab":{"?":0,"hello":1,"world":2}},"pre_tokenizer":{"type":"Whitespace"},
/// #   "added_tokens":[{"id":3,"content":"<end>","special":true,"single_word":false,
/// #   "lstrip":false,"rstrip":false,"normalized":false}]}"#;
/// let tokenizer = Tokenizer::from_json(json)?; // or from_folder
/// let tokens = tokenizer.encode("hello world<end>")?;
/// assert_eq!(tokens[..], [1, 2, 3]);
/// assert_eq!(tokenizer.decode_text(&tokens)?, "hello world");
/// # Ok::<_, tinkex_text::Error>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer(Arc<TokenizerInner>);

struct TokenizerInner {
    name: String,
    core: Core,
    files: TokenizerFiles,
    token_bytes: TokenBytes,
    /// Result of [`Tokenizer::max_token_bytes`].
    max_token_bytes: OnceLock<Option<usize>>,
}

impl Tokenizer {
    /// Reads the tokenizer in a folder: `tokenizer.json`, and `tokenizer_config.json`,
    /// `special_tokens_map.json` and `chat_template.jinja` if they exist. The `tiktoken.model` of
    /// the Kimi models is supported too.
    ///
    /// Blocks while it reads files of several megabytes.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the folder has no tokenizer, [`ErrorKind::Malformed`] if a file is
    /// malformed.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let read = |file: &str| {
            let path = folder.join(file);
            std::fs::read(&path).map_err(|error| {
                let message = format!("cannot read {}: {error}", path.display());
                let hint = "Pass a folder that contains a tokenizer.json.";
                Error::new(ErrorKind::NotFound, message).with_hint(hint)
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
        let core = core.map_err(|error| malformed(&folder.join(file).display(), &*error))?;
        Self::new(name, core, TokenizerFiles::read(folder)?)
    }

    /// Creates a tokenizer from the text of a `tokenizer.json`, without named special tokens and
    /// chat templates.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if the text is not a tokenizer.
    pub fn from_json(json: impl AsRef<[u8]>) -> Result<Self> {
        let name = files::TOKENIZER.to_owned();
        let core = Core::from_bytes(json).map_err(|error| malformed(&name, &*error))?;
        Self::new(name, core, TokenizerFiles::default())
    }

    fn new(name: String, mut core: Core, files: TokenizerFiles) -> Result<Self> {
        // Some files carry the truncation and padding of a training job; text is never cut here.
        core.with_truncation(None).map_err(|error| malformed(&name, &*error))?;
        core.with_padding(None);
        let token_bytes = TokenBytes::new(&core);
        let max_token_bytes = OnceLock::new();
        Ok(Self(Arc::new(TokenizerInner { name, core, files, token_bytes, max_token_bytes })))
    }

    /// Sets the name of a tokenizer that has not been cloned yet, for example the repository that
    /// its folder was downloaded from.
    #[must_use]
    pub fn with_name(mut self, name: String) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.name = name;
        }
        self
    }

    /// Returns the repository or folder that the tokenizer was loaded from.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Memory that encoding needs at its peak, in bytes per byte of the text: at most a token per
    /// byte, and the positions of every byte before and after normalization.
    pub const ENCODING_BYTES: usize = 384;

    /// Returns the size of the longest token in bytes; `None` if a token may stand for a text of any
    /// length, as in word-level tokenizers. The first call reads the whole vocabulary.
    #[must_use]
    pub fn max_token_bytes(&self) -> Option<usize> {
        let longest = || {
            let added = self.0.core.get_added_vocabulary().get_added_tokens_decoder();
            let added = added.values().map(|token| token.content.len());
            let vocabulary = self.0.core.get_vocab(false);
            let tokens = vocabulary.keys().map(|token| self.0.token_bytes.len(token));
            tokens.chain(added.map(Some)).try_fold(1, |longest, len| Some(longest.max(len?)))
        };
        *self.0.max_token_bytes.get_or_init(longest)
    }

    /// Returns the size in bytes beyond which every text has more than `tokens` tokens. Use it to
    /// refuse a text before encoding, which needs [`ENCODING_BYTES`](Self::ENCODING_BYTES) of memory
    /// per byte. `None` if the tokenizer has no such size.
    #[must_use]
    pub fn max_text_bytes(&self, tokens: usize) -> Option<usize> {
        self.max_token_bytes().map(|longest| longest.saturating_mul(tokens))
    }

    /// Encodes a text, with the special tokens that the tokenizer adds to every text (often one at
    /// the beginning). Special tokens written in the text are recognized.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the tokenizer cannot encode the text; byte-level and
    /// SentencePiece tokenizers can encode every text.
    pub fn encode(&self, text: &str) -> Result<Tokens> {
        self.ids(text, true).map(Tokens::from)
    }

    /// Encodes a piece of a larger text, without the special tokens that [`encode`](Self::encode)
    /// adds.
    ///
    /// # Errors
    /// Fails like [`Tokenizer::encode`].
    pub fn encode_piece(&self, text: &str) -> Result<Tokens> {
        self.ids(text, false).map(Tokens::from)
    }

    /// Decodes tokens, special tokens included. Ids that are not in the vocabulary are skipped: the
    /// embedding of a model may have more rows than its vocabulary has tokens.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the tokenizer cannot decode them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.text(tokens, false)
    }

    /// Decodes tokens without special tokens, for display.
    ///
    /// # Errors
    /// Fails like [`Tokenizer::decode`].
    pub fn decode_text(&self, tokens: &[u32]) -> Result<String> {
        self.text(tokens, true)
    }

    /// Returns the id of a token, written as in the vocabulary.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.core.token_to_id(token)
    }

    /// Returns a token as the vocabulary writes it, which may differ from its text.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.0.core.id_to_token(id)
    }

    /// Returns the bytes of a token, which may be a part of a UTF-8 character. `None` for an id
    /// that is not in the vocabulary, and for word-level tokenizers, whose tokens have no bytes of
    /// their own.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let added = self.0.core.get_added_vocabulary().get_added_tokens_decoder();
        match added.get(&id) {
            Some(added) => Some(added.content.clone().into_bytes()),
            None => self.0.token_bytes.get(&self.0.core.id_to_token(id)?),
        }
    }

    /// Returns whether a token is special, such as the end token, and therefore not part of the
    /// text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.0.core.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&id).is_some_and(|token| token.special)
    }

    /// Returns the number of tokens, special tokens included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.0.core.get_vocab_size(true)
    }

    /// Returns the id of the token that begins a text.
    #[must_use]
    pub fn bos_id(&self) -> Option<u32> {
        self.token_id(self.special().bos_token.as_deref()?)
    }

    /// Returns the id of the token that ends a text, or a turn of a conversation.
    #[must_use]
    pub fn eos_id(&self) -> Option<u32> {
        self.token_id(self.eos_token()?)
    }

    /// Returns the token that ends a text, as the vocabulary writes it.
    #[must_use]
    pub fn eos_token(&self) -> Option<&str> {
        self.special().eos_token.as_deref()
    }

    /// Returns the id of the padding token.
    #[must_use]
    pub fn pad_id(&self) -> Option<u32> {
        self.token_id(self.special().pad_token.as_deref()?)
    }

    pub(crate) fn special(&self) -> &SpecialTokens {
        &self.0.files.special
    }

    #[cfg(feature = "chat")]
    pub(crate) fn files(&self) -> &TokenizerFiles {
        &self.0.files
    }

    /// Returns whether a piece is encoded in the same way at the beginning of a text and in its
    /// middle, so that pieces of a text can be encoded separately.
    #[cfg(feature = "chat")]
    pub(crate) fn encodes_piecewise(&self) -> bool {
        self.0.token_bytes.encodes_piecewise()
    }

    /// Returns whether a text ends with a special token.
    #[cfg(feature = "chat")]
    pub(crate) fn ends_with_special(&self, text: &str) -> bool {
        let added = self.0.core.get_added_vocabulary().get_added_tokens_decoder();
        added.values().any(|token| token.special && text.ends_with(&token.content))
    }

    /// Returns whether the text of tokens is the text of their bytes, concatenated.
    pub(crate) fn is_byte_level(&self) -> bool {
        self.0.token_bytes.is_byte_level()
    }

    /// Appends the bytes that the decoder of a byte-level tokenizer writes for a token; none for an
    /// id that is not in the vocabulary.
    pub(crate) fn append_byte_level(&self, id: u32, bytes: &mut Vec<u8>) {
        let Some(token) = self.0.core.id_to_token(id) else { return };
        match self.0.token_bytes.get(&token) {
            Some(written) => bytes.extend(written),
            None => bytes.extend(token.as_bytes()),
        }
    }

    /// Encodes a text; returns the ids of its tokens.
    pub(crate) fn ids(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let encoding = self
            .0
            .core
            .encode_fast(text, add_special_tokens)
            .map_err(|error| self.failed(&*error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes a text; returns each token with its end in the text, in bytes.
    #[cfg(feature = "chat")]
    pub(crate) fn ids_with_ends(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<(u32, usize)>> {
        let encoding =
            self.0.core.encode(text, add_special_tokens).map_err(|error| self.failed(&*error))?;
        let ends = encoding.get_offsets().iter().map(|(_, end)| *end);
        Ok(encoding.get_ids().iter().copied().zip(ends).collect())
    }

    fn text(&self, tokens: &[u32], skip_special_tokens: bool) -> Result<String> {
        self.0.core.decode(tokens, skip_special_tokens).map_err(|error| self.failed(&*error))
    }

    fn failed(&self, error: &(dyn std::error::Error + Send + Sync)) -> Error {
        let message = format!("tokenizer of {} failed: {error}", self.name());
        Error::new(ErrorKind::InvalidInput, message)
    }
}

fn malformed(file: &dyn fmt::Display, error: &(dyn std::error::Error + Send + Sync)) -> Error {
    Error::new(ErrorKind::Malformed, format!("cannot parse {file}: {error}"))
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("name", &self.0.name)
            .field("vocab_size", &self.vocab_size())
            .finish_non_exhaustive()
    }
}
