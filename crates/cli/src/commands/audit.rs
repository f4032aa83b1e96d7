//! `tinkex audit`: the audit log of the organization.

use clap::Subcommand;
use serde_json::json;
use tinkex::Timestamp;
use tinkex::rest::{AuditEntry, AuditKind, AuditLogRequest};

use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::list::{self, ListColumn, SortKey, ViewArgs};

#[derive(Debug, Subcommand)]
pub(crate) enum AuditCommand {
    /// List the events of a day
    #[command(after_help = "Examples:
  tinkex audit log --day 2026-07-13
  tinkex audit log --event-type checkpoints --format csv

Columns: time, event, model, path, purpose, details.")]
    Log {
        /// Day in UTC, as YYYY-MM-DD [default: the server's choice]
        #[arg(long, value_name = "DAY", value_parser = day)]
        day: Option<String>,
        /// Events to list: all, checkpoints, projects, teams or organizations
        #[arg(long, value_name = "TYPE", value_parser = kind, default_value = "all")]
        event_type: AuditKind,
        #[command(flatten)]
        view: ViewArgs,
    },
}

/// Parses a day and returns it unchanged.
fn day(text: &str) -> Result<String, String> {
    match text.parse::<Timestamp>() {
        Ok(_) if text.len() == "2026-01-02".len() => Ok(text.to_owned()),
        _ => Err("expected a day such as 2026-07-13".to_owned()),
    }
}

fn kind(text: &str) -> Result<AuditKind, String> {
    match text {
        "all" => Ok(AuditKind::All),
        "checkpoints" => Ok(AuditKind::Checkpoints),
        "projects" => Ok(AuditKind::Projects),
        "teams" => Ok(AuditKind::Teams),
        "organizations" => Ok(AuditKind::Organizations),
        _ => Err("expected all, checkpoints, projects, teams or organizations".to_owned()),
    }
}

const COLUMNS: [ListColumn<AuditEntry>; 6] = [
    ListColumn {
        name: "time",
        header: "Time",
        by_default: true,
        cell: |entry, _| entry.timestamp.to_string(),
        key: |entry| SortKey::time(Some(entry.timestamp)),
    },
    ListColumn {
        name: "event",
        header: "Event",
        by_default: true,
        cell: |entry, _| entry.event.clone(),
        key: |entry| SortKey::text(&entry.event),
    },
    ListColumn {
        name: "model",
        header: "Model",
        by_default: true,
        cell: |entry, _| format::or_na(entry.model_id.as_ref()),
        key: |entry| entry.model_id.as_ref().map_or(SortKey::Missing, SortKey::text),
    },
    ListColumn {
        name: "path",
        header: "Path",
        by_default: true,
        cell: |entry, _| format::or_na(entry.tinker_path.as_ref()),
        key: |entry| entry.tinker_path.as_ref().map_or(SortKey::Missing, SortKey::text),
    },
    ListColumn {
        name: "purpose",
        header: "Purpose",
        by_default: true,
        cell: |entry, _| format::or_na(entry.purpose.as_ref()),
        key: |entry| entry.purpose.as_ref().map_or(SortKey::Missing, SortKey::text),
    },
    ListColumn {
        name: "details",
        header: "Details",
        by_default: false,
        cell: |entry, _| serde_json::to_string(&entry.event_details).unwrap_or_default(),
        key: |_| SortKey::Missing,
    },
];

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    command: AuditCommand,
) -> Result<(), CommandError> {
    let AuditCommand::Log { day, event_type, view } = command;
    let view = view.resolve(context, &COLUMNS)?;
    let admin = context.client().await?.admin();
    let request = AuditLogRequest::default().event_type(event_type).day(day);
    let log = admin.get_audit_log(&request).await?;
    let title = list::title(log.entries.len(), 0, "event", "events");
    view.print(context, title, log.entries, |entries| json!({ "entries": entries }))
}
