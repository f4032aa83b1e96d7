//! The tokenizer of a Hugging Face folder as metadata of a GGUF file.

use std::path::Path;

use serde_json::Value;

use super::gguf::read_json;
use crate::gguf::{pre_tokenizer_name, token_type};
use crate::{Error, GgufWriter, ModelConfig, Result};

/// A byte-level BPE tokenizer.
#[derive(Debug)]
pub(super) struct GgufTokenizer {
    pre: &'static str,
    vocabulary: TokenTable,
    merges: Vec<String>,
    bos: Option<u32>,
    eos: Option<u32>,
    padding: Option<u32>,
    add_bos: bool,
    chat_template: Option<String>,
}

impl GgufTokenizer {
    /// Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read; [`Error::BadFile`] if the tokenizer is not a
    /// byte-level BPE tokenizer that llama.cpp knows.
    pub(super) fn read(folder: &Path, model: &ModelConfig) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let tokenizer = read_json(&path)?;
        let config_path = folder.join("tokenizer_config.json");
        let config = if config_path.is_file() { read_json(&config_path)? } else { Value::Null };
        let mut parsed = Self::parse(&tokenizer, &config, model)
            .map_err(|reason| Error::bad_file(&path, reason))?;
        let template = folder.join("chat_template.jinja");
        if template.is_file() {
            let text = std::fs::read_to_string(&template).map_err(Error::io("read", &template))?;
            parsed.chat_template = Some(text);
        }
        Ok(parsed)
    }

    /// Converts the contents of `tokenizer.json` and `tokenizer_config.json`. Returns a description
    /// of the first problem.
    fn parse(tokenizer: &Value, config: &Value, model: &ModelConfig) -> Result<Self, String> {
        let pre = pre_tokenizer(tokenizer)?;
        let vocabulary = TokenTable::parse(tokenizer, model.vocab_size)?;
        let special = |name: &str| vocabulary.id(special_token(config, name)?);
        let bos = special("bos_token");
        let add_bos = config["add_bos_token"].as_bool();
        Ok(Self {
            pre,
            merges: merges(tokenizer)?,
            bos: bos.or(model.bos),
            eos: special("eos_token").or_else(|| model.eos.first().copied()),
            padding: special("pad_token"),
            add_bos: bos.is_some() && add_bos.unwrap_or_else(|| prepends_token(tokenizer)),
            chat_template: chat_template(config).map(str::to_owned),
            vocabulary,
        })
    }

    /// Adds the tokenizer to the metadata.
    pub(super) fn describe(self, writer: &mut GgufWriter) {
        writer
            .metadata("tokenizer.ggml.model", "gpt2")
            .metadata("tokenizer.ggml.pre", self.pre)
            .metadata("tokenizer.ggml.tokens", self.vocabulary.texts)
            .metadata("tokenizer.ggml.token_type", self.vocabulary.types)
            .metadata("tokenizer.ggml.merges", self.merges)
            .metadata("tokenizer.ggml.add_bos_token", self.add_bos);
        for (name, id) in [("bos", self.bos), ("eos", self.eos), ("padding", self.padding)] {
            if let Some(id) = id {
                writer.metadata(format!("tokenizer.ggml.{name}_token_id"), id);
            }
        }
        if let Some(template) = self.chat_template {
            writer.metadata("tokenizer.chat_template", template);
        }
    }
}

/// Text and type of each token, by id. There is one entry per row of the embedding.
#[derive(Debug)]
struct TokenTable {
    texts: Vec<String>,
    types: Vec<i32>,
}

impl TokenTable {
    /// Reads the vocabulary and the added tokens of a `tokenizer.json` for an embedding of `size`
    /// rows. Rows without a token are unused tokens with the texts `[PADn]`, as llama.cpp's
    /// converter names them.
    fn parse(tokenizer: &Value, size: usize) -> Result<Self, String> {
        let mut table = Self {
            texts: (0..size).map(|id| format!("[PAD{id}]")).collect(),
            types: vec![token_type::UNUSED; size],
        };
        let vocab = tokenizer["model"]["vocab"].as_object().ok_or("model.vocab is missing")?;
        for (text, id) in vocab {
            table.set(id, text, token_type::NORMAL)?;
        }
        for token in tokenizer["added_tokens"].as_array().into_iter().flatten() {
            let text = token["content"].as_str().ok_or("an added token has no content")?;
            let is_special = token["special"].as_bool().unwrap_or(false);
            let kind = if is_special { token_type::CONTROL } else { token_type::USER_DEFINED };
            table.set(&token["id"], text, kind)?;
        }
        Ok(table)
    }

    fn set(&mut self, id: &Value, text: &str, kind: i32) -> Result<(), String> {
        let row = id.as_u64().and_then(|id| usize::try_from(id).ok());
        match row.filter(|row| *row < self.texts.len()) {
            Some(row) => {
                text.clone_into(&mut self.texts[row]);
                self.types[row] = kind;
                Ok(())
            }
            None => {
                let size = self.texts.len();
                Err(format!("token {text:?} has the id {id}, but the model has {size} tokens"))
            }
        }
    }

    /// Returns the id of the token with this text.
    fn id(&self, text: &str) -> Option<u32> {
        let row = self.texts.iter().position(|other| other == text)?;
        u32::try_from(row).ok()
    }
}

/// Returns llama.cpp's name of the pre-tokenizer of a byte-level BPE tokenizer.
fn pre_tokenizer(tokenizer: &Value) -> Result<&'static str, String> {
    if let Some(other) = tokenizer["model"]["type"].as_str().filter(|name| *name != "BPE") {
        return Err(format!("a tokenizer of type {other} cannot be stored in GGUF, expected BPE"));
    }
    let name = pre_tokenizer_name(&tokenizer["pre_tokenizer"]);
    name.ok_or_else(|| {
        "llama.cpp has no pre-tokenizer that splits text as this tokenizer does; supported: \
         gpt-2, llama-bpe, qwen2, smollm"
            .to_owned()
    })
}

/// Returns the merges as pairs of tokens separated by a space. Files contain this text or a list of
/// the two tokens.
fn merges(tokenizer: &Value) -> Result<Vec<String>, String> {
    let merges = tokenizer["model"]["merges"].as_array().ok_or("model.merges is missing")?;
    let pair = |merge: &Value| match merge.as_array().map(Vec::as_slice) {
        Some([left, right]) => Some(format!("{} {}", left.as_str()?, right.as_str()?)),
        Some(_) => None,
        None => merge.as_str().map(str::to_owned),
    };
    let pairs: Option<Vec<String>> = merges.iter().map(pair).collect();
    pairs.ok_or_else(|| "a merge is not a pair of tokens".to_owned())
}

/// Returns the text of a special token in a `tokenizer_config.json`, which has it as a string or as
/// an object.
fn special_token<'a>(config: &'a Value, name: &str) -> Option<&'a str> {
    config[name].as_str().or_else(|| config[name]["content"].as_str())
}

/// Returns whether the post-processor of a `tokenizer.json` puts a special token before the text.
fn prepends_token(tokenizer: &Value) -> bool {
    let outer = &tokenizer["post_processor"];
    let inner = outer["processors"].as_array().into_iter().flatten();
    inner.chain([outer]).any(|one| one["single"][0]["SpecialToken"].is_object())
}

/// Returns the chat template of a `tokenizer_config.json`: the only template, or the template with
/// the name `default`.
fn chat_template(config: &Value) -> Option<&str> {
    let template = &config["chat_template"];
    let default = || template.as_array()?.iter().find(|one| one["name"] == "default");
    template.as_str().or_else(|| default()?["template"].as_str())
}
