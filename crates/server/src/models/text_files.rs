//! Tokenizer, chat template and vocabulary of a base model.
//!
//! They are read on first use and stay in memory. When the server starts, a thread reads each file
//! once, logs which requests will be rejected because of missing or malformed files, and drops the
//! content: the tokenizers of all models of a hub cache would take gigabytes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use tinkex_engine::tokenizer::Vocabulary;
use tinkex_inference::ChatModel;
use tinkex_store::error::with_causes;
use tinkex_text::Tokenizer;

use super::{BaseModel, BaseModels, warn};

/// Consequences of missing or malformed files, for warnings.
const WITHOUT_TOKENIZER: &str = "chat requests are rejected, and other inference requests must send \
                                 token ids and receive no text";
const WITHOUT_STOP_STRINGS: &str = "requests with stop strings are rejected";
const WITHOUT_CHAT: &str = "chat requests are rejected";

/// Files of a base model that are read on first use.
#[derive(Debug, Default)]
pub(super) struct TextFiles {
    vocabulary: OnceLock<Result<Arc<Vocabulary>, String>>,
    tokenizer: OnceLock<Option<Tokenizer>>,
    chat: OnceLock<Result<ChatModel, String>>,
    /// Whether it was logged that the tokenizer cannot be read.
    tokenizer_warned: AtomicBool,
}

/// Starts a thread that reads the tokenizers and chat templates of the engine's models, one after
/// the other, and logs those that cannot be used. The thread ends early if the server stops.
pub(crate) fn check_text_files(models: &Arc<BaseModels>) {
    let running = Arc::downgrade(models);
    let models = models.of_engine();
    let check = move || {
        for model in models {
            if Weak::strong_count(&running) == 0 {
                return;
            }
            model.warn_about_text_files();
        }
    };
    // Without the thread, the first request of each model logs the same.
    if let Err(error) = std::thread::Builder::new().name("tokenizer-check".to_owned()).spawn(check)
    {
        tracing::debug!("cannot check the tokenizers: {error}");
    }
}

impl BaseModel {
    /// Returns the identifier for tokenizer libraries: the folder if it has a tokenizer, so that
    /// no download is needed, and the model's name otherwise.
    pub(crate) fn tokenizer_id(&self) -> String {
        if self.folder.join("tokenizer.json").is_file() {
            self.folder.to_string_lossy().into_owned()
        } else {
            self.name.clone()
        }
    }

    /// Returns the tokenizer if it has been read, with an inner `None` if the model has no usable
    /// tokenizer. Returns an outer `None` if the tokenizer has not been read yet.
    pub(crate) fn loaded_tokenizer(&self) -> Option<Option<Tokenizer>> {
        self.text_files.tokenizer.get().cloned()
    }

    /// Returns the tokenizer. The first call reads it from disk and blocks. If it cannot be read,
    /// logs the reason once and returns `None`.
    pub(crate) fn tokenizer(&self) -> Option<Tokenizer> {
        let read = || {
            let tokenizer = Tokenizer::from_folder(&self.folder);
            let warn =
                |error| self.warn_without_tokenizer(&format!("{error}; {WITHOUT_TOKENIZER}"));
            tokenizer.map_err(warn).ok()
        };
        self.text_files.tokenizer.get_or_init(read).clone()
    }

    /// Returns the chat template or the reason why it cannot be used, if it has been read; `None`
    /// if it has not been read yet.
    pub(crate) fn loaded_chat(&self) -> Option<Result<ChatModel, String>> {
        self.text_files.chat.get().cloned()
    }

    /// Returns the chat template, or the reason why it cannot be used. The first call reads it from
    /// disk and blocks.
    pub(crate) fn chat(&self) -> Result<ChatModel, String> {
        let read = || ChatModel::new(&self.name, self.tokenizer(), self.eos(), self.vocab_size());
        self.text_files.chat.get_or_init(read).clone()
    }

    /// Returns the vocabulary. The first call reads it from disk and blocks.
    pub(crate) fn vocabulary(&self) -> Result<Arc<Vocabulary>, String> {
        let read = || self.read_vocabulary().map(Arc::new);
        self.text_files.vocabulary.get_or_init(read).clone()
    }

    fn read_vocabulary(&self) -> Result<Vocabulary, String> {
        let path = self.folder.join("tokenizer.json");
        Vocabulary::read(path).map_err(|error| with_causes(&error))
    }

    /// Logs that the tokenizer cannot be read, unless this was logged before.
    fn warn_without_tokenizer(&self, message: &str) {
        if !self.text_files.tokenizer_warned.swap(true, Ordering::Relaxed) {
            warn(&self.name, message);
        }
    }

    /// Reads tokenizer, vocabulary and chat template, and logs what cannot be used.
    pub(super) fn warn_about_text_files(&self) {
        let vocabulary = self.read_vocabulary();
        let tokenizer = match Tokenizer::from_folder(&self.folder) {
            Ok(tokenizer) => Some(tokenizer),
            Err(error) => {
                let also = match &vocabulary {
                    Ok(_) => String::new(),
                    Err(_) => format!("; {WITHOUT_STOP_STRINGS}"),
                };
                self.warn_without_tokenizer(&format!("{error}; {WITHOUT_TOKENIZER}{also}"));
                None
            }
        };
        match vocabulary {
            Err(error) if tokenizer.is_some() => {
                warn(&self.name, &format!("{error}; {WITHOUT_STOP_STRINGS}"));
            }
            Ok(vocabulary) if vocabulary.len() > self.vocab_size() => {
                let message = format!(
                    "{} has {} tokens, but the model has {size}; requests with the tokens from \
                     {size} on are rejected",
                    self.folder.join("tokenizer.json").display(),
                    vocabulary.len(),
                    size = self.vocab_size(),
                );
                warn(&self.name, &message);
            }
            _ => {}
        }
        let Some(tokenizer) = tokenizer else { return };
        if !tokenizer.has_chat_template() {
            tracing::info!(
                target: tinkex_store::log::MODEL, base_model = %self.name,
                "no chat template; {WITHOUT_CHAT}"
            );
        } else if let Err(error) = tokenizer.chat() {
            warn(&self.name, &format!("{error}; {WITHOUT_CHAT}"));
        }
    }
}
