//! [`ConfigFile`]: the configuration file with its profiles.
//!
//! ```toml
//! profile = "work"            # default profile
//!
//! [profiles.work]
//! base_url = "http://localhost:8000"
//! retry_for = "2m"
//! ```

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use tinkex::{BaseUrl, Env};
use tinkex_files::AtomicWrite;
use toml_edit::{DocumentMut, Item, Table, value};

use crate::args::{ColorChoice, OutputFormat, duration};
use crate::error::{CommandError, Exit};

/// Name of the default profile, unless the file sets another.
const DEFAULT_PROFILE: &str = "default";

/// Names and descriptions of the settings of a profile.
pub(crate) const KEYS: [(&str, &str); 8] = [
    ("base_url", "base URL of the API"),
    ("local", "use the server on this machine: true or false"),
    ("project_id", "project to create resources in"),
    ("key_id", "stored API key, see `tinkex auth list`"),
    ("format", "output format: table, json, csv or plain"),
    ("color", "use colors: auto, always or never"),
    ("timeout", "timeout of one request"),
    ("retry_for", "time to retry temporary failures for"),
];

/// Contents of the configuration file. Changes preserve comments and unknown keys.
#[derive(Debug)]
pub(crate) struct ConfigFile {
    path: PathBuf,
    file: DocumentMut,
}

/// Settings of a profile.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    pub(crate) base_url: Option<BaseUrl>,
    pub(crate) local: Option<bool>,
    pub(crate) project_id: Option<String>,
    pub(crate) key_id: Option<String>,
    pub(crate) format: Option<OutputFormat>,
    pub(crate) color: Option<ColorChoice>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) retry_for: Option<Duration>,
}

impl ConfigFile {
    /// Returns the path of the file, which may not exist yet.
    pub(crate) fn path(env: &Env) -> PathBuf {
        if let Some(path) = env.get("TINKEX_CONFIG") {
            return path.into();
        }
        folder(env, "XDG_CONFIG_HOME", ".config").join("config.toml")
    }

    /// Reads the file. A missing file counts as empty.
    pub(crate) fn load(env: &Env) -> Result<Self, CommandError> {
        let path = Self::path(env);
        let shown = path.display().to_string();
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(CommandError::file("read", &shown, &error)),
        };
        let file = text.parse().map_err(|error: toml_edit::TomlError| {
            CommandError::new(
                Exit::Usage,
                format!("cannot parse configuration file {shown}: {}", error.message()),
            )
            .hint("Correct the file; it must be valid TOML.")
        })?;
        Ok(Self { path, file })
    }

    /// Returns the profile that is used without `--profile` and `TINKEX_PROFILE`.
    pub(crate) fn default_profile(&self) -> Result<Profile, CommandError> {
        let name = self.default_name();
        match self.table(name) {
            None if name == DEFAULT_PROFILE => Ok(Profile::default()),
            _ => self.profile(name),
        }
    }

    fn default_name(&self) -> &str {
        self.file.get("profile").and_then(Item::as_str).unwrap_or(DEFAULT_PROFILE)
    }

    /// Returns the profile with this name.
    pub(crate) fn profile(&self, name: &str) -> Result<Profile, CommandError> {
        let Some(table) = self.table(name) else {
            let path = self.path.display();
            return Err(CommandError::usage(format!("unknown profile {name:?} in {path}")).hint(
                format!("Create it with `tinkex config set --profile {name} base_url URL`."),
            ));
        };
        let mut profile = Profile::default();
        for (key, item) in table {
            let text = text(item);
            profile.assign(key, &text).map_err(|error| {
                let path = self.path.display();
                CommandError::usage(format!("invalid profile {name:?} in {path}: {error}")).hint(
                    format!("Correct it with `tinkex config set --profile {name} {key} VALUE`."),
                )
            })?;
        }
        Ok(profile)
    }

    fn table(&self, name: &str) -> Option<&Table> {
        self.file.get("profiles")?.as_table()?.get(name)?.as_table()
    }

    /// Returns all settings as profile, key and value.
    pub(crate) fn list(&self) -> Vec<(String, String, String)> {
        let mut all = Vec::new();
        for (name, profile) in
            self.file.get("profiles").and_then(Item::as_table).into_iter().flatten()
        {
            for (key, item) in profile.as_table().into_iter().flatten() {
                all.push((name.to_owned(), key.to_owned(), text(item)));
            }
        }
        all
    }

    /// Returns `named`, or the name of the default profile.
    pub(crate) fn profile_name(&self, named: Option<&str>) -> String {
        named.unwrap_or_else(|| self.default_name()).to_owned()
    }

    /// Returns a setting of a profile or, for the key `profile`, the name of the default profile.
    pub(crate) fn get(&self, profile: &str, key: &str) -> Option<String> {
        match key {
            "profile" => self.file.get("profile").map(text),
            _ => self.table(profile)?.get(key).map(text),
        }
    }

    /// Validates and sets a value in memory. Call [`save`](Self::save) to write the file.
    pub(crate) fn set(&mut self, profile: &str, key: &str, to: &str) -> Result<(), CommandError> {
        if key == "profile" {
            self.profile(to)?;
            self.file["profile"] = value(to);
            return Ok(());
        }
        Profile::default().assign(key, to).map_err(CommandError::usage)?;
        let profiles = self.file.entry("profiles").or_insert_with(|| {
            let mut profiles = Table::new();
            profiles.set_implicit(true);
            profiles.into()
        });
        let path = self.path.display();
        let broken = || {
            let message = format!("invalid configuration file {path}: `profiles` must hold tables");
            CommandError::usage(message)
                .hint("Correct the file: write each profile as a table, `[profiles.NAME]`.")
        };
        let profiles = profiles.as_table_mut().ok_or_else(broken)?;
        let profile = profiles.entry(profile).or_insert_with(|| Table::new().into());
        profile.as_table_mut().ok_or_else(broken)?.insert(key, value(to));
        Ok(())
    }

    /// Removes a value in memory. Returns whether it existed.
    pub(crate) fn unset(&mut self, profile: &str, key: &str) -> bool {
        if key == "profile" {
            return self.file.remove("profile").is_some();
        }
        let profiles = self.file.get_mut("profiles").and_then(Item::as_table_mut);
        let table = profiles.and_then(|profiles| profiles.get_mut(profile)?.as_table_mut());
        table.is_some_and(|table| table.remove(key).is_some())
    }

    /// Replaces the file atomically.
    pub(crate) fn save(&self) -> Result<(), CommandError> {
        AtomicWrite::new(&self.path)
            .create_folders()
            .write(self.file.to_string())
            .map_err(|error| CommandError::file("write", self.path.display(), &error))
    }
}

impl Profile {
    /// Parses and stores a value. The error names the key and the value.
    fn assign(&mut self, key: &str, text: &str) -> Result<(), String> {
        let invalid = |expected: &str| format!("invalid {key} {text:?}: expected {expected}");
        match key {
            "base_url" => {
                let parsed =
                    text.parse().map_err(|_| invalid("a URL such as http://localhost:8000"));
                self.base_url = Some(parsed?);
            }
            "local" => self.local = Some(text.parse().map_err(|_| invalid("true or false"))?),
            "project_id" => self.project_id = Some(text.to_owned()),
            "key_id" => self.key_id = Some(text.to_owned()),
            "format" => self.format = Some(parse_choice(text).map_err(|all| invalid(&all))?),
            "color" => self.color = Some(parse_choice(text).map_err(|all| invalid(&all))?),
            "timeout" | "retry_for" => {
                let parsed = duration(text).map_err(|_| invalid("a duration such as 90s or 5m"))?;
                let field = if key == "timeout" { &mut self.timeout } else { &mut self.retry_for };
                *field = Some(parsed);
            }
            _ => {
                let all: Vec<_> = KEYS.iter().map(|(key, _)| *key).collect();
                let all = all.join(", ");
                return Err(format!("unknown setting `{key}`; expected one of: {all}, profile"));
            }
        }
        Ok(())
    }
}

/// Parses a value of an enum. The error lists all values.
fn parse_choice<T: ValueEnum>(text: &str) -> Result<T, String> {
    T::from_str(text, true).map_err(|_| {
        let all = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let all: Vec<_> = all.map(|value| value.get_name().to_owned()).collect();
        format!("one of: {}", all.join(", "))
    })
}

/// Returns a value of any TOML type as text.
fn text(item: &Item) -> String {
    item.as_str().map_or_else(|| item.to_string().trim().to_owned(), str::to_owned)
}

/// Returns the folder `tinkex` in the folder that `variable` names, or without it in the folder
/// `below_home` of the home folder.
pub(crate) fn folder(env: &Env, variable: &str, below_home: &str) -> PathBuf {
    let base = match env.get(variable) {
        Some(folder) => PathBuf::from(folder),
        None => {
            let home = env.get("HOME").or_else(|| env.get("USERPROFILE")).unwrap_or_default();
            PathBuf::from(home).join(below_home)
        }
    };
    base.join("tinkex")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> (tempfile::TempDir, Result<ConfigFile, CommandError>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        let env = Env::from_pairs([("TINKEX_CONFIG", path.to_str().unwrap())]);
        let config = ConfigFile::load(&env);
        (folder, config)
    }

    #[test]
    fn setting_a_value_keeps_comments_and_other_values() {
        let text = "# mine\nprofile = \"work\"\n\n[profiles.work] # office\nformat = \"json\"\n";
        let (folder, config) = config(text);
        let mut config = config.unwrap();
        assert_eq!(config.default_profile().unwrap().format, Some(OutputFormat::Json));
        config.set("work", "retry_for", "2m").unwrap();
        config.set("home", "base_url", "http://localhost:8000").unwrap();
        config.save().unwrap();
        let written = std::fs::read_to_string(folder.path().join("config.toml")).unwrap();
        assert!(written.starts_with(text.trim_end()), "{written}");
        assert!(written.contains("[profiles.home]\nbase_url = \"http://localhost:8000\"\n"));
        assert!(config.unset("home", "base_url"));
        assert!(!config.unset("home", "base_url"));
    }

    #[test]
    fn invalid_values_are_rejected_with_their_key() {
        let (_folder, broken) = config("profile = ");
        assert!(broken.is_err());
        let (_folder, wrong) = config("[profiles.default]\ntimeout = \"soon\"\n");
        let error = format!("{:?}", wrong.unwrap().default_profile().unwrap_err());
        assert!(error.contains("timeout") && error.contains("soon"), "{error}");
        let (_folder, config) = config("");
        let mut config = config.unwrap();
        for (key, value) in [("format", "xml"), ("nope", "1"), ("profile", "x"), ("timeout", "-1")]
        {
            assert!(config.set("default", key, value).is_err(), "{key}");
        }
        assert!(config.profile("gone").is_err());
    }
}
