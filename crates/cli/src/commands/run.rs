//! Training runs.

use clap::{Subcommand, ValueEnum};
use serde::Serialize;
use tinkex::rest::{AccessScope, Checkpoint, ListTrainingRuns, TrainingRun};
use tinkex::{RestClient, Timestamp};

use crate::args::Page;
use crate::failure::Failure;
use crate::human;
use crate::output::Shell;
use crate::table::Table;

#[derive(Debug, Subcommand)]
pub(crate) enum Run {
    /// List training runs, newest first
    List {
        #[command(flatten)]
        page: Page,
        /// Which columns, in this order, with commas
        #[arg(short = 'c', long, value_name = "LIST", value_parser = columns)]
        columns: Option<Columns>,
        /// Whose runs
        #[arg(long, value_name = "SCOPE", value_parser = access_scope, default_value = "owned")]
        access_scope: AccessScope,
    },
    /// Show one training run
    Info {
        /// The run's id
        run_id: String,
    },
}

/// A column of the list of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Column {
    Id,
    Model,
    Owner,
    Lora,
    Updated,
    Status,
    Checkpoint,
    CheckpointTime,
}

/// Columns in the order they were asked for.
#[derive(Clone, Debug)]
pub(crate) struct Columns(pub(crate) Vec<Column>);

fn columns(text: &str) -> Result<Columns, String> {
    let one = |name: &str| {
        Column::from_str(name.trim(), false).map_err(|_| {
            let all = Column::value_variants().iter().filter_map(ValueEnum::to_possible_value);
            let all: Vec<_> = all.map(|value| value.get_name().to_owned()).collect();
            format!("there is no column {name:?}; there are {}", all.join(", "))
        })
    };
    text.split(',').map(one).collect::<Result<_, _>>().map(Columns)
}

fn access_scope(text: &str) -> Result<AccessScope, String> {
    match text {
        "owned" => Ok(AccessScope::Owned),
        "accessible" => Ok(AccessScope::Accessible),
        _ => Err("say owned or accessible".to_owned()),
    }
}

/// How many runs one request brings.
const BATCH: u64 = 100;
const USUAL: [Column; 5] =
    [Column::Id, Column::Model, Column::Lora, Column::Updated, Column::Status];

pub(super) async fn run(shell: &mut Shell<'_>, command: Run) -> Result<(), Failure> {
    let rest = shell.client().await?.rest();
    let now = Timestamp::now();
    match command {
        Run::List { page, columns, access_scope } => {
            let listed = list(&rest, page, access_scope).await?;
            let columns = columns.map_or_else(|| USUAL.to_vec(), |columns| columns.0);
            shell.table(&listed.table(&columns, now), &listed)
        }
        Run::Info { run_id } => {
            let run = rest.get_training_run(run_id, AccessScope::Owned).await?;
            shell.table(&properties(&run, now), &run)
        }
    }
}

#[derive(Serialize)]
struct Listed {
    runs: Vec<TrainingRun>,
    /// How many there are, shown or not.
    total: u64,
    shown: usize,
}

/// Pages until there are as many as asked for, or no more.
async fn list(rest: &RestClient, page: Page, scope: AccessScope) -> Result<Listed, Failure> {
    let mut runs: Vec<TrainingRun> = Vec::new();
    loop {
        let have = runs.len() as u64;
        let wanted = page.limit().map_or(BATCH, |limit| BATCH.min(limit - have));
        let list = ListTrainingRuns {
            limit: wanted,
            offset: page.offset + have,
            access_scope: scope,
            project_id: None,
        };
        let reply = rest.list_training_runs(&list).await?;
        let (got, total) = (reply.training_runs.len() as u64, reply.cursor.total_count);
        runs.extend(reply.training_runs);
        let have = have + got;
        let target = page.limit().unwrap_or(u64::MAX).min(total.saturating_sub(page.offset));
        // A page without anything is the last one, whatever the total claims.
        if have >= target || got == 0 {
            return Ok(Listed { shown: runs.len(), runs, total });
        }
    }
}

impl Listed {
    fn table(&self, columns: &[Column], now: Timestamp) -> Table {
        let mut title = match self.shown {
            0 => "No training runs found".to_owned(),
            1 => "1 training run".to_owned(),
            shown => format!("{shown} training runs"),
        };
        let more = self.total.saturating_sub(self.shown as u64);
        if more > 0 {
            title += &format!(" ({more} more not shown, use --limit to see more)");
        }
        let mut table = Table::new(columns.iter().map(|column| header(*column))).title(title);
        for run in &self.runs {
            table.row(columns.iter().map(|column| cell(run, *column, now)));
        }
        table
    }
}

fn header(column: Column) -> &'static str {
    match column {
        Column::Id => "Run ID",
        Column::Model => "Base Model",
        Column::Owner => "Owner",
        Column::Lora => "LoRA",
        Column::Updated => "Last Update",
        Column::Status => "Status",
        Column::Checkpoint => "Last Checkpoint",
        Column::CheckpointTime => "Checkpoint Time",
    }
}

fn cell(run: &TrainingRun, column: Column, now: Timestamp) -> String {
    let last = run.last_checkpoint.as_ref();
    match column {
        Column::Id => run.training_run_id.to_string(),
        Column::Model => run.base_model.clone(),
        Column::Owner => run.model_owner.clone(),
        Column::Lora => match rank(run) {
            Some(rank) => format!("Rank {rank}"),
            None => human::yes(run.is_lora).to_owned(),
        },
        Column::Updated => human::time(run.last_request_time, now),
        Column::Status => status(run).to_owned(),
        Column::Checkpoint => last.map_or("None", |last| last.checkpoint_id.as_str()).to_owned(),
        Column::CheckpointTime => human::or_missing(last.map(|last| human::time(last.time, now))),
    }
}

fn properties(run: &TrainingRun, now: Timestamp) -> Table {
    let id = run.training_run_id.as_str();
    let mut table = Table::of_properties().title(format!("Training Run: {id}"));
    table.property("Run ID", id);
    table.property("Base Model", &run.base_model);
    table.property("Owner", &run.model_owner);
    let lora = match rank(run) {
        Some(rank) => format!("Yes (Rank {rank})"),
        None => human::yes(run.is_lora).to_owned(),
    };
    table.property("LoRA", lora);
    table.property("Last Update", human::time(run.last_request_time, now));
    table.property("Status", status(run));
    let mut checkpoint = |name: &str, checkpoint: Option<&Checkpoint>| {
        if let Some(checkpoint) = checkpoint {
            table.property(name, &checkpoint.checkpoint_id);
            table.property("  - Time", human::time(checkpoint.time, now));
            table.property("  - Path", &checkpoint.tinker_path);
        }
    };
    checkpoint("Last Training Checkpoint", run.last_checkpoint.as_ref());
    checkpoint("Last Sampler Checkpoint", run.last_sampler_checkpoint.as_ref());
    if let Some(metadata) = run.user_metadata.as_ref().filter(|metadata| !metadata.is_empty()) {
        table.property("Metadata", "");
        for (key, value) in metadata {
            table.property(&format!("  - {key}"), value);
        }
    }
    table
}

/// The adapter's rank, if it has one that was told.
fn rank(run: &TrainingRun) -> Option<u32> {
    run.lora_rank.filter(|rank| run.is_lora && *rank > 0)
}

fn status(run: &TrainingRun) -> &'static str {
    if run.corrupted { "Failed" } else { "OK" }
}
