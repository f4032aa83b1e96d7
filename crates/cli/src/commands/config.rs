//! ConfigCommand that stay.

use clap::Subcommand;
use serde_json::{Map, Value, json};

use crate::config::{ConfigFile, KEYS};
use crate::error::{CommandError, Exit};
use crate::output::Shell;
use crate::table::Table;

/// ConfigCommand that stay, in one file, by profile
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Where the file is
    #[command(after_help = "Example:
  $EDITOR $(tinkex config path)")]
    Path,
    /// Show one setting
    #[command(after_help = "Examples:
  tinkex config get base_url
  tinkex config get retry_for --profile work")]
    Get {
        /// Its name
        key: String,
    },
    /// Set one; --profile says in which profile, which is made if it is not there
    #[command(after_help = format!("Examples:
  tinkex config set --profile work base_url http://localhost:8000
  tinkex config set profile work        from now on, that one counts
  tinkex config set retry_for 5m

ConfigCommand:\n{}", settings()))]
    Set {
        /// Its name
        key: String,
        /// What it should be
        value: String,
    },
    /// Remove one
    #[command(after_help = "Example:
  tinkex config unset retry_for")]
    Unset {
        /// Its name
        key: String,
    },
    /// Show all profiles
    #[command(after_help = "Example:
  tinkex config list")]
    List,
}

fn settings() -> String {
    let all = KEYS.iter().chain(&[("profile", "which profile counts when none is named")]);
    all.map(|(key, what)| format!("  {key:<12}{what}")).collect::<Vec<_>>().join("\n")
}

/// Works with the file as it is: a profile that is broken or not there yet must not stand in the
/// way of mending or making it.
pub(super) fn run(shell: &mut Shell<'_>, command: ConfigCommand) -> Result<(), CommandError> {
    let env = shell.environment.variables.clone();
    let path = ConfigFile::path(&env).display().to_string();
    if matches!(command, ConfigCommand::Path) {
        return shell.text(&path, &json!({ "path": path }));
    }
    let mut config = ConfigFile::load(&env)?;
    let named = shell.globals.profile.as_deref().or(env.get("TINKEX_PROFILE"));
    let profile = config.chosen(named);
    match command {
        ConfigCommand::Path => Ok(()),
        ConfigCommand::Get { key } => {
            let Some(value) = config.get(&profile, &key) else {
                let why = format!("{key} is not set in the profile {profile:?}");
                return Err(CommandError::new(Exit::NotFound, why));
            };
            shell.text(&value, &json!({ "profile": profile, "key": key, "value": value }))
        }
        ConfigCommand::Set { key, value } => {
            config.set(&profile, &key, &value)?;
            config.save()?;
            let done = json!({ "profile": profile, "key": key, "value": value, "path": path });
            shell.done(&format!("{key} = {value} in {path}"), &done)
        }
        ConfigCommand::Unset { key } => {
            let was_set = config.unset(&profile, &key);
            if !was_set {
                let why = format!("{key} is not set in the profile {profile:?}");
                return Err(CommandError::new(Exit::NotFound, why));
            }
            config.save()?;
            let done = json!({ "profile": profile, "key": key, "value": null, "path": path });
            shell.done(&format!("{key} removed from {path}"), &done)
        }
        ConfigCommand::List => {
            let mut table = Table::new(["Profile", "Setting", "Value"]);
            let mut profiles = Map::new();
            for (name, key, value) in config.list() {
                let entry = profiles.entry(name.clone()).or_insert_with(|| json!({}));
                entry[key.as_str()] = Value::String(value.clone());
                table.row([name, key, value]);
            }
            let chosen = config.get(&profile, "profile");
            shell.table(&table, &json!({ "profile": chosen, "profiles": profiles, "path": path }))
        }
    }
}
