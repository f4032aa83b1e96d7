//! Files of a tokenizer: their names, named special tokens and chat templates.

use std::path::Path;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, de};

use crate::error::{Error, ErrorKind};

/// The tokenizer itself.
pub const TOKENIZER: &str = "tokenizer.json";
/// A tokenizer in tiktoken's format, as the Kimi models have it.
pub const TIKTOKEN: &str = "tiktoken.model";
/// Named special tokens and, in some repositories, chat templates.
pub const CONFIG: &str = "tokenizer_config.json";
/// Named special tokens, in older repositories.
pub const SPECIAL: &str = "special_tokens_map.json";
/// The chat template, in newer repositories.
pub const TEMPLATE: &str = "chat_template.jinja";

/// Named special tokens and chat templates of a tokenizer.
#[derive(Debug, Default)]
pub(crate) struct TokenizerFiles {
    pub(crate) special: SpecialTokens,
    pub(crate) templates: Vec<NamedTemplate>,
}

/// A chat template with its name.
#[derive(Debug, Deserialize)]
#[cfg_attr(
    not(any(feature = "chat", test)),
    expect(dead_code, reason = "only read by the chat feature")
)]
pub(crate) struct NamedTemplate {
    pub(crate) name: String,
    #[serde(rename = "template")]
    pub(crate) source: String,
}

/// Named special tokens, as the vocabulary writes them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SpecialTokens {
    #[serde(deserialize_with = "content")]
    pub(crate) bos_token: Option<String>,
    #[serde(deserialize_with = "content")]
    pub(crate) eos_token: Option<String>,
    #[serde(deserialize_with = "content")]
    pub(crate) pad_token: Option<String>,
    #[serde(deserialize_with = "content")]
    pub(crate) unk_token: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TokenizerConfig {
    #[serde(flatten)]
    special: SpecialTokens,
    chat_template: Option<ChatTemplates>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ChatTemplates {
    Single(String),
    Named(Vec<NamedTemplate>),
}

/// Returns whether a folder has a tokenizer in either format.
#[must_use]
pub fn has_tokenizer(folder: &Path) -> bool {
    [TOKENIZER, TIKTOKEN].iter().any(|file| folder.join(file).is_file())
}

/// Returns whether the tokenizer of a folder has a chat template.
///
/// # Errors
/// [`ErrorKind::Malformed`] or [`ErrorKind::Unreadable`] if a file cannot be read.
pub fn has_chat_template(folder: &Path) -> Result<bool, Error> {
    Ok(!TokenizerFiles::read(folder)?.templates.is_empty())
}

impl TokenizerFiles {
    /// Reads the files in a folder. Missing files are not an error.
    pub(crate) fn read(folder: &Path) -> Result<Self, Error> {
        let config: TokenizerConfig = read_json(&folder.join(CONFIG))?.unwrap_or_default();
        let older: SpecialTokens = read_json(&folder.join(SPECIAL))?.unwrap_or_default();
        let special = SpecialTokens {
            bos_token: config.special.bos_token.or(older.bos_token),
            eos_token: config.special.eos_token.or(older.eos_token),
            pad_token: config.special.pad_token.or(older.pad_token),
            unk_token: config.special.unk_token.or(older.unk_token),
        };
        let mut templates = match config.chat_template {
            None => Vec::new(),
            Some(ChatTemplates::Single(source)) => vec![NamedTemplate::default_with(source)],
            Some(ChatTemplates::Named(templates)) => templates,
        };
        // A template in a file of its own takes precedence over the one in the settings.
        if let Some(source) = read(&folder.join(TEMPLATE))? {
            let source = String::from_utf8(source).map_err(|error| {
                Error::new(ErrorKind::Malformed, format!("{TEMPLATE} is not UTF-8: {error}"))
            })?;
            templates.retain(|template| template.name != NamedTemplate::DEFAULT);
            templates.push(NamedTemplate::default_with(source));
        }
        Ok(Self { special, templates })
    }
}

impl NamedTemplate {
    /// Name of the template that is used unless another is selected.
    pub(crate) const DEFAULT: &str = "default";

    fn default_with(source: String) -> Self {
        Self { name: Self::DEFAULT.to_owned(), source }
    }
}

fn read_json<T: de::DeserializeOwned>(path: &Path) -> Result<Option<T>, Error> {
    let Some(text) = read(path)? else { return Ok(None) };
    let parsed = serde_json::from_slice(&text).map_err(|error| {
        Error::new(ErrorKind::Malformed, format!("cannot parse {}: {error}", path.display()))
    })?;
    Ok(Some(parsed))
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match std::fs::read(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let message = format!("cannot read {}: {error}", path.display());
            Err(Error::new(ErrorKind::Unreadable, message))
        }
    }
}

/// Deserializes a token written as text, as an object with a `content` field, or as null.
fn content<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    struct TokenVisitor;

    impl<'de> Visitor<'de> for TokenVisitor {
        type Value = Option<String>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a token, or an object with a \"content\" field")
        }

        fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
            Ok(Some(text.to_owned()))
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut found = None;
            while let Some(key) = map.next_key::<String>()? {
                if key == "content" {
                    found = map.next_value()?;
                } else {
                    map.next_value::<IgnoredAny>()?;
                }
            }
            Ok(found)
        }
    }

    deserializer.deserialize_any(TokenVisitor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    #[test]
    fn tokens_may_be_text_objects_or_null() {
        let config = r#"{"bos_token":null,"eos_token":{"content":"</s>","lstrip":false},"x":1}"#;
        let older = r#"{"eos_token":"other","pad_token":"<pad>"}"#;
        let folder = folder(&[(CONFIG, config), (SPECIAL, older)]);
        let special = TokenizerFiles::read(folder.path()).unwrap().special;
        assert_eq!(special.bos_token, None);
        assert_eq!(special.eos_token.as_deref(), Some("</s>"));
        assert_eq!(special.pad_token.as_deref(), Some("<pad>"));
    }

    #[test]
    fn a_template_file_takes_precedence_over_the_settings() {
        let config = r#"{"chat_template":[{"name":"default","template":"old"},
            {"name":"tool_use","template":"tools"}]}"#;
        let both = folder(&[(CONFIG, config), (TEMPLATE, "new")]);
        let templates = TokenizerFiles::read(both.path()).unwrap().templates;
        let named: Vec<_> = templates.iter().map(|t| (&*t.name, &*t.source)).collect();
        assert_eq!(named, [("tool_use", "tools"), ("default", "new")]);

        let one = folder(&[(CONFIG, r#"{"chat_template":"only"}"#)]);
        assert_eq!(TokenizerFiles::read(one.path()).unwrap().templates[0].source, "only");
    }

    #[test]
    fn the_error_of_a_malformed_file_names_it() {
        let broken = folder(&[(CONFIG, "{")]);
        let error = TokenizerFiles::read(broken.path()).unwrap_err();
        assert!(error.to_string().contains(CONFIG), "{error}");
    }
}
