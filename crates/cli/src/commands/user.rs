//! `tinkex user`: users of a server and their limits.

use clap::Subcommand;
use serde_json::json;
use tinkex::rest::{UserInfo, UserLimits};
use tinkex_server::MemorySize;

use crate::context::CommandContext;
use crate::error::CommandError;
use crate::list::{self, ListColumn, SortKey, ViewArgs};

#[derive(Debug, Subcommand)]
pub(crate) enum UserCommand {
    /// List users with their use of the server and their limits
    #[command(after_help = "Examples:
  tinkex user list
  tinkex user list --format json

Columns: user, keys, samples, queued, tokens_per_day, bytes. A value such as 3/16 is the use and the
limit.")]
    List {
        #[command(flatten)]
        view: ViewArgs,
    },
    /// Set the limits of a user
    #[command(after_help = "Limits that are not given are removed; none removes all of them.

Limits: samples         samples that are queued or sampled at a time
        queued          requests without a result
        tokens-per-day  tokens trained on in one day (UTC)
        bytes           size of the stored checkpoints

Examples:
  tinkex user limit alice samples=16,queued=200
  tinkex user limit bob tokens-per-day=1000000,bytes=5GB
  tinkex user limit carol none")]
    Limit {
        /// Name of the user
        user: String,
        /// Limits, such as samples=16,bytes=5GB
        #[arg(value_parser = limits)]
        limits: UserLimits,
    },
}

/// Parses limits such as `samples=16,bytes=5GB`.
pub(super) fn limits(text: &str) -> Result<UserLimits, String> {
    let mut limits = UserLimits::default();
    if text == "none" {
        return Ok(limits);
    }
    for part in text.split(',') {
        let expected =
            || format!("{part:?}: expected samples=N, queued=N, tokens-per-day=N or bytes=SIZE");
        let (name, value) = part.trim().split_once('=').ok_or_else(expected)?;
        let number = || value.parse::<u64>().map_err(|_| expected());
        match name {
            "samples" => limits.samples = Some(number()?),
            "queued" => limits.queued = Some(number()?),
            "tokens-per-day" => limits.tokens_per_day = Some(number()?),
            "bytes" => {
                let bytes = match value.parse::<u64>() {
                    Ok(bytes) => bytes,
                    Err(_) => size(value).map_err(|_| expected())?,
                };
                limits.bytes = Some(bytes);
            }
            _ => return Err(expected()),
        }
    }
    Ok(limits)
}

fn size(text: &str) -> Result<u64, String> {
    let size: MemorySize = text.parse()?;
    u64::try_from(size.bytes()).map_err(|error| error.to_string())
}

/// Returns the use and the limit, such as `3/16`.
fn of_limit(used: Option<u64>, limit: Option<u64>) -> String {
    let used = used.unwrap_or(0);
    limit.map_or_else(|| used.to_string(), |limit| format!("{used}/{limit}"))
}

const COLUMNS: [ListColumn<UserInfo>; 6] = [
    ListColumn {
        name: "user",
        header: "User",
        by_default: true,
        cell: |row, _| row.user.clone(),
        key: |row| SortKey::text(&row.user),
    },
    ListColumn {
        name: "keys",
        header: "Keys",
        by_default: true,
        cell: |row, _| row.keys.to_string(),
        key: |row| SortKey::Size(row.keys),
    },
    ListColumn {
        name: "samples",
        header: "Samples",
        by_default: true,
        cell: |row, _| of_limit(row.usage.samples, row.limits.samples),
        key: |row| SortKey::Size(row.usage.samples.unwrap_or(0)),
    },
    ListColumn {
        name: "queued",
        header: "Queued",
        by_default: true,
        cell: |row, _| of_limit(row.usage.queued, row.limits.queued),
        key: |row| SortKey::Size(row.usage.queued.unwrap_or(0)),
    },
    ListColumn {
        name: "tokens_per_day",
        header: "Tokens Today",
        by_default: true,
        cell: |row, _| of_limit(row.usage.tokens_per_day, row.limits.tokens_per_day),
        key: |row| SortKey::Size(row.usage.tokens_per_day.unwrap_or(0)),
    },
    ListColumn {
        name: "bytes",
        header: "Stored Bytes",
        by_default: true,
        cell: |row, _| of_limit(row.usage.bytes, row.limits.bytes),
        key: |row| SortKey::Size(row.usage.bytes.unwrap_or(0)),
    },
];

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    command: UserCommand,
) -> Result<(), CommandError> {
    let admin = context.client().await?.admin();
    match command {
        UserCommand::List { view } => {
            let view = view.resolve(context, &COLUMNS)?;
            let users = admin.list_users().await?.users;
            let title = list::title(users.len(), 0, "user", "users");
            view.print(context, title, users, |users| json!({ "users": users }))
        }
        UserCommand::Limit { user, limits } => {
            admin.set_user_limits(user.as_str(), limits).await?;
            let json = json!({ "user": user, "limits": limits });
            context.text(&format!("Set the limits of user {user}."), &json)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_parsed() {
        let parsed = limits("samples=16, queued=2,tokens-per-day=1000,bytes=2MiB").unwrap();
        assert_eq!((parsed.samples, parsed.queued), (Some(16), Some(2)));
        assert_eq!((parsed.tokens_per_day, parsed.bytes), (Some(1_000), Some(2 << 20)));
        assert_eq!(limits("bytes=7").unwrap().bytes, Some(7));
        assert_eq!(limits("none").unwrap(), UserLimits::default());
        for invalid in ["", "samples", "samples=x", "tokens=1", "samples=-1", "bytes=many"] {
            assert!(limits(invalid).is_err(), "{invalid}");
        }
    }
}
