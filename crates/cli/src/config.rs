//! [`ConfigFile`]: settings that stay, in one file, by profile.
//!
//! ```toml
//! profile = "work"            # which one counts when none is named
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

use crate::args::{ColorChoice, Format, duration};
use crate::error::{CommandError, Exit};

/// The profile that counts when nobody names another.
const USUAL: &str = "default";

/// What can be set, and what it means.
pub(crate) const KEYS: [(&str, &str); 8] = [
    ("base_url", "the server"),
    ("local", "whether the server is the one on this machine: true or false"),
    ("project_id", "the project that new things belong to"),
    ("key_id", "which stored key, see `tinkex auth list`"),
    ("format", "how results are written: table, json, csv or plain"),
    ("color", "when to use colours: auto, always or never"),
    ("timeout", "how long one request may take"),
    ("retry_for", "how long to go on after failures that pass"),
];

/// The file as it stands, comments included.
#[derive(Debug)]
pub(crate) struct ConfigFile {
    path: PathBuf,
    file: DocumentMut,
}

/// What a profile says.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    pub(crate) base_url: Option<BaseUrl>,
    pub(crate) local: Option<bool>,
    pub(crate) project_id: Option<String>,
    pub(crate) key_id: Option<String>,
    pub(crate) format: Option<Format>,
    pub(crate) color: Option<ColorChoice>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) retry_for: Option<Duration>,
}

impl ConfigFile {
    /// Where the file is, whether or not it is there yet.
    pub(crate) fn path(env: &Env) -> PathBuf {
        if let Some(path) = env.get("TINKEX_CONFIG") {
            return path.into();
        }
        folder(env, "XDG_CONFIG_HOME", ".config").join("config.toml")
    }

    /// Reads the file; one that is not there says nothing.
    pub(crate) fn load(env: &Env) -> Result<Self, CommandError> {
        let path = Self::path(env);
        let shown = path.display().to_string();
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(why) if why.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(why) => return Err(CommandError::file("read", &shown, &why)),
        };
        let file = text.parse().map_err(|why: toml_edit::TomlError| {
            CommandError::new(Exit::Usage, format!("{shown} is not valid: {}", why.message()))
                .hint("mend the file; `tinkex config path` tells where it is")
        })?;
        Ok(Self { path, file })
    }

    /// The profile that counts when none is named on the command line or in the environment.
    pub(crate) fn usual_profile(&self) -> Result<Profile, CommandError> {
        let name = self.usual_name();
        match self.table(name) {
            None if name == USUAL => Ok(Profile::default()),
            _ => self.profile(name),
        }
    }

    fn usual_name(&self) -> &str {
        self.file.get("profile").and_then(Item::as_str).unwrap_or(USUAL)
    }

    /// A profile by its name.
    pub(crate) fn profile(&self, name: &str) -> Result<Profile, CommandError> {
        let Some(table) = self.table(name) else {
            let path = self.path.display();
            return Err(CommandError::usage(format!("there is no profile {name:?} in {path}"))
                .hint(format!("`tinkex config set --profile {name} base_url URL` makes one")));
        };
        let mut profile = Profile::default();
        for (key, item) in table {
            let text = text(item);
            profile.take(key, &text).map_err(|why| {
                let place = format!("{}, profile {name:?}", self.path.display());
                CommandError::usage(format!("{place}: {key} = {text:?} {why}"))
                    .hint(format!("`tinkex config set --profile {name} {key} VALUE` mends it"))
            })?;
        }
        Ok(profile)
    }

    fn table(&self, name: &str) -> Option<&Table> {
        self.file.get("profiles")?.as_table()?.get(name)?.as_table()
    }

    /// All there is: profile, key, value. The profile that counts is told by `profile` itself.
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

    /// The name of the profile that is read and written: the one named, or the one that counts.
    pub(crate) fn chosen(&self, named: Option<&str>) -> String {
        named.unwrap_or_else(|| self.usual_name()).to_owned()
    }

    /// One value, of a profile or, for `profile`, of the file.
    pub(crate) fn get(&self, profile: &str, key: &str) -> Option<String> {
        match key {
            "profile" => self.file.get("profile").map(text),
            _ => self.table(profile)?.get(key).map(text),
        }
    }

    /// Sets a value, if it makes sense. Nothing is written yet.
    pub(crate) fn set(&mut self, profile: &str, key: &str, to: &str) -> Result<(), CommandError> {
        if key == "profile" {
            self.profile(to)?;
            self.file["profile"] = value(to);
            return Ok(());
        }
        Profile::default()
            .take(key, to)
            .map_err(|why| CommandError::usage(format!("{key} = {to:?} {why}")))?;
        let profiles = self.file.entry("profiles").or_insert_with(|| {
            let mut profiles = Table::new();
            profiles.set_implicit(true);
            profiles.into()
        });
        let broken = || CommandError::usage("the configuration file's profiles are no tables");
        let profiles = profiles.as_table_mut().ok_or_else(broken)?;
        let profile = profiles.entry(profile).or_insert_with(|| Table::new().into());
        profile.as_table_mut().ok_or_else(broken)?.insert(key, value(to));
        Ok(())
    }

    /// Removes a value, and says whether there was one. Nothing is written yet.
    pub(crate) fn unset(&mut self, profile: &str, key: &str) -> bool {
        if key == "profile" {
            return self.file.remove("profile").is_some();
        }
        let profiles = self.file.get_mut("profiles").and_then(Item::as_table_mut);
        let table = profiles.and_then(|profiles| profiles.get_mut(profile)?.as_table_mut());
        table.is_some_and(|table| table.remove(key).is_some())
    }

    /// Writes the file, whole or not at all.
    pub(crate) fn save(&self) -> Result<(), CommandError> {
        AtomicWrite::new(&self.path)
            .create_folders()
            .write(self.file.to_string())
            .map_err(|why| CommandError::file("written", &self.path.display().to_string(), &why))
    }
}

impl Profile {
    /// Takes a value in, or says what is wrong with it.
    fn take(&mut self, key: &str, text: &str) -> Result<(), String> {
        match key {
            "base_url" => {
                let wrong = |_| "is not an address such as http://localhost:8000".to_owned();
                self.base_url = Some(text.parse().map_err(wrong)?);
            }
            "local" => {
                self.local =
                    Some(text.parse().map_err(|_| "is neither true nor false".to_owned())?);
            }
            "project_id" => self.project_id = Some(text.to_owned()),
            "key_id" => self.key_id = Some(text.to_owned()),
            "format" => self.format = Some(word(text)?),
            "color" => self.color = Some(word(text)?),
            "timeout" => self.timeout = Some(duration(text)?),
            "retry_for" => self.retry_for = Some(duration(text)?),
            _ => {
                let all: Vec<_> = KEYS.iter().map(|(key, _)| *key).collect();
                return Err(format!("is no setting; there are {}, profile", all.join(", ")));
            }
        }
        Ok(())
    }
}

fn word<T: ValueEnum>(text: &str) -> Result<T, String> {
    T::from_str(text, true).map_err(|_| {
        let all = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let all: Vec<_> = all.map(|value| value.get_name().to_owned()).collect();
        format!("is none of {}", all.join(", "))
    })
}

/// A value as it was meant, whatever its type in the file.
fn text(item: &Item) -> String {
    item.as_str().map_or_else(|| item.to_string().trim().to_owned(), str::to_owned)
}

/// The program's folder for files of one kind.
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
    fn comments_and_strangers_stay_when_a_value_is_set() {
        let text = "# mine\nprofile = \"work\"\n\n[profiles.work] # office\nformat = \"json\"\n";
        let (folder, config) = config(text);
        let mut config = config.unwrap();
        assert_eq!(config.usual_profile().unwrap().format, Some(Format::Json));
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
    fn nonsense_is_refused_with_its_place() {
        let (_folder, broken) = config("profile = ");
        assert!(broken.is_err());
        let (_folder, wrong) = config("[profiles.default]\ntimeout = \"soon\"\n");
        let said = format!("{:?}", wrong.unwrap().usual_profile().unwrap_err());
        assert!(said.contains("timeout") && said.contains("soon"), "{said}");
        let (_folder, config) = config("");
        let mut config = config.unwrap();
        for (key, value) in [("format", "xml"), ("nope", "1"), ("profile", "x"), ("timeout", "-1")]
        {
            assert!(config.set("default", key, value).is_err(), "{key}");
        }
        assert!(config.profile("gone").is_err());
    }
}
