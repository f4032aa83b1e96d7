//! The tokenizer of a Hugging Face folder as metadata of a GGUF file.

use std::path::Path;

use serde_json::Value;

use super::gguf::read_json;
use crate::gguf::pre_tokenizer_name;
use crate::{Error, GgufWriter, ModelConfig, Result};

/// Numbers of token types in the metadata.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// A byte-level BPE tokenizer.
#[derive(Debug)]
pub(super) struct GgufTokenizer {
    pre: &'static str,
    tokens: Vec<String>,
    types: Vec<i32>,
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
        match tokenizer["model"]["type"].as_str() {
            Some("BPE") | None => {}
            Some(other) => {
                return Err(format!(
                    "a tokenizer of type {other} cannot be stored in GGUF, expected BPE"
                ));
            }
        }
        let pre = pre_tokenizer_name(&tokenizer["pre_tokenizer"]).ok_or_else(|| {
            "llama.cpp has no name for its pre-tokenizer, expected that of gpt-2, llama-bpe, qwen2 \
             or smollm"
                .to_owned()
        })?;
        let mut tokens: Vec<Option<String>> = vec![None; model.vocab_size];
        let mut types = vec![UNUSED; model.vocab_size];
        let mut put = |id: Option<u64>, text: &str, kind: i32| -> Result<(), String> {
            let id = id.and_then(|id| usize::try_from(id).ok());
            match id.and_then(|id| Some((tokens.get_mut(id)?, types.get_mut(id)?))) {
                Some((token, slot)) => {
                    *token = Some(text.to_owned());
                    *slot = kind;
                    Ok(())
                }
                None => Err(format!(
                    "token {text:?} has an id outside the model's {} tokens",
                    model.vocab_size
                )),
            }
        };
        let vocab = tokenizer["model"]["vocab"].as_object();
        for (text, id) in vocab.ok_or("model.vocab is missing")? {
            put(id.as_u64(), text, NORMAL)?;
        }
        for token in tokenizer["added_tokens"].as_array().into_iter().flatten() {
            let special = token["special"].as_bool().unwrap_or(false);
            let text = token["content"].as_str().ok_or("an added token has no content")?;
            put(token["id"].as_u64(), text, if special { CONTROL } else { USER_DEFINED })?;
        }
        let tokens: Vec<String> = tokens
            .into_iter()
            .enumerate()
            .map(|(id, text)| text.unwrap_or_else(|| format!("[PAD{id}]")))
            .collect();
        let merges = tokenizer["model"]["merges"].as_array().ok_or("model.merges is missing")?;
        let merges = merges.iter().map(merge).collect::<Option<Vec<_>>>();
        let id = |name: &str| {
            let token = &config[name];
            let text = token.as_str().or_else(|| token["content"].as_str())?;
            let at = tokens.iter().position(|token| token == text)?;
            u32::try_from(at).ok()
        };
        let bos = id("bos_token");
        let starts_with_bos = || {
            let first = &tokenizer["post_processor"];
            let processors = first["processors"].as_array();
            let mut all = processors.into_iter().flatten().chain([first]);
            all.any(|one| one["single"][0]["SpecialToken"].is_object())
        };
        let add_bos =
            bos.is_some() && config["add_bos_token"].as_bool().unwrap_or_else(starts_with_bos);
        let template = &config["chat_template"];
        let named = || {
            let all = template.as_array()?;
            all.iter().find(|one| one["name"] == "default")?["template"].as_str()
        };
        Ok(Self {
            pre,
            merges: merges.ok_or("a merge is not a pair of tokens")?,
            bos: bos.or(model.bos),
            eos: id("eos_token").or_else(|| model.eos.first().copied()),
            padding: id("pad_token"),
            add_bos,
            chat_template: template.as_str().or_else(named).map(str::to_owned),
            tokens,
            types,
        })
    }

    /// Adds the tokenizer to the metadata.
    pub(super) fn describe(self, writer: &mut GgufWriter) {
        writer
            .metadata("tokenizer.ggml.model", "gpt2")
            .metadata("tokenizer.ggml.pre", self.pre)
            .metadata("tokenizer.ggml.tokens", self.tokens)
            .metadata("tokenizer.ggml.token_type", self.types)
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

/// Returns a merge as two tokens separated by a space. Files contain this text or a pair of tokens.
fn merge(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(pair) => match pair.as_slice() {
            [left, right] => Some(format!("{} {}", left.as_str()?, right.as_str()?)),
            _ => None,
        },
        _ => None,
    }
}
