//! What was used, and what it costs.

use std::path::PathBuf;

use clap::Subcommand;
use serde_json::json;
use tinkex::Timestamp;
use tinkex::rest::{
    BillingUsage, StorageUsage, StorageUsageRequest, UsageEvent, UsageKind, UsageSession,
};
use tinkex_files::AtomicWrite;

use crate::args::Format;
use crate::error::CommandError;
use crate::format;
use crate::output::Shell;
use crate::table::Table;

#[derive(Debug, Subcommand)]
pub(crate) enum BillingCommand {
    /// What was used, by the hour; at most 14 days
    #[command(after_help = "Examples:
  tinkex billing usage 2026-07-13T00:00:00Z 2026-07-14T00:00:00Z
  tinkex billing usage 2026-07-01 2026-07-08 --csv july.csv --sessions-csv sessions.csv")]
    Usage {
        /// From this hour on
        #[arg(value_parser = moment)]
        starting_on: Timestamp,
        /// To before this hour
        #[arg(value_parser = moment)]
        ending_before: Timestamp,
        /// Write the rows to a file; - for standard output
        #[arg(long, value_name = "PATH")]
        csv: Option<PathBuf>,
        /// Write the sessions that are mentioned to a file; - for standard output
        #[arg(long, value_name = "PATH")]
        sessions_csv: Option<PathBuf>,
    },
    /// How much storage checkpoints take now, and what a month of it costs
    #[command(after_help = "Examples:
  tinkex billing checkpoint-storage
  tinkex billing checkpoint-storage --project-id proj-1 --csv -

`tinkex checkpoint gc` finds what could go.")]
    CheckpointStorage {
        /// Write the rows to a file; - for standard output
        #[arg(long, value_name = "PATH")]
        csv: Option<PathBuf>,
    },
}

fn moment(text: &str) -> Result<Timestamp, String> {
    text.parse().map_err(|_| "say a time such as 2026-07-13T00:00:00Z".to_owned())
}

/// A value in a table of figures.
#[derive(Clone)]
enum BillingCell {
    Text(String),
    /// It has a value that nobody knows.
    Unknown,
    /// It has none.
    Nothing,
}

impl BillingCell {
    fn text(value: Option<impl ToString>) -> Self {
        value.map_or(Self::Nothing, |value| Self::Text(value.to_string()))
    }

    fn float(value: Option<f64>) -> Self {
        Self::text(value.map(format::float))
    }

    /// A cost or rate of something that has one.
    fn due(value: Option<f64>) -> Self {
        value.map_or(Self::Unknown, |value| Self::Text(format::float(value)))
    }
}

/// Rows whose columns are those that any of them has, in the order they were met.
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

    fn table(&self, unknown: &str) -> Table {
        let mut table = Table::new(self.columns.iter().copied());
        for row in &self.rows {
            table.row(self.columns.iter().map(|column| {
                match row.iter().find(|(name, _)| name == column) {
                    Some((_, BillingCell::Text(text))) => text.clone(),
                    Some((_, BillingCell::Unknown)) => unknown.to_owned(),
                    Some((_, BillingCell::Nothing)) | None => String::new(),
                }
            }));
        }
        table
    }

    fn csv(&self) -> String {
        self.table("").csv()
    }
}

pub(super) async fn run(
    shell: &mut Shell<'_>,
    command: BillingCommand,
) -> Result<(), CommandError> {
    match command {
        BillingCommand::Usage { starting_on, ending_before, csv, sessions_csv } => {
            if starting_on.unix_micros() >= ending_before.unix_micros() {
                return Err(CommandError::usage("the time must end after it starts"));
            }
            check_streams(shell, &[csv.as_ref(), sessions_csv.as_ref()])?;
            let admin = shell.client().await?.admin();
            let usage = admin.get_billing_usage(starting_on, ending_before).await?;
            let figures = used(&usage);
            if csv.is_none() && sessions_csv.is_none() {
                let title = format!("{} hourly usage row(s)", usage.data.len());
                return show(shell, &figures, &title, &usage);
            }
            let sessions: Vec<_> =
                usage.sessions.iter().map(|(id, it)| session(id.as_str(), it)).collect();
            let sessions =
                BillingTable { columns: vec!["session_id", "user_metadata"], rows: sessions };
            let files = [(sessions_csv, sessions), (csv, figures)];
            write(shell, files.into_iter().filter_map(|(path, rows)| Some((path?, rows))))
        }
        BillingCommand::CheckpointStorage { csv } => {
            check_streams(shell, &[csv.as_ref()])?;
            let project_id = shell.settings.project_id.clone();
            let admin = shell.client().await?.admin();
            let usage = admin
                .get_checkpoint_storage(&StorageUsageRequest::default().project_id(project_id))
                .await?;
            let figures = stored(&usage);
            match csv {
                Some(path) => write(shell, [(path, figures)]),
                None => show(shell, &figures, "Current checkpoint storage", &usage),
            }
        }
    }
}

/// Standard output can hold one thing.
fn check_streams(shell: &Shell<'_>, files: &[Option<&PathBuf>]) -> Result<(), CommandError> {
    let out = files.iter().flatten().filter(|path| path.as_os_str() == "-").count();
    if out > 1 || (out == 1 && shell.is_json()) {
        return Err(CommandError::usage("only one thing can be written to standard output")
            .hint("name files for the others"));
    }
    Ok(())
}

fn show(
    shell: &mut Shell<'_>,
    figures: &BillingTable,
    title: &str,
    json: &impl serde::Serialize,
) -> Result<(), CommandError> {
    match shell.settings.format {
        Format::Csv => shell.write(&figures.csv()),
        _ => shell.table(&figures.table("null").title(title), json),
    }
}

fn write(
    shell: &mut Shell<'_>,
    files: impl IntoIterator<Item = (PathBuf, BillingTable)>,
) -> Result<(), CommandError> {
    let mut written = Vec::new();
    for (path, figures) in files {
        if path.as_os_str() == "-" {
            shell.write(&figures.csv())?;
            continue;
        }
        let shown = path.display().to_string();
        AtomicWrite::new(shell.environment.path(&path))
            .create_folders()
            .write(figures.csv())
            .map_err(|why| CommandError::file("written", &shown, &why))?;
        shell.notice(&format!("Wrote {} row(s) to {shown}", figures.rows.len()));
        written.push(json!({ "path": shown, "rows": figures.rows.len() }));
    }
    if shell.is_json() {
        return shell.write(&crate::output::document(&json!({ "written": written }))?);
    }
    Ok(())
}

fn used(usage: &BillingUsage) -> BillingTable {
    let mut figures = BillingTable::new(&[
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
        figures.push(row(event));
    }
    figures
}

fn row(event: &UsageEvent) -> Vec<(&'static str, BillingCell)> {
    let number = |value: u64| BillingCell::Text(value.to_string());
    let (kind, rest) = match &event.event_info {
        UsageKind::Training { token_count } => {
            ("training", vec![("token_count", number(*token_count))])
        }
        UsageKind::SamplingPrefill { cached, token_count } => {
            // As the other tool writes it.
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
    let cost = |applies: bool, value: Option<f64>| match applies {
        true => BillingCell::due(value),
        false => BillingCell::float(value),
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

fn session(id: &str, session: &UsageSession) -> Vec<(&'static str, BillingCell)> {
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

fn stored(usage: &StorageUsage) -> BillingTable {
    let mut figures = BillingTable::new(&[
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
        figures.push(vec![
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
    figures
}
