//! Training runs.

use clap::Subcommand;
use clap_complete::ArgValueCandidates;
use serde::Serialize;
use tinkex::rest::{AccessScope, Checkpoint, ListTrainingRuns, TrainingRun};
use tinkex::{ModelId, Timestamp};

use crate::error::CommandError;
use crate::format;
use crate::id_cache;
use crate::list::{self, ListColumn, PageArgs, SortKey, ViewArgs};
use crate::output::Shell;
use crate::table::Table;

#[derive(Debug, Subcommand)]
pub(crate) enum RunCommand {
    /// List training runs, newest first
    #[command(after_help = "Examples:
  tinkex run list
  tinkex run list --limit 0 --columns id,checkpoint,checkpoint_time
  tinkex run list --sort -updated --format csv > runs.csv

Columns: id, model, owner, lora, updated, status, checkpoint, checkpoint_time.")]
    List {
        #[command(flatten)]
        page: PageArgs,
        #[command(flatten)]
        view: ViewArgs,
        /// Whose runs: owned or accessible
        #[arg(long, value_name = "SCOPE", value_parser = list::access_scope, default_value = "owned")]
        access_scope: AccessScope,
    },
    /// Show one training run
    #[command(after_help = "Example:
  tinkex run info 0034d8c9-0a88-52a9-b2b7-bce7cb1e6fef:train:0")]
    Info {
        /// The run's id
        #[arg(add = ArgValueCandidates::new(id_cache::runs))]
        run_id: ModelId,
        /// Whose runs to look among: owned or accessible
        #[arg(long, value_name = "SCOPE", value_parser = list::access_scope, default_value = "owned")]
        access_scope: AccessScope,
    },
}

/// How many runs one request brings.
const BATCH: u64 = 100;

const COLUMNS: [ListColumn<TrainingRun>; 8] = [
    ListColumn {
        name: "id",
        header: "Run ID",
        usual: true,
        cell: |run, _| run.training_run_id.to_string(),
        key: |run| SortKey::text(run.training_run_id.as_str()),
    },
    ListColumn {
        name: "model",
        header: "Base Model",
        usual: true,
        cell: |run, _| run.base_model.clone(),
        key: |run| SortKey::text(&run.base_model),
    },
    ListColumn {
        name: "owner",
        header: "Owner",
        usual: false,
        cell: |run, _| run.model_owner.clone(),
        key: |run| SortKey::text(&run.model_owner),
    },
    ListColumn {
        name: "lora",
        header: "LoRA",
        usual: true,
        cell: |run, _| match rank(run) {
            Some(rank) => format!("Rank {rank}"),
            None => format::yes(run.is_lora).to_owned(),
        },
        key: |run| rank(run).map_or(SortKey::Missing, |rank| SortKey::Number(rank.into())),
    },
    ListColumn {
        name: "updated",
        header: "Last Update",
        usual: true,
        cell: |run, now| format::time(run.last_request_time, now),
        key: |run| SortKey::time(Some(run.last_request_time)),
    },
    ListColumn {
        name: "status",
        header: "Status",
        usual: true,
        cell: |run, _| status(run).to_owned(),
        key: |run| SortKey::text(status(run)),
    },
    ListColumn {
        name: "checkpoint",
        header: "Last Checkpoint",
        usual: false,
        cell: |run, _| {
            let last = run.last_checkpoint.as_ref();
            last.map_or("None", |last| last.checkpoint_id.as_str()).to_owned()
        },
        key: |run| {
            run.last_checkpoint
                .as_ref()
                .map_or(SortKey::Missing, |last| SortKey::text(&last.checkpoint_id))
        },
    },
    ListColumn {
        name: "checkpoint_time",
        header: "Checkpoint Time",
        usual: false,
        cell: |run, now| {
            format::or_missing(
                run.last_checkpoint.as_ref().map(|last| format::time(last.time, now)),
            )
        },
        key: |run| SortKey::time(run.last_checkpoint.as_ref().map(|last| last.time)),
    },
];

pub(super) async fn run(shell: &mut Shell<'_>, command: RunCommand) -> Result<(), CommandError> {
    match command {
        RunCommand::List { page, view, access_scope } => {
            list(shell, page, view, access_scope).await
        }
        RunCommand::Info { run_id, access_scope } => {
            let rest = shell.client().await?.rest();
            let run = rest.get_training_run(run_id.clone(), access_scope).await;
            let run =
                run.map_err(|why| CommandError::from(why).during(&format!("no run {run_id}")))?;
            shell.table(&properties(&run, Timestamp::now()), &run)
        }
    }
}

async fn list(
    shell: &mut Shell<'_>,
    page: PageArgs,
    view: ViewArgs,
    access_scope: AccessScope,
) -> Result<(), CommandError> {
    #[derive(Serialize)]
    struct Listed {
        runs: Vec<TrainingRun>,
        total: u64,
        shown: usize,
    }

    let shown = view.of(shell, &COLUMNS)?;
    let rest = shell.client().await?.rest();
    let mut found = list::pages(shell, "training runs", page, BATCH, |offset, limit| {
        let (rest, list) = (
            rest.clone(),
            ListTrainingRuns::default().limit(limit).offset(offset).access_scope(access_scope),
        );
        async move {
            let reply = rest.list_training_runs(&list).await?;
            Ok((reply.training_runs, Some(reply.cursor.total_count)))
        }
    })
    .await?;
    let ids = found.rows.iter().map(|run| run.training_run_id.to_string());
    id_cache::remember(&shell.environment.variables, id_cache::IdKind::Run, ids);
    shown.sort(&mut found.rows);
    let count = found.rows.len();
    let title = list::title(count, found.total, "training run", "training runs");
    let table = shown.table(&found.rows, Timestamp::now()).title(title);
    shell.table(&table, &Listed { runs: found.rows, total: found.total, shown: count })
}

fn properties(run: &TrainingRun, now: Timestamp) -> Table {
    let id = run.training_run_id.as_str();
    let mut table = Table::of_properties().title(format!("Training Run: {id}"));
    table.property("Run ID", id);
    table.property("Base Model", &run.base_model);
    table.property("Owner", &run.model_owner);
    table.property("LoRA", format::lora(run.is_lora, run.lora_rank));
    table.property("Last Update", format::time(run.last_request_time, now));
    table.property("Status", status(run));
    let mut checkpoint = |name: &str, checkpoint: Option<&Checkpoint>| {
        if let Some(checkpoint) = checkpoint {
            table.property(name, &checkpoint.checkpoint_id);
            table.property("  - Time", format::time(checkpoint.time, now));
            table.property("  - Path", &checkpoint.tinker_path);
        }
    };
    checkpoint("Last Training Checkpoint", run.last_checkpoint.as_ref());
    checkpoint("Last Sampler Checkpoint", run.last_sampler_checkpoint.as_ref());
    table.metadata(run.user_metadata.as_ref());
    table
}

/// The adapter's rank, if it has one that was told.
fn rank(run: &TrainingRun) -> Option<u32> {
    run.lora_rank.filter(|rank| run.is_lora && *rank > 0)
}

fn status(run: &TrainingRun) -> &'static str {
    if run.corrupted { "Failed" } else { "OK" }
}
