//! `tinkex config`: shows and changes the configuration file.

use clap::Subcommand;
use serde_json::{Map, Value, json};

use crate::config::{ConfigFile, KEYS};
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::table::Table;

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print the path of the configuration file
    #[command(after_help = "Example:
  $EDITOR $(tinkex config path)")]
    Path,
    /// Print a setting
    #[command(after_help = "Examples:
  tinkex config get base_url
  tinkex config get retry_for --profile work")]
    Get {
        /// Name of the setting
        key: String,
    },
    /// Change a setting of the default profile or of --profile, creating the profile if needed
    #[command(after_help = format!("Examples:
  tinkex config set --profile work base_url http://localhost:8000
  tinkex config set profile work        make it the default profile
  tinkex config set retry_for 5m

Settings:\n{}", setting_list()))]
    Set {
        /// Name of the setting
        key: String,
        /// New value
        value: String,
    },
    /// Remove a setting
    #[command(after_help = "Example:
  tinkex config unset retry_for")]
    Unset {
        /// Name of the setting
        key: String,
    },
    /// List the settings of all profiles
    #[command(after_help = "Example:
  tinkex config list")]
    List,
}

fn setting_list() -> String {
    let all = KEYS.iter().chain(&[("profile", "default profile")]);
    all.map(|(key, description)| format!("  {key:<12}{description}")).collect::<Vec<_>>().join("\n")
}

/// Uses the file without validating the profile, so that an invalid profile can be repaired and a
/// missing one created.
pub(super) fn run(
    context: &mut CommandContext<'_>,
    command: ConfigCommand,
) -> Result<(), CommandError> {
    let env = context.environment.variables.clone();
    let path = ConfigFile::path(&env).display().to_string();
    if matches!(command, ConfigCommand::Path) {
        return context.text(&path, &json!({ "path": path }));
    }
    let mut config = ConfigFile::load(&env)?;
    let named = context.globals.profile.as_deref().or(env.get("TINKEX_PROFILE"));
    let profile = config.profile_name(named);
    match command {
        ConfigCommand::Path => Ok(()),
        ConfigCommand::Get { key } => {
            let Some(value) = config.get(&profile, &key) else {
                let message = format!("{key} is not set in profile {profile:?}");
                return Err(CommandError::new(Exit::NotFound, message));
            };
            context.text(&value, &json!({ "profile": profile, "key": key, "value": value }))
        }
        ConfigCommand::Set { key, value } => {
            config.set(&profile, &key, &value)?;
            config.save()?;
            let done = json!({ "profile": profile, "key": key, "value": value, "path": path });
            context.confirm_change(&format!("set {key} = {value} in {path}"), &done)
        }
        ConfigCommand::Unset { key } => {
            let was_set = config.unset(&profile, &key);
            if !was_set {
                let message = format!("{key} is not set in profile {profile:?}");
                return Err(CommandError::new(Exit::NotFound, message));
            }
            config.save()?;
            let done = json!({ "profile": profile, "key": key, "value": null, "path": path });
            context.confirm_change(&format!("removed {key} from {path}"), &done)
        }
        ConfigCommand::List => {
            let mut table = Table::new(["Profile", "Setting", "Value"]);
            let mut profiles = Map::new();
            for (name, key, value) in config.list() {
                let entry = profiles.entry(name.clone()).or_insert_with(|| json!({}));
                entry[key.as_str()] = Value::String(value.clone());
                table.row([name, key, value]);
            }
            let default = config.get(&profile, "profile");
            context
                .table(&table, &json!({ "profile": default, "profiles": profiles, "path": path }))
        }
    }
}
