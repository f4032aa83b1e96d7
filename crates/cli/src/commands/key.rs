//! `tinkex key`: API keys of a server.

use std::time::Duration;

use clap::Subcommand;
use serde_json::json;
use tinkex::rest::{CreateKey, KeyCreated, KeyInfo, KeyRole, UserLimits};

use crate::args::duration;
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::list::{self, ListColumn, SortKey, ViewArgs};

use super::user::limits;

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Create an API key, which is shown once
    #[command(
        after_help = "Runs, checkpoints, sessions and samples belong to the user of the key. A user may have several keys.
The server stores a digest of the key and cannot show it again.

Roles: admin  sees and changes the objects of all users, and manages keys
       user   sees and changes the objects of its user
       read   sees the objects of its user

Examples:
  tinkex key create alice
  tinkex key create alice-ci --user alice --role read --expires 30d
  tinkex key create bob --limit samples=16,tokens-per-day=1000000,bytes=5GB"
    )]
    Create {
        /// Name of the key
        name: String,
        /// User of the key [default: the name of the key]
        #[arg(long, value_name = "USER")]
        user: Option<String>,
        /// Level of access: admin, user or read
        #[arg(long, value_name = "ROLE", value_parser = role, default_value = "user")]
        role: KeyRole,
        /// Time after which the key is refused, such as 30d [default: never]
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        expires: Option<Duration>,
        /// Limits of the user: samples=N, queued=N, tokens-per-day=N, bytes=SIZE
        #[arg(long, value_name = "LIMITS", value_parser = limits)]
        limit: Option<UserLimits>,
    },
    /// List API keys
    #[command(after_help = "Examples:
  tinkex key list
  tinkex key list --format json

Columns: name, user, role, created, expires, id.")]
    List {
        #[command(flatten)]
        view: ViewArgs,
    },
    /// Revoke an API key: its requests and streams end at once
    #[command(after_help = "Example:
  tinkex key revoke alice-ci")]
    Revoke {
        /// Name or id of the key
        key: String,
    },
    /// Replace an API key by a new one, which is shown once
    #[command(
        after_help = "The name, user and role stay the same. Requests and streams with the old key end at once.

Example:
  tinkex key rotate alice"
    )]
    Rotate {
        /// Name or id of the key
        key: String,
    },
}

fn role(text: &str) -> Result<KeyRole, String> {
    match text {
        "admin" => Ok(KeyRole::Admin),
        "user" => Ok(KeyRole::User),
        "read" => Ok(KeyRole::Read),
        _ => Err("expected admin, user or read".to_owned()),
    }
}

const COLUMNS: [ListColumn<KeyInfo>; 6] = [
    ListColumn {
        name: "name",
        header: "Name",
        by_default: true,
        cell: |key, _| key.name.clone(),
        key: |key| SortKey::text(&key.name),
    },
    ListColumn {
        name: "user",
        header: "User",
        by_default: true,
        cell: |key, _| key.user.clone(),
        key: |key| SortKey::text(&key.user),
    },
    ListColumn {
        name: "role",
        header: "Role",
        by_default: true,
        cell: |key, _| key.role.name().to_owned(),
        key: |key| SortKey::text(key.role.name()),
    },
    ListColumn {
        name: "created",
        header: "Created",
        by_default: true,
        cell: |key, now| format::or_na(key.created_at.map(|time| format::relative_time(time, now))),
        key: |key| SortKey::time(key.created_at),
    },
    ListColumn {
        name: "expires",
        header: "Expires",
        by_default: true,
        cell: |key, _| key.expires_at.map_or_else(|| "never".to_owned(), |time| time.to_string()),
        key: |key| SortKey::time(key.expires_at),
    },
    ListColumn {
        name: "id",
        header: "ID",
        by_default: false,
        cell: |key, _| key.id.clone(),
        key: |key| SortKey::text(&key.id),
    },
];

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    command: KeyCommand,
) -> Result<(), CommandError> {
    let admin = context.client().await?.admin();
    match command {
        KeyCommand::Create { name, user, role, expires, limit } => {
            let lifetime = expires.map(|expires| expires.as_secs().max(1));
            let request =
                CreateKey::new(name, role).user(user).lifetime_seconds(lifetime).limits(limit);
            let created = admin.create_key(&request).await?;
            show(context, &created)
        }
        KeyCommand::List { view } => {
            let view = view.resolve(context, &COLUMNS)?;
            let keys = admin.list_keys().await?.keys;
            let title = list::title(keys.len(), 0, "key", "keys");
            view.print(context, title, keys, |keys| json!({ "keys": keys }))
        }
        KeyCommand::Revoke { key } => {
            admin.revoke_key(key.as_str()).await?;
            context.text(&format!("Revoked key {key}."), &json!({ "revoked": key }))
        }
        KeyCommand::Rotate { key } => {
            let created = admin.rotate_key(key).await?;
            show(context, &created)
        }
    }
}

/// Prints a new key. Only the key is on the last line, so that scripts can read it.
fn show(context: &mut CommandContext<'_>, created: &KeyCreated) -> Result<(), CommandError> {
    let KeyInfo { name, user, role, .. } = &created.info;
    let role = role.name();
    let key = created.key.expose();
    let text = format!(
        "Key {name} of user {user} with role {role}. Store it now: it is not shown again.\n{key}"
    );
    context.text(&text, created)
}
