//! Converts the tokenizer of a GGUF file to the files of a Hugging Face folder.

use serde_json::{Map, Value, json};

use super::read::GgufFile;
use super::token_type;
use super::value::{GgufArray, GgufValue};
use crate::{Error, ModelConfig, Result};

/// The tokenizer of a GGUF file as the files of a Hugging Face folder.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GgufTokenizerFiles {
    /// Text of `tokenizer.json`.
    pub tokenizer: String,
    /// Text of `tokenizer_config.json`, with the chat template of the model if it has one.
    pub config: String,
}

/// Regular expressions that split text before byte-pair encoding.
const LLAMA3_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN2_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

pub(super) fn tokenizer_files(file: &GgufFile, config: &ModelConfig) -> Result<GgufTokenizerFiles> {
    let parts =
        TokenizerParts::read(file).map_err(|reason| Error::bad_file(file.path(), reason))?;
    Ok(GgufTokenizerFiles { tokenizer: parts.tokenizer_json(), config: parts.config_json(config) })
}

/// The tokenizer of a file.
struct TokenizerParts<'a> {
    tokens: &'a [String],
    /// Type of each token.
    types: &'a [i32],
    merges: &'a [String],
    split: PreTokenizer,
    bos: Option<&'a String>,
    eos: Option<&'a String>,
    padding: Option<&'a String>,
    /// Whether texts start with the beginning-of-sequence token.
    add_bos: bool,
    chat_template: Option<&'a str>,
}

/// How text is split before byte-pair encoding.
#[derive(Clone, Copy)]
enum PreTokenizer {
    /// The regular expression of GPT-2.
    Gpt2,
    /// The regular expression of GPT-2, after splitting digits.
    Digits,
    /// Another regular expression.
    Split { pattern: &'static str, nfc: bool, ignore_merges: bool },
}

impl PreTokenizer {
    fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "gpt-2" => Self::Gpt2,
            "smollm" => Self::Digits,
            "llama-bpe" | "llama-v3" | "llama3" => {
                Self::Split { pattern: LLAMA3_SPLIT, nfc: false, ignore_merges: true }
            }
            "qwen2" | "deepseek-r1-qwen" => {
                Self::Split { pattern: QWEN2_SPLIT, nfc: true, ignore_merges: false }
            }
            _ => return None,
        })
    }

    fn json(self) -> Value {
        let byte_level = |use_regex: bool| {
            json!({
                "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
                "use_regex": use_regex,
            })
        };
        let (first, last) = match self {
            Self::Gpt2 => return byte_level(true),
            Self::Digits => {
                (json!({ "type": "Digits", "individual_digits": true }), byte_level(true))
            }
            Self::Split { pattern, .. } => (
                json!({
                    "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated",
                    "invert": false,
                }),
                byte_level(false),
            ),
        };
        json!({ "type": "Sequence", "pretokenizers": [first, last] })
    }
}

/// Returns the name in GGUF files of the pre-tokenizer of a `tokenizer.json`, or `None` if the
/// pre-tokenizer is unknown.
pub(crate) fn pre_tokenizer_name(pre_tokenizer: &Value) -> Option<&'static str> {
    let has_type = |value: &Value, name: &str| value["type"] == name;
    let is_byte_level = |value: &Value, splits: bool| {
        let prefix = value["add_prefix_space"].as_bool().unwrap_or(true);
        let regex = value["use_regex"].as_bool().unwrap_or(true);
        has_type(value, "ByteLevel") && !prefix && regex == splits
    };
    if is_byte_level(pre_tokenizer, true) {
        return Some("gpt-2");
    }
    let [first, last] = pre_tokenizer["pretokenizers"].as_array()?.as_slice() else { return None };
    if has_type(first, "Digits") && first["individual_digits"] == true && is_byte_level(last, true)
    {
        return Some("smollm");
    }
    let isolated = first["behavior"] == "Isolated" && first["invert"] != true;
    if !has_type(first, "Split") || !isolated || !is_byte_level(last, false) {
        return None;
    }
    match first["pattern"]["Regex"].as_str()? {
        LLAMA3_SPLIT => Some("llama-bpe"),
        QWEN2_SPLIT => Some("qwen2"),
        _ => None,
    }
}

impl<'a> TokenizerParts<'a> {
    /// Reads the metadata. Returns a description of the first problem.
    fn read(file: &'a GgufFile) -> Result<Self, String> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let strings = |name: &str| {
            let values = file.get(&key(name)).and_then(GgufValue::as_strings);
            values.ok_or_else(|| {
                format!("metadata {} is missing or not an array of strings", key(name))
            })
        };
        let text = |name: &str| file.get(&key(name)).and_then(GgufValue::as_str);
        match text("model") {
            Some("gpt2") => {}
            Some("llama") => {
                return Err(
                    "the tokenizer is a SentencePiece model, which is not supported".to_owned()
                );
            }
            None => {
                return Err(format!("metadata {} is missing", key("model")));
            }
            Some(other) => {
                return Err(format!("tokenizer {other:?} is not supported, expected \"gpt2\""));
            }
        }
        let split = text("pre").and_then(PreTokenizer::from_name).ok_or_else(|| {
            format!(
                "pre-tokenizer {:?} is not supported, expected gpt-2, llama-bpe, qwen2 or smollm",
                text("pre").unwrap_or("")
            )
        })?;
        let tokens = strings("tokens")?;
        let types = match file.get(&key("token_type")) {
            Some(GgufValue::Array(GgufArray::I32(types))) if types.len() == tokens.len() => {
                types.as_slice()
            }
            _ => {
                return Err(format!(
                    "metadata {} is missing or does not have one i32 per token",
                    key("token_type")
                ));
            }
        };
        let token = |name: &str| {
            let id = file.get(&key(&format!("{name}_token_id")))?.as_u64()?;
            tokens.get(usize::try_from(id).ok()?)
        };
        let flag = |name: &str| file.get(&key(name)).and_then(GgufValue::as_bool);
        let bos = token("bos");
        let add_bos = bos.is_some() && flag("add_bos_token").unwrap_or(false);
        Ok(Self {
            tokens,
            types,
            merges: strings("merges")?,
            split,
            bos,
            eos: token("eos"),
            padding: token("padding"),
            add_bos,
            chat_template: file.get("tokenizer.chat_template").and_then(GgufValue::as_str),
        })
    }

    fn tokenizer_json(&self) -> String {
        let mut vocab = Map::new();
        let mut added = Vec::new();
        for ((text, kind), id) in self.tokens.iter().zip(self.types).zip(0_u32..) {
            if *kind == token_type::UNUSED {
                continue;
            }
            // The vocabulary has the added tokens too: the `tokenizers` library ignores the id of
            // an added token that the vocabulary lacks, and assigns the next free id.
            vocab.insert(text.clone(), json!(id));
            if matches!(*kind, token_type::CONTROL | token_type::USER_DEFINED) {
                added.push(json!({
                    "id": id, "content": text, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": *kind == token_type::CONTROL,
                }));
            }
        }
        let (nfc, ignore_merges) = match self.split {
            PreTokenizer::Split { nfc, ignore_merges, .. } => (nfc, ignore_merges),
            PreTokenizer::Gpt2 | PreTokenizer::Digits => (false, false),
        };
        let bytes = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
            "use_regex": false,
        });
        let merges: Vec<Value> = self
            .merges
            .iter()
            .filter_map(|merge| merge.split_once(' '))
            .map(|(left, right)| json!([left, right]))
            .collect();
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": if nfc { json!({ "type": "NFC" }) } else { Value::Null },
            "pre_tokenizer": self.split.json(),
            "post_processor": self.post_processor().unwrap_or_else(|| bytes.clone()),
            "decoder": bytes,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": ignore_merges,
                "vocab": vocab,
                "merges": merges,
            },
        })
        .to_string()
    }

    /// Returns the post-processor that prepends the beginning-of-sequence token, if there is one.
    fn post_processor(&self) -> Option<Value> {
        let bos = self.bos.filter(|_| self.add_bos)?;
        let id = self.tokens.iter().position(|token| token == bos)?;
        let special = json!({ "SpecialToken": { "id": bos, "type_id": 0 } });
        let sequence = |name: &str| json!({ "Sequence": { "id": name, "type_id": 0 } });
        let mut specials = Map::new();
        specials.insert(bos.clone(), json!({ "id": bos, "ids": [id], "tokens": [bos] }));
        Some(json!({
            "type": "TemplateProcessing",
            "single": [special, sequence("A")],
            "pair": [special, sequence("A"), special, sequence("B")],
            "special_tokens": specials,
        }))
    }

    fn config_json(&self, config: &ModelConfig) -> String {
        let mut all = Map::new();
        all.insert("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast"));
        all.insert("model_max_length".to_owned(), json!(config.max_positions));
        all.insert("add_bos_token".to_owned(), json!(self.add_bos));
        for (name, token) in
            [("bos_token", self.bos), ("eos_token", self.eos), ("pad_token", self.padding)]
        {
            if let Some(token) = token {
                all.insert(name.to_owned(), json!(token));
            }
        }
        if let Some(template) = self.chat_template {
            all.insert("chat_template".to_owned(), json!(template));
        }
        Value::Object(all).to_string()
    }
}
