//! [`CredentialStore`]: the file of stored API keys, shared with the Python tools.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tinkex_files::AtomicWrite;
use tinkex_wire::{ApiKeyDetails, Secret};

use crate::error::{Error, ErrorKind};

use super::Env;

/// Stored API keys, in `~/.tinker/credentials.json`.
///
/// Fields that this version does not know are kept when the file is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialStore {
    path: PathBuf,
    file: CredentialFile,
    unknown: UnknownFields,
}

/// Fields of the file that this version does not know.
#[derive(Clone, Default, PartialEq, Eq)]
struct UnknownFields(Map<String, Value>);

impl fmt::Debug for UnknownFields {
    /// Shows the names of the fields; their values may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// Known fields of the credential file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CredentialFile {
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

/// A stored API key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredKey {
    /// Origin of the key.
    #[serde(rename = "type")]
    pub kind: StoredKeyKind,
    /// The key.
    pub key: Secret,
    /// Name of the key.
    pub name: String,
    /// Note that the user attached to the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Owner of the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<ApiKeyDetails>,
}

/// Origin of a stored key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoredKeyKind {
    /// Entered by the user.
    Manual,
    /// Created by a login; logging out revokes it.
    Generated,
}

impl CredentialStore {
    /// Reads the store in the home folder of the user, which `env` contains. A missing file is an
    /// empty store.
    ///
    /// # Errors
    /// If the file cannot be read or has an unknown format.
    pub fn load(env: &Env) -> Result<Self, Error> {
        let home = env.home().unwrap_or_default();
        Self::load_from(&home.join(".tinker").join("credentials.json"))
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the store at `path`. A missing file is an empty store.
    ///
    /// # Errors
    /// If the file cannot be read or has an unknown format.
    pub fn load_from(path: &Path) -> Result<Self, Error> {
        let failed = |cause: String| {
            let message = format!("cannot read credentials from {}: {cause}", path.display());
            Error::new(ErrorKind::Config, message)
                .with_hint("Fix or remove the file, then log in again.")
        };
        let (file, unknown) = match std::fs::read(path) {
            Ok(text) => {
                // Do not use the parser's message, which might quote the key.
                let file: CredentialFile =
                    tinkex_wire::codec::json::decode(&text).map_err(|error| {
                        failed(match error.path() {
                            "" => "the file is not a JSON object of this format".to_owned(),
                            path => format!("unexpected value at {path:?}"),
                        })
                    })?;
                file.check().map_err(|cause| failed(cause.to_owned()))?;
                let unknown = UnknownFields::of(&file, &text);
                (file, unknown)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let file =
                    CredentialFile { version: version_one(), default: None, keys: BTreeMap::new() };
                (file, UnknownFields::default())
            }
            Err(error) => return Err(failed(error.to_string())),
        };
        Ok(Self { path: path.to_owned(), file, unknown })
    }

    /// Returns the default key.
    #[must_use]
    pub fn default_key(&self) -> Option<&StoredKey> {
        self.file.keys.get(self.file.default.as_ref()?)
    }

    /// Returns the id of the default key.
    #[must_use]
    pub fn default_id(&self) -> Option<&str> {
        self.file.default.as_deref().filter(|id| self.file.keys.contains_key(*id))
    }

    /// Returns all keys with their ids, sorted by id.
    pub fn keys(&self) -> impl Iterator<Item = (&str, &StoredKey)> + ExactSizeIterator {
        self.file.keys.iter().map(|(id, key)| (id.as_str(), key))
    }

    /// Adds a key or replaces the key with this id, and makes it the default.
    pub fn insert(&mut self, id: impl Into<String>, key: StoredKey) {
        let id = id.into();
        self.file.default = Some(id.clone());
        if self.file.keys.get(&id).is_none_or(|before| before.key != key.key) {
            self.unknown.remove_key(&id);
        }
        self.file.keys.insert(id, key);
    }

    /// Removes a key. If it was the default, the store has no default afterwards.
    pub fn remove(&mut self, id: &str) -> Option<StoredKey> {
        if self.file.default.as_deref() == Some(id) {
            self.file.default = None;
        }
        self.unknown.remove_key(id);
        self.file.keys.remove(id)
    }

    /// Writes the store atomically, readable by its owner only.
    ///
    /// # Errors
    /// If the folder or file cannot be written. The old file is unchanged then.
    pub fn save(&self) -> Result<(), Error> {
        let failed = |error: std::io::Error| {
            let message = format!("cannot write credentials to {}: {error}", self.path.display());
            Error::new(ErrorKind::Io, message).with_source(error)
        };
        let folder = self.path.parent().unwrap_or(Path::new("."));
        tinkex_files::create_private_folder(folder).map_err(failed)?;
        let text = if self.unknown.0.is_empty() {
            // Write the same bytes as the Python tools, with the same order of fields.
            serde_json::to_vec_pretty(&self.file)
        } else {
            serde_json::to_value(&self.file)
                .and_then(|file| serde_json::to_vec_pretty(&merge(file, &self.unknown.0)))
        };
        let text = text.map_err(|error| failed(std::io::Error::other(error)))?;
        AtomicWrite::new(&self.path).owner_only().write(text).map_err(failed)
    }
}

impl UnknownFields {
    /// Returns the fields of `text` that are not in `file`.
    fn of(file: &CredentialFile, text: &[u8]) -> Self {
        let known = serde_json::to_value(file).unwrap_or_default();
        match serde_json::from_slice(text).map(|all| difference(&known, all)) {
            Ok(Some(Value::Object(unknown))) => Self(unknown),
            _ => Self::default(),
        }
    }

    /// Removes the unknown fields of a key.
    fn remove_key(&mut self, id: &str) {
        if let Some(Value::Object(keys)) = self.0.get_mut("keys") {
            keys.remove(id);
        }
    }
}

/// Returns the fields of `all` that are not in `known`, recursively.
fn difference(known: &Value, all: Value) -> Option<Value> {
    let (Value::Object(known), Value::Object(all)) = (known, all) else { return None };
    let unknown = all.into_iter().filter_map(|(name, value)| match known.get(&name) {
        Some(known) => Some((name, difference(known, value)?)),
        None => Some((name, value)),
    });
    let unknown: Map<_, _> = unknown.collect();
    (!unknown.is_empty()).then_some(Value::Object(unknown))
}

/// Adds the fields of `more` that `value` lacks, recursively.
fn merge(mut value: Value, more: &Map<String, Value>) -> Value {
    if let Value::Object(fields) = &mut value {
        for (name, more) in more {
            let field = match (fields.get_mut(name).map(Value::take), more) {
                (Some(field), Value::Object(more)) => merge(field, more),
                (Some(field), _) => field,
                (None, more) => more.clone(),
            };
            fields.insert(name.clone(), field);
        }
    }
    value
}

impl CredentialFile {
    /// Checks the rules that the types do not enforce. The error is the reason why the file is
    /// invalid.
    fn check(&self) -> Result<(), &'static str> {
        if self.version != version_one() {
            return Err("unsupported version");
        }
        let lacks = |key: &StoredKey| key.kind == StoredKeyKind::Generated && key.details.is_none();
        if self.keys.values().any(lacks) {
            return Err("a generated key has no details");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    /// Writes `text` to a credential file and loads it.
    fn store(text: &str) -> (tempfile::TempDir, Result<CredentialStore, Error>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credentials.json");
        std::fs::write(&path, text).unwrap();
        let store = CredentialStore::load_from(&path);
        (folder, store)
    }

    #[test]
    fn files_written_by_the_python_tools_are_read() {
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
    fn a_missing_file_is_an_empty_store() {
        let env = Env::from_pairs([("HOME", "/nonexistent")]);
        assert_eq!(CredentialStore::load(&env).unwrap().keys().len(), 0);
    }

    #[test]
    fn the_file_is_written_as_the_python_tools_do() {
        let text = fixture::load("credentials_file.json")["example_file_text"].clone();
        let text = text.as_str().unwrap();
        let (_folder, store) = store(text);
        let mut store = store.unwrap();
        store.save().unwrap();
        assert_eq!(std::fs::read_to_string(&store.path).unwrap(), text);

        let key = store.remove("k1").unwrap();
        assert_eq!(store.default_key(), None, "the default was removed");
        store.insert("k3", key);
        store.save().unwrap();
        let again = CredentialStore::load_from(&store.path).unwrap();
        assert_eq!(again, store);
        assert_eq!(again.default_key().unwrap().key.expose(), "tml-1");
    }

    #[test]
    fn unknown_fields_are_kept() {
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
    fn only_the_owner_may_read_the_file() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new").join("credentials.json");
        CredentialStore::load_from(&path).unwrap().save().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let left = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "no temporary file remains");
    }

    #[test]
    fn errors_do_not_quote_the_file() {
        let (_folder, store) = store(r#"{"version":1,"keys":{"a":"tml-hidden"}}"#);
        let error = store.unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hidden"), "{error}");
    }
}
