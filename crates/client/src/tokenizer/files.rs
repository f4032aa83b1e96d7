//! What stands beside a `tokenizer.json`: the named special tokens and the chat templates.

use std::path::Path;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, de};

use crate::error::{Error, ErrorKind};

/// The tokenizer itself.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// The same in another form; see [`super::tiktoken`].
pub(crate) const TIKTOKEN: &str = "tiktoken.model";
/// Special tokens by name, and perhaps chat templates.
pub(crate) const CONFIG: &str = "tokenizer_config.json";
/// Special tokens by name, in older repositories.
pub(crate) const SPECIAL: &str = "special_tokens_map.json";
/// The chat template, in newer ones.
pub(crate) const TEMPLATE: &str = "chat_template.jinja";

/// Everything but the tokenizer itself.
#[derive(Debug, Default)]
pub(crate) struct TokenizerFiles {
    pub(crate) special: Special,
    #[cfg_attr(not(any(feature = "chat", test)), expect(dead_code, reason = "for conversations"))]
    pub(crate) templates: Vec<NamedTemplate>,
}

/// A chat template and its name; the usual one is called `default`.
#[derive(Debug, Deserialize)]
#[cfg_attr(not(any(feature = "chat", test)), expect(dead_code, reason = "for conversations"))]
pub(crate) struct NamedTemplate {
    pub(crate) name: String,
    #[serde(rename = "template")]
    pub(crate) source: String,
}

/// Special tokens by name.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Special {
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
struct Config {
    #[serde(flatten)]
    special: Special,
    chat_template: Option<Templates>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Many(Vec<NamedTemplate>),
}

/// Whether a tokenizer is in a folder, in any form.
pub(crate) fn are_in(folder: &Path) -> bool {
    [TOKENIZER, TIKTOKEN].iter().any(|file| folder.join(file).is_file())
}

impl TokenizerFiles {
    pub(crate) fn of_folder(folder: &Path) -> Result<Self, Error> {
        let config: Config = read_json(&folder.join(CONFIG))?.unwrap_or_default();
        let older: Special = read_json(&folder.join(SPECIAL))?.unwrap_or_default();
        let special = Special {
            bos_token: config.special.bos_token.or(older.bos_token),
            eos_token: config.special.eos_token.or(older.eos_token),
            pad_token: config.special.pad_token.or(older.pad_token),
            unk_token: config.special.unk_token.or(older.unk_token),
        };
        let mut templates = match config.chat_template {
            None => Vec::new(),
            Some(Templates::One(source)) => vec![NamedTemplate::usual(source)],
            Some(Templates::Many(templates)) => templates,
        };
        // A file of its own is newer than what stands in the settings.
        if let Some(source) = read(&folder.join(TEMPLATE))? {
            let source = String::from_utf8(source).map_err(|why| {
                Error::new(ErrorKind::Decode, format!("{TEMPLATE} is not text: {why}"))
            })?;
            templates.retain(|template| template.name != NamedTemplate::USUAL);
            templates.push(NamedTemplate::usual(source));
        }
        Ok(Self { special, templates })
    }
}

impl NamedTemplate {
    pub(crate) const USUAL: &str = "default";

    fn usual(source: String) -> Self {
        Self { name: Self::USUAL.to_owned(), source }
    }
}

fn read_json<T: de::DeserializeOwned>(path: &Path) -> Result<Option<T>, Error> {
    let Some(text) = read(path)? else { return Ok(None) };
    let parsed = serde_json::from_slice(&text).map_err(|why| {
        Error::new(ErrorKind::Decode, format!("{} cannot be understood: {why}", path.display()))
    })?;
    Ok(Some(parsed))
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match std::fs::read(path) {
        Ok(text) => Ok(Some(text)),
        Err(why) if why.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(why) => {
            let why = format!("{} cannot be read: {why}", path.display());
            Err(Error::new(ErrorKind::Config, why))
        }
    }
}

/// A token is text, or an object with the text in it, or nothing.
fn content<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    struct Content;

    impl<'de> Visitor<'de> for Content {
        type Value = Option<String>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a token, or an object with its \"content\"")
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

    deserializer.deserialize_any(Content)
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
    fn tokens_come_as_text_as_objects_or_not_at_all() {
        let config = r#"{"bos_token":null,"eos_token":{"content":"</s>","lstrip":false},"x":1}"#;
        let older = r#"{"eos_token":"other","pad_token":"<pad>"}"#;
        let folder = folder(&[(CONFIG, config), (SPECIAL, older)]);
        let special = TokenizerFiles::of_folder(folder.path()).unwrap().special;
        assert_eq!(special.bos_token, None);
        assert_eq!(special.eos_token.as_deref(), Some("</s>"));
        assert_eq!(special.pad_token.as_deref(), Some("<pad>"));
    }

    #[test]
    fn the_template_of_a_file_wins_over_that_of_the_settings() {
        let config = r#"{"chat_template":[{"name":"default","template":"old"},
            {"name":"tool_use","template":"tools"}]}"#;
        let both = folder(&[(CONFIG, config), (TEMPLATE, "new")]);
        let templates = TokenizerFiles::of_folder(both.path()).unwrap().templates;
        let named: Vec<_> = templates.iter().map(|t| (&*t.name, &*t.source)).collect();
        assert_eq!(named, [("tool_use", "tools"), ("default", "new")]);

        let one = folder(&[(CONFIG, r#"{"chat_template":"only"}"#)]);
        assert_eq!(TokenizerFiles::of_folder(one.path()).unwrap().templates[0].source, "only");
    }

    #[test]
    fn a_broken_file_is_named() {
        let broken = folder(&[(CONFIG, "{")]);
        let error = TokenizerFiles::of_folder(broken.path()).unwrap_err();
        assert!(error.to_string().contains(CONFIG), "{error}");
    }
}
