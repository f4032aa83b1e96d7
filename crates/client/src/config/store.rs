//! The file that keeps credentials between runs, shared with the Python tools.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tinkex_files::AtomicWrite;
use tinkex_wire::{ApiKeyDetails, Secret};

use crate::error::{Error, ErrorKind};

use super::Env;

/// Stored keys: `~/.tinker/credentials.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialStore {
    path: PathBuf,
    file: File,
    rest: Rest,
}

/// What other tools keep in the file beyond that, and shall find there again.
#[derive(Clone, Default, PartialEq, Eq)]
struct Rest(Map<String, Value>);

impl fmt::Debug for Rest {
    /// Names the fields without what is in them: it may be a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct File {
    #[serde(default = "version_one")]
    version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    default: Option<String>,
    #[serde(default)]
    keys: BTreeMap<String, StoredKey>,
}

fn version_one() -> u32 {
    1
}

/// A stored key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredKey {
    /// How it came here.
    #[serde(rename = "type")]
    pub kind: StoredKeyKind,
    /// The key.
    pub key: Secret,
    /// Its name.
    pub name: String,
    /// What its owner wrote about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Whose it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<ApiKeyDetails>,
}

/// How a key came into the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoredKeyKind {
    /// Its owner pasted it.
    Manual,
    /// A login made it, and logging out revokes it.
    Generated,
}

impl CredentialStore {
    /// Reads the store of the user that `env` belongs to. A file that is not there is an empty one.
    ///
    /// # Errors
    /// If the file cannot be read or is of a form that this version does not know.
    pub fn load(env: &Env) -> Result<Self, Error> {
        let home = env.home().unwrap_or_default();
        Self::load_from(&home.join(".tinker").join("credentials.json"))
    }

    /// Reads a store.
    ///
    /// # Errors
    /// If the file cannot be read or is of a form that this version does not know.
    pub fn load_from(path: &Path) -> Result<Self, Error> {
        let wrong = |why: String| {
            let what = format!("the credentials in {}", path.display());
            Error::new(ErrorKind::Config, format!("{what} cannot be used: {why}"))
                .with_hint("mend or remove the file, then log in again")
        };
        let (file, rest) = match std::fs::read(path) {
            Ok(text) => {
                // The parser's own message might quote the key.
                let file: File = tinkex_wire::codec::json::decode(&text)
                    .map_err(|why| wrong(format!("{:?} is not as expected", why.path())))?;
                file.check().map_err(|why| wrong(why.to_owned()))?;
                let rest = Rest::of(&file, &text);
                (file, rest)
            }
            Err(why) if why.kind() == std::io::ErrorKind::NotFound => {
                let file = File { version: version_one(), default: None, keys: BTreeMap::new() };
                (file, Rest::default())
            }
            Err(why) => return Err(wrong(why.to_string())),
        };
        Ok(Self { path: path.to_owned(), file, rest })
    }

    /// The key that is used when none is named.
    #[must_use]
    pub fn default_key(&self) -> Option<&StoredKey> {
        self.file.keys.get(self.file.default.as_ref()?)
    }

    /// The id of that key.
    #[must_use]
    pub fn default_id(&self) -> Option<&str> {
        self.file.default.as_deref().filter(|id| self.file.keys.contains_key(*id))
    }

    /// All keys with their ids.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = (&str, &StoredKey)> {
        self.file.keys.iter().map(|(id, key)| (id.as_str(), key))
    }

    /// Adds a key, or replaces the one of that id, and makes it the default.
    pub fn insert(&mut self, id: impl Into<String>, key: StoredKey) {
        let id = id.into();
        self.file.default = Some(id.clone());
        if self.file.keys.get(&id).is_none_or(|before| before.key != key.key) {
            self.rest.forget(&id);
        }
        self.file.keys.insert(id, key);
    }

    /// Removes a key; if it was the default, there is none any more.
    pub fn remove(&mut self, id: &str) -> Option<StoredKey> {
        if self.file.default.as_deref() == Some(id) {
            self.file.default = None;
        }
        self.rest.forget(id);
        self.file.keys.remove(id)
    }

    /// Writes the store: to a file beside it that only its owner may read, then in one move.
    ///
    /// # Errors
    /// If the folder or file cannot be written; the old file is then untouched.
    pub fn save(&self) -> Result<(), Error> {
        let failed = |why: std::io::Error| {
            let what = format!("{} cannot be written", self.path.display());
            Error::new(ErrorKind::Config, what).with_source(why)
        };
        let folder = self.path.parent().unwrap_or(Path::new("."));
        tinkex_files::create_private_folder(folder).map_err(failed)?;
        let text = match self.rest.0.is_empty() {
            // As the Python tools write it, down to the order of the fields.
            true => serde_json::to_vec_pretty(&self.file),
            false => serde_json::to_value(&self.file)
                .and_then(|file| serde_json::to_vec_pretty(&with(file, &self.rest.0))),
        };
        let text = text.map_err(|why| failed(std::io::Error::other(why)))?;
        AtomicWrite::new(&self.path).owner_only().write(text).map_err(failed)
    }
}

impl Rest {
    /// What the text has that this version knows nothing of.
    fn of(file: &File, text: &[u8]) -> Self {
        let known = serde_json::to_value(file).unwrap_or_default();
        match serde_json::from_slice(text).map(|all| beyond(&known, all)) {
            Ok(Some(Value::Object(rest))) => Self(rest),
            _ => Self::default(),
        }
    }

    /// A key is gone, and with it what belonged to it.
    fn forget(&mut self, id: &str) {
        if let Some(Value::Object(keys)) = self.0.get_mut("keys") {
            keys.remove(id);
        }
    }
}

/// What is in `all` and not in `known`.
fn beyond(known: &Value, all: Value) -> Option<Value> {
    let (Value::Object(known), Value::Object(all)) = (known, all) else { return None };
    let more = all.into_iter().filter_map(|(name, value)| match known.get(&name) {
        Some(known) => Some((name, beyond(known, value)?)),
        None => Some((name, value)),
    });
    let more: Map<_, _> = more.collect();
    (!more.is_empty()).then_some(Value::Object(more))
}

/// A value with what it lacks of `more`.
fn with(mut value: Value, more: &Map<String, Value>) -> Value {
    if let Value::Object(fields) = &mut value {
        for (name, more) in more {
            let field = match (fields.get_mut(name).map(Value::take), more) {
                (Some(field), Value::Object(more)) => with(field, more),
                (Some(field), _) => field,
                (None, more) => more.clone(),
            };
            fields.insert(name.clone(), field);
        }
    }
    value
}

impl File {
    fn check(&self) -> Result<(), &'static str> {
        if self.version != version_one() {
            return Err("the file is of another version");
        }
        let lacks = |key: &StoredKey| key.kind == StoredKeyKind::Generated && key.details.is_none();
        if self.keys.values().any(lacks) {
            return Err("a generated key lacks its details");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn store(text: &str) -> (tempfile::TempDir, Result<CredentialStore, Error>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credentials.json");
        std::fs::write(&path, text).unwrap();
        let store = CredentialStore::load_from(&path);
        (folder, store)
    }

    #[test]
    fn files_of_the_python_tools_are_read() {
        for case in fixture::cases("credentials_file.json") {
            let (_folder, store) = store(case["raw"].as_str().unwrap());
            match case["error"].as_str() {
                Some(_) => assert!(store.is_err(), "{case}"),
                None => {
                    let store = store.unwrap();
                    let key = store.default_key().map(|key| key.key.expose());
                    assert_eq!(key, case["default_key"].as_str(), "{case}");
                }
            }
        }
    }

    #[test]
    fn a_file_that_is_not_there_is_empty() {
        let env = Env::from_pairs([("HOME", "/nonexistent/of/nobody")]);
        assert_eq!(CredentialStore::load(&env).unwrap().keys().len(), 0);
    }

    #[test]
    fn what_is_saved_is_the_file_of_the_python_tools() {
        let text = fixture::load("credentials_file.json")["example_file_text"].clone();
        let text = text.as_str().unwrap();
        let (_folder, store) = store(text);
        let mut store = store.unwrap();
        store.save().unwrap();
        assert_eq!(std::fs::read_to_string(&store.path).unwrap(), text);

        let key = store.remove("k1").unwrap();
        assert_eq!(store.default_key(), None, "the default went with it");
        store.insert("k3", key);
        store.save().unwrap();
        let again = CredentialStore::load_from(&store.path).unwrap();
        assert_eq!(again, store);
        assert_eq!(again.default_key().unwrap().key.expose(), "tml-1");
    }

    #[test]
    fn what_others_keep_in_the_file_stays() {
        let key = |note: &str| {
            serde_json::json!({ "type": "manual", "key": "tml-1", "name": "n", "note": note,
                "details": { "org_details": { "name": "o", "plan": "p" },
                    "user_details": { "email": "e" } },
                "refresh": { "token": "hidden" } })
        };
        let text = serde_json::json!({ "version": 1, "default": "1", "theirs": [1, null],
            "keys": { "1": key("a"), "2": key("b"), "3": key("c") } });
        let (_folder, store) = store(&text.to_string());
        let mut store = store.unwrap();
        let second = store.keys().nth(1).unwrap().1.clone();
        store.insert("2", second);
        store.remove("3");
        store.save().unwrap();
        let written: Value = serde_json::from_slice(&std::fs::read(&store.path).unwrap()).unwrap();
        let mut expected = text;
        expected["default"] = "2".into();
        expected["keys"].as_object_mut().unwrap().remove("3");
        assert_eq!(written, expected);
        let shown = format!("{store:?}");
        assert!(shown.contains("theirs") && !shown.contains("hidden"), "{shown}");
    }

    #[cfg(unix)]
    #[test]
    fn only_the_owner_may_read_it() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new").join("credentials.json");
        CredentialStore::load_from(&path).unwrap().save().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let left = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "nothing is left beside it");
    }

    #[test]
    fn errors_do_not_quote_the_file() {
        let (_folder, store) = store(r#"{"version":1,"keys":{"a":"tml-hidden"}}"#);
        let error = store.unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hidden"), "{error}");
    }
}
