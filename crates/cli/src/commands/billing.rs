//! `tinkex billing`: usage and costs.

use std::path::PathBuf;

use clap::Subcommand;
use serde_json::json;
use tinkex::Timestamp;
use tinkex::rest::{
    BillingUsage, StorageUsage, StorageUsageRequest, UsageEvent, UsageKind, UsageSession,
};
use tinkex_files::AtomicWrite;

use crate::args::{OutputFormat, timestamp};
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::table::Table;

#[derive(Debug, Subcommand)]
pub(crate) enum BillingCommand {
    /// Show hourly usage of at most 14 days
    #[command(after_help = "Examples:
  tinkex billing usage 2026-07-13T00:00:00Z 2026-07-14T00:00:00Z
  tinkex billing usage 2026-07-01 2026-07-08 --csv july.csv --sessions-csv sessions.csv")]
    Usage {
        /// Start of the first hour, such as 2026-07-13 (UTC)
        #[arg(value_parser = timestamp)]
        starting_on: Timestamp,
        /// End of the last hour, such as 2026-07-14 (UTC)
        #[arg(value_parser = timestamp)]
        ending_before: Timestamp,
        /// Write the rows to this CSV file; - is standard output
        #[arg(long, value_name = "PATH")]
        csv: Option<PathBuf>,
        /// Write the sessions of the rows to this CSV file; - is standard output
        #[arg(long, value_name = "PATH")]
        sessions_csv: Option<PathBuf>,
    },
    /// Show the storage of checkpoints and its monthly cost
    #[command(after_help = "Examples:
  tinkex billing checkpoint-storage
  tinkex billing checkpoint-storage --project-id proj-1 --csv -

Find old checkpoints with `tinkex checkpoint gc`.")]
    CheckpointStorage {
        /// Write the rows to this CSV file; - is standard output
        #[arg(long, value_name = "PATH")]
        csv: Option<PathBuf>,
    },
}

/// Value in a billing table.
#[derive(Clone)]
enum BillingCell {
    Text(String),
    /// The value applies to the row but is unknown.
    Unknown,
    /// The value does not apply to the row.
    NotApplicable,
}

impl BillingCell {
    fn text(value: Option<impl ToString>) -> Self {
        value.map_or(Self::NotApplicable, |value| Self::Text(value.to_string()))
    }

    fn float(value: Option<f64>) -> Self {
        Self::text(value.map(format::float))
    }

    /// Creates the cell of a cost or rate that applies to the row; `None` is unknown.
    fn applicable_float(value: Option<f64>) -> Self {
        value.map_or(Self::Unknown, |value| Self::Text(format::float(value)))
    }
}

/// Rows with the union of their columns, in order of first appearance.
#[derive(Default)]
struct BillingTable {
    columns: Vec<&'static str>,
    rows: Vec<Vec<(&'static str, BillingCell)>>,
}

impl BillingTable {
    fn new(columns: &[&'static str]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    fn push(&mut self, row: Vec<(&'static str, BillingCell)>) {
        for (name, _) in &row {
            if !self.columns.contains(name) {
                self.columns.push(name);
            }
        }
        self.rows.push(row);
    }

    fn render(&self, unknown: &str) -> Table {
        let mut table = Table::new(self.columns.iter().copied());
        for row in &self.rows {
            table.row(self.columns.iter().map(|column| {
                match row.iter().find(|(name, _)| name == column) {
                    Some((_, BillingCell::Text(text))) => text.clone(),
                    Some((_, BillingCell::Unknown)) => unknown.to_owned(),
                    Some((_, BillingCell::NotApplicable)) | None => String::new(),
                }
            }));
        }
        table
    }

    fn csv(&self) -> String {
        self.render("").csv()
    }
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    command: BillingCommand,
) -> Result<(), CommandError> {
    match command {
        BillingCommand::Usage { starting_on, ending_before, csv, sessions_csv } => {
            if starting_on.unix_micros() >= ending_before.unix_micros() {
                return Err(CommandError::usage("ENDING_BEFORE must be later than STARTING_ON"));
            }
            check_streams(context, &[csv.as_ref(), sessions_csv.as_ref()])?;
            let admin = context.client().await?.admin();
            let usage = admin.get_billing_usage(starting_on, ending_before).await?;
            let table = usage_table(&usage);
            if csv.is_none() && sessions_csv.is_none() {
                let title = format!("{} hourly usage row(s)", usage.data.len());
                return print(context, &table, &title, &usage);
            }
            let sessions: Vec<_> = usage
                .sessions
                .iter()
                .map(|(id, session)| session_row(id.as_str(), session))
                .collect();
            let sessions =
                BillingTable { columns: vec!["session_id", "user_metadata"], rows: sessions };
            let files = [(sessions_csv, sessions), (csv, table)];
            write(context, files.into_iter().filter_map(|(path, rows)| Some((path?, rows))))
        }
        BillingCommand::CheckpointStorage { csv } => {
            check_streams(context, &[csv.as_ref()])?;
            let project_id = context.settings.project_id.clone();
            let admin = context.client().await?.admin();
            let request = StorageUsageRequest::default().project_id(project_id);
            let usage = admin.get_checkpoint_storage(&request).await?;
            let table = storage_table(&usage);
            match csv {
                Some(path) => write(context, [(path, table)]),
                None => print(context, &table, "Current checkpoint storage", &usage),
            }
        }
    }
}

/// Rejects more than one result on standard output.
fn check_streams(
    context: &CommandContext<'_>,
    files: &[Option<&PathBuf>],
) -> Result<(), CommandError> {
    let out = files.iter().flatten().filter(|path| path.as_os_str() == "-").count();
    if out > 1 || (out == 1 && context.is_json()) {
        return Err(CommandError::usage("only one result can be written to standard output")
            .hint("Write the other results to files."));
    }
    Ok(())
}

fn print(
    context: &mut CommandContext<'_>,
    table: &BillingTable,
    title: &str,
    json: &impl serde::Serialize,
) -> Result<(), CommandError> {
    match context.settings.format {
        OutputFormat::Csv => context.write(&table.csv()),
        _ => context.table(&table.render("null").title(title), json),
    }
}

fn write(
    context: &mut CommandContext<'_>,
    files: impl IntoIterator<Item = (PathBuf, BillingTable)>,
) -> Result<(), CommandError> {
    let mut written = Vec::new();
    for (path, table) in files {
        if path.as_os_str() == "-" {
            context.write(&table.csv())?;
            continue;
        }
        let shown = path.display().to_string();
        AtomicWrite::new(context.environment.path(&path))
            .create_folders()
            .write(table.csv())
            .map_err(|error| CommandError::file("write", &shown, &error))?;
        context.notice(&format!("Wrote {} row(s) to {shown}", table.rows.len()));
        written.push(json!({ "path": shown, "rows": table.rows.len() }));
    }
    if context.is_json() {
        return context.write(&crate::output::to_json(&json!({ "written": written }))?);
    }
    Ok(())
}

fn usage_table(usage: &BillingUsage) -> BillingTable {
    let mut table = BillingTable::new(&[
        "bucket_start",
        "bucket_end",
        "base_model",
        "user_id",
        "user_name",
        "session_id",
        "project_id",
        "estimated_cost_usd",
        "effective_rate_usd_per_million_tokens",
        "effective_rate_usd_per_gigabyte_month",
        "type",
    ]);
    for event in &usage.data {
        table.push(usage_row(event));
    }
    table
}

fn usage_row(event: &UsageEvent) -> Vec<(&'static str, BillingCell)> {
    let number = |value: u64| BillingCell::Text(value.to_string());
    let (kind, rest) = match &event.event_info {
        UsageKind::Training { token_count } => {
            ("training", vec![("token_count", number(*token_count))])
        }
        UsageKind::SamplingPrefill { cached, token_count } => {
            // As the Python command line prints it.
            let cached = if *cached { "True" } else { "False" };
            let cached = ("cached", BillingCell::Text(cached.to_owned()));
            ("sampling_prefill", vec![cached, ("token_count", number(*token_count))])
        }
        UsageKind::SamplingSample { token_count } => {
            ("sampling_sample", vec![("token_count", number(*token_count))])
        }
        UsageKind::Checkpoint { count } => ("checkpoint", vec![("count", number(*count))]),
        UsageKind::Storage { gigabyte_hours } => {
            ("storage", vec![("gigabyte_hours", BillingCell::float(Some(*gigabyte_hours)))])
        }
        _ => ("other", Vec::new()),
    };
    let storage = matches!(event.event_info, UsageKind::Storage { .. });
    let tokens = !storage && !matches!(event.event_info, UsageKind::Checkpoint { .. });
    let cost = |applies: bool, value: Option<f64>| {
        if applies { BillingCell::applicable_float(value) } else { BillingCell::float(value) }
    };
    let mut cells = vec![
        ("bucket_start", BillingCell::text(Some(event.bucket_start))),
        ("bucket_end", BillingCell::text(Some(event.bucket_end))),
        ("base_model", BillingCell::text(event.base_model.as_ref())),
        ("user_id", BillingCell::text(event.user_id.as_ref())),
        ("user_name", BillingCell::text(event.user_name.as_ref())),
        ("session_id", BillingCell::text(event.session_id.as_ref())),
        ("project_id", BillingCell::text(event.project_id.as_ref())),
        ("estimated_cost_usd", cost(tokens || storage, event.estimated_cost_usd)),
        (
            "effective_rate_usd_per_million_tokens",
            cost(tokens, event.effective_rate_usd_per_million_tokens),
        ),
        (
            "effective_rate_usd_per_gigabyte_month",
            cost(storage, event.effective_rate_usd_per_gigabyte_month),
        ),
        ("type", BillingCell::Text(kind.to_owned())),
    ];
    cells.extend(rest);
    cells
}

fn session_row(id: &str, session: &UsageSession) -> Vec<(&'static str, BillingCell)> {
    let text = |text: &str| serde_json::Value::from(text).to_string();
    let metadata = session.user_metadata.as_ref().map(|metadata| {
        let pairs = metadata.iter().map(|(name, value)| format!("{}: {}", text(name), text(value)));
        format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
    });
    vec![
        ("session_id", BillingCell::Text(id.to_owned())),
        ("user_metadata", BillingCell::text(metadata)),
    ]
}

fn storage_table(usage: &StorageUsage) -> BillingTable {
    let mut table = BillingTable::new(&[
        "effective_rate_usd_per_gigabyte_month",
        "project_id",
        "org_user_urn",
        "user_email",
        "user_name",
        "checkpoint_count",
        "size_bytes",
        "size_gigabytes",
        "estimated_monthly_cost_usd",
    ]);
    for item in &usage.data {
        let rate = usage.effective_rate_usd_per_gigabyte_month;
        table.push(vec![
            ("effective_rate_usd_per_gigabyte_month", BillingCell::float(rate)),
            ("project_id", BillingCell::text(item.project_id.as_ref())),
            ("org_user_urn", BillingCell::text(item.org_user_urn.as_ref())),
            ("user_email", BillingCell::text(item.user_email.as_ref())),
            ("user_name", BillingCell::text(item.user_name.as_ref())),
            ("checkpoint_count", BillingCell::text(Some(item.checkpoint_count))),
            ("size_bytes", BillingCell::text(Some(item.size_bytes))),
            ("size_gigabytes", BillingCell::float(Some(item.size_gigabytes))),
            ("estimated_monthly_cost_usd", BillingCell::float(item.estimated_monthly_cost_usd)),
        ]);
    }
    table
}
