//! Who did what.

use clap::Subcommand;
use tinkex::Timestamp;
use tinkex::rest::{AuditEntry, AuditKind, AuditLogRequest};

use crate::failure::Failure;
use crate::human;
use crate::list::{Column, Key, View};
use crate::output::Shell;

#[derive(Debug, Subcommand)]
pub(crate) enum Audit {
    /// List what was done in the organization
    #[command(after_help = "Examples:
  tinkex audit log --day 2026-07-13
  tinkex audit log --event-type checkpoints --format csv

Columns: time, event, model, path, purpose, details.")]
    Log {
        /// On this day, as YYYY-MM-DD
        #[arg(long, value_name = "DAY", value_parser = day)]
        day: Option<String>,
        /// What kind of deeds: all, checkpoints, projects, teams or organizations
        #[arg(long, value_name = "TYPE", value_parser = kind, default_value = "all")]
        event_type: AuditKind,
        #[command(flatten)]
        view: View,
    },
}

fn day(text: &str) -> Result<String, String> {
    match text.parse::<Timestamp>() {
        Ok(_) if text.len() == "2026-01-02".len() => Ok(text.to_owned()),
        _ => Err("say a day such as 2026-07-13".to_owned()),
    }
}

fn kind(text: &str) -> Result<AuditKind, String> {
    match text {
        "all" => Ok(AuditKind::All),
        "checkpoints" => Ok(AuditKind::Checkpoints),
        "projects" => Ok(AuditKind::Projects),
        "teams" => Ok(AuditKind::Teams),
        "organizations" => Ok(AuditKind::Organizations),
        _ => Err("say all, checkpoints, projects, teams or organizations".to_owned()),
    }
}

const COLUMNS: [Column<AuditEntry>; 6] = [
    Column {
        name: "time",
        header: "Time",
        usual: true,
        cell: |entry, _| entry.timestamp.to_string(),
        key: |entry| Key::time(Some(entry.timestamp)),
    },
    Column {
        name: "event",
        header: "Event",
        usual: true,
        cell: |entry, _| entry.event.clone(),
        key: |entry| Key::text(&entry.event),
    },
    Column {
        name: "model",
        header: "Model",
        usual: true,
        cell: |entry, _| human::or_missing(entry.model_id.as_ref()),
        key: |entry| entry.model_id.as_ref().map_or(Key::Missing, Key::text),
    },
    Column {
        name: "path",
        header: "Path",
        usual: true,
        cell: |entry, _| human::or_missing(entry.tinker_path.as_ref()),
        key: |entry| entry.tinker_path.as_ref().map_or(Key::Missing, Key::text),
    },
    Column {
        name: "purpose",
        header: "Purpose",
        usual: true,
        cell: |entry, _| human::or_missing(entry.purpose.as_ref()),
        key: |entry| entry.purpose.as_ref().map_or(Key::Missing, Key::text),
    },
    Column {
        name: "details",
        header: "Details",
        usual: false,
        cell: |entry, _| serde_json::to_string(&entry.event_details).unwrap_or_default(),
        key: |_| Key::Missing,
    },
];

pub(super) async fn run(shell: &mut Shell<'_>, command: Audit) -> Result<(), Failure> {
    let Audit::Log { day, event_type, view } = command;
    let shown = view.of(shell, &COLUMNS)?;
    let admin = shell.client().await?.admin();
    let mut log = admin.get_audit_log(&AuditLogRequest { event_type, day }).await?;
    shown.sort(&mut log.entries);
    let title = crate::list::title(log.entries.len(), 0, "event", "events");
    let table = shown.table(&log.entries, Timestamp::now()).title(title);
    shell.table(&table, &log)
}
