//! `tinkex run`: training runs.

mod delete;

use clap::Subcommand;
use clap_complete::ArgValueCandidates;
use serde::Serialize;
use serde_json::json;
use tinkex::Timestamp;
use tinkex::rest::{AccessScope, Checkpoint, ListTrainingRuns, TrainingRun};

use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::list::{self, FetchedRows, ListColumn, PageArgs, ScopeArgs, SortKey, ViewArgs};
use crate::reference::{self, RunReference, name_of};
use crate::table::{Table, TableCell};

#[derive(Debug, Subcommand)]
pub(crate) enum RunCommand {
    /// List training runs, newest first
    #[command(after_help = "Examples:
  tinkex run list
  tinkex run list --limit 0 --columns id,checkpoint,checkpoint_time
  tinkex run list --sort -updated --format csv > runs.csv

Columns: id, name, model, owner, lora, updated, status, checkpoint, checkpoint_time.")]
    List {
        #[command(flatten)]
        page: PageArgs,
        #[command(flatten)]
        view: ViewArgs,
        #[command(flatten)]
        scope: ScopeArgs,
    },
    /// Show a training run
    #[command(after_help = "Examples:
  tinkex run info 0034d8c9-0a88-52a9-b2b7-bce7cb1e6fef:train:0
  tinkex run info animals                   the run with this name
  tinkex run info 0034d8c9                  the run whose id starts with this
  tinkex run info latest                    the newest run")]
    Info {
        /// Run: id or its start, name, folder or latest
        #[arg(add = ArgValueCandidates::new(reference::run_candidates))]
        run_id: RunReference,
        #[command(flatten)]
        scope: ScopeArgs,
    },
    /// Delete training runs and their checkpoints from a tinkex server
    #[command(
        after_help = "Only tinkex servers can delete runs; of the hosted service, delete the checkpoints. A run that a
program trains is kept. The run folder of `tinkex train` is not deleted.

Examples:
  tinkex run delete animals --local
  tinkex run delete animals animals-2 --local --yes"
    )]
    Delete(delete::DeleteRunsArgs),
    /// Let other users of a tinkex server read a run and use its checkpoints
    #[command(
        after_help = "Only the owner of a run, or an administrator, can share it and change it.

Examples:
  tinkex run share animals --with alice
  tinkex run share animals                  with every user"
    )]
    Share {
        /// Run: id or its start, name, folder or latest
        #[arg(add = ArgValueCandidates::new(reference::run_candidates))]
        run_id: RunReference,
        /// User who may read the run [default: every user]
        #[arg(long, value_name = "USER")]
        with: Option<String>,
    },
    /// End the sharing of a run
    #[command(after_help = "Examples:
  tinkex run unshare animals --with alice
  tinkex run unshare animals                with everybody")]
    Unshare {
        /// Run: id or its start, name, folder or latest
        #[arg(add = ArgValueCandidates::new(reference::run_candidates))]
        run_id: RunReference,
        /// User who may no longer read the run [default: everybody]
        #[arg(long, value_name = "USER")]
        with: Option<String>,
    },
}

/// Number of runs per request.
const BATCH: u64 = 100;

const COLUMNS: [ListColumn<TrainingRun>; 9] = [
    ListColumn {
        name: "id",
        header: "Run ID",
        by_default: true,
        cell: |run, _| run.training_run_id.to_string(),
        key: |run| SortKey::text(run.training_run_id.as_str()),
    },
    ListColumn {
        name: "name",
        header: "Name",
        by_default: true,
        cell: |run, _| name_of(run).unwrap_or_default().to_owned(),
        key: |run| name_of(run).map_or(SortKey::Missing, SortKey::text),
    },
    ListColumn {
        name: "model",
        header: "Base Model",
        by_default: true,
        cell: |run, _| run.base_model.clone(),
        key: |run| SortKey::text(&run.base_model),
    },
    ListColumn {
        name: "owner",
        header: "Owner",
        by_default: false,
        cell: |run, _| run.model_owner.clone(),
        key: |run| SortKey::text(&run.model_owner),
    },
    ListColumn {
        name: "lora",
        header: "LoRA",
        by_default: true,
        cell: |run, _| match rank(run) {
            Some(rank) => format!("Rank {rank}"),
            None => format::yes_no(run.is_lora).to_owned(),
        },
        key: |run| rank(run).map_or(SortKey::Missing, |rank| SortKey::Number(rank.into())),
    },
    ListColumn {
        name: "updated",
        header: "Last Update",
        by_default: true,
        cell: |run, now| format::relative_time(run.last_request_time, now),
        key: |run| SortKey::time(Some(run.last_request_time)),
    },
    ListColumn {
        name: "status",
        header: "Status",
        by_default: true,
        cell: |run, _| status(run).to_owned(),
        key: |run| SortKey::text(status(run)),
    },
    ListColumn {
        name: "checkpoint",
        header: "Last Checkpoint",
        by_default: false,
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
        by_default: false,
        cell: |run, now| {
            format::or_na(
                run.last_checkpoint.as_ref().map(|last| format::relative_time(last.time, now)),
            )
        },
        key: |run| SortKey::time(run.last_checkpoint.as_ref().map(|last| last.time)),
    },
];

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    command: RunCommand,
) -> Result<(), CommandError> {
    match command {
        RunCommand::List { page, view, scope } => {
            list(context, page, &view, scope.access_scope).await
        }
        RunCommand::Info { run_id, scope } => {
            let rest = context.client().await?.rest();
            let run = run_id.find(context, &rest, scope.access_scope).await?;
            context.table(&properties(&run, Timestamp::now()), &run)
        }
        RunCommand::Delete(args) => delete::delete(context, args).await,
        RunCommand::Share { run_id, with } => {
            let rest = context.client().await?.rest();
            let id = run_id.find(context, &rest, AccessScope::Owned).await?.training_run_id;
            rest.share_training_run(id.clone(), with.clone()).await?;
            let users =
                with.as_ref().map_or("every user".to_owned(), |user| format!("user {user}"));
            let json = json!({ "run": id, "shared_with": with });
            context.text(&format!("Shared run {id} with {users}."), &json)
        }
        RunCommand::Unshare { run_id, with } => {
            let rest = context.client().await?.rest();
            let id = run_id.find(context, &rest, AccessScope::Owned).await?.training_run_id;
            rest.unshare_training_run(id.clone(), with.clone()).await?;
            let users = with.as_ref().map_or("anybody".to_owned(), |user| format!("user {user}"));
            let json = json!({ "run": id, "unshared_with": with });
            context.text(&format!("Run {id} is no longer shared with {users}."), &json)
        }
    }
}

async fn list(
    context: &mut CommandContext<'_>,
    page: PageArgs,
    view: &ViewArgs,
    access_scope: AccessScope,
) -> Result<(), CommandError> {
    #[derive(Serialize)]
    struct RunList {
        runs: Vec<TrainingRun>,
        total: u64,
        shown: usize,
    }

    let mut view = view.resolve(context, &COLUMNS)?;
    let rest = context.client().await?.rest();
    let fetched = list::fetch_pages(context, "training runs", page, BATCH, |offset, limit| {
        let request =
            ListTrainingRuns::default().limit(limit).offset(offset).access_scope(access_scope);
        let rest = rest.clone();
        async move {
            let response = rest.list_training_runs(&request).await?;
            Ok((response.training_runs, Some(response.cursor.total_count)))
        }
    })
    .await?;
    let FetchedRows { rows, total } = fetched;
    reference::store_candidates(context, &rows);
    if rows.iter().all(|run| name_of(run).is_none()) {
        view.hide("name");
    }
    let shown = rows.len();
    let title = list::title(shown, total, "training run", "training runs");
    view.print(context, title, rows, |runs| RunList { runs, total, shown })
}

fn properties(run: &TrainingRun, now: Timestamp) -> Table {
    let id = run.training_run_id.as_str();
    let mut table = Table::of_properties().title(format!("Training Run: {id}"));
    table.property("Run ID", id);
    if let Some(name) = name_of(run) {
        table.property("Name", name);
    }
    table.property("Base Model", &run.base_model);
    table.property("Owner", &run.model_owner);
    table.property("LoRA", format::lora(run.is_lora, run.lora_rank));
    table.property("Last Update", TableCell::time(run.last_request_time, now));
    table.property("Status", status(run));
    let mut checkpoint = |name: &str, checkpoint: Option<&Checkpoint>| {
        if let Some(checkpoint) = checkpoint {
            table.property(name, &checkpoint.checkpoint_id);
            table.property("  - Time", TableCell::time(checkpoint.time, now));
            table.property("  - Path", &checkpoint.tinker_path);
        }
    };
    checkpoint("Last Training Checkpoint", run.last_checkpoint.as_ref());
    checkpoint("Last Sampler Checkpoint", run.last_sampler_checkpoint.as_ref());
    table.metadata(run.user_metadata.as_ref());
    table
}

/// Returns the rank of the adapter. The server reports 0 if it is unknown.
fn rank(run: &TrainingRun) -> Option<u32> {
    run.lora_rank.filter(|rank| run.is_lora && *rank > 0)
}

fn status(run: &TrainingRun) -> &'static str {
    if run.corrupted { "Failed" } else { "OK" }
}
