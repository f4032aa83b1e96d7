//! `tinkex checkpoint list` and `info`.

use std::collections::HashSet;

use clap::Args;
use clap_complete::ArgValueCandidates;
use serde::Serialize;
use tinkex::rest::{AccessScope, Checkpoint, ListUserCheckpoints};
use tinkex::{ModelId, Timestamp};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::id_cache;
use crate::list::{self, ListColumn, PageArgs, SortKey, ViewArgs};
use crate::reference::{self, CheckpointReference, CheckpointUse, RunReference};
use crate::table::{Table, TableCell};

/// Arguments of `tinkex checkpoint list`.
#[derive(Debug, Args)]
pub(crate) struct ListCheckpointsArgs {
    /// List all checkpoints of this run (id, name, folder or latest); --limit and --offset do not
    /// apply
    #[arg(long, alias = "run", value_name = "RUN", add = ArgValueCandidates::new(reference::run_candidates))]
    run_id: Option<RunReference>,
    #[command(flatten)]
    page: PageArgs,
    #[command(flatten)]
    view: ViewArgs,
}

/// Number of checkpoints per request. The server's query is slow, so pages are large.
const BATCH: u64 = 1000;

const COLUMNS: [ListColumn<Checkpoint>; 7] = [
    ListColumn {
        name: "id",
        header: "Checkpoint ID",
        by_default: true,
        cell: |checkpoint, _| checkpoint.checkpoint_id.clone(),
        key: |checkpoint| SortKey::text(&checkpoint.checkpoint_id),
    },
    ListColumn {
        name: "type",
        header: "Type",
        by_default: true,
        cell: |checkpoint, _| checkpoint.checkpoint_type.as_str().to_owned(),
        key: |checkpoint| SortKey::text(checkpoint.checkpoint_type.as_str()),
    },
    ListColumn {
        name: "size",
        header: "Size",
        by_default: true,
        cell: |checkpoint, _| format::or_na(checkpoint.size_bytes.map(format::bytes)),
        key: |checkpoint| SortKey::size(checkpoint.size_bytes),
    },
    ListColumn {
        name: "public",
        header: "Public",
        by_default: true,
        cell: |checkpoint, _| format::yes_no(checkpoint.public).to_owned(),
        key: |checkpoint| SortKey::Flag(checkpoint.public),
    },
    ListColumn {
        name: "created",
        header: "Created",
        by_default: true,
        cell: |checkpoint, now| format::relative_time(checkpoint.time, now),
        key: |checkpoint| SortKey::time(Some(checkpoint.time)),
    },
    ListColumn {
        name: "expires",
        header: "Expires",
        by_default: true,
        cell: expiry,
        key: |checkpoint| SortKey::time(checkpoint.expires_at),
    },
    ListColumn {
        name: "path",
        header: "Path",
        by_default: true,
        cell: |checkpoint, _| checkpoint.tinker_path.clone(),
        key: |checkpoint| SortKey::text(&checkpoint.tinker_path),
    },
];

fn expiry(checkpoint: &Checkpoint, now: Timestamp) -> String {
    checkpoint
        .expires_at
        .map_or_else(|| "Never".to_owned(), |time| format::relative_time(time, now))
}

pub(super) async fn list(
    context: &mut CommandContext<'_>,
    args: ListCheckpointsArgs,
) -> Result<(), CommandError> {
    #[derive(Serialize)]
    struct CheckpointList {
        #[serde(skip_serializing_if = "Option::is_none")]
        run_id: Option<ModelId>,
        checkpoints: Vec<Checkpoint>,
        total: u64,
        shown: usize,
    }

    let view = args.view.resolve(context, &COLUMNS)?;
    let (run_id, rows, total) = match &args.run_id {
        Some(run) => {
            let (id, rows) = of_run(context, run).await?;
            let total = rows.len() as u64;
            (Some(id), rows, total)
        }
        None => {
            let (rows, total) = fetch(context, args.page).await?;
            (None, rows, total)
        }
    };
    let paths = rows.iter().map(|checkpoint| checkpoint.tinker_path.clone());
    id_cache::store(&context.environment.variables, id_cache::IdKind::Checkpoint, paths);
    let shown = rows.len();
    let mut title = list::title(shown, total, "checkpoint", "checkpoints");
    if let Some(run) = &args.run_id {
        title += &format!(" for run {run}");
    }
    view.print(context, title, rows, |checkpoints| CheckpointList {
        run_id,
        checkpoints,
        total,
        shown,
    })
}

/// Fetches the checkpoints of a run and returns them with its id. If several runs have the name,
/// because the run was resumed, these are the checkpoints of all of them and the id of the newest.
pub(super) async fn of_run(
    context: &mut CommandContext<'_>,
    run: &RunReference,
) -> Result<(ModelId, Vec<Checkpoint>), CommandError> {
    let rest = context.client().await?.rest();
    let runs = run.find_with_checkpoints(context, &rest).await?;
    let id = runs.first().map_or_else(|| run.to_string().into(), |(id, _)| id.clone());
    Ok((id, runs.into_iter().flat_map(|(_, checkpoints)| checkpoints).collect()))
}

/// Fetches the user's checkpoints. Also returns the number of checkpoints that exist.
pub(super) async fn fetch(
    context: &mut CommandContext<'_>,
    page: PageArgs,
) -> Result<(Vec<Checkpoint>, u64), CommandError> {
    let rest = context.client().await?.rest();
    let fetched = list::fetch_pages(context, "checkpoints", page, BATCH, |offset, limit| {
        let rest = rest.clone();
        async move {
            let request = ListUserCheckpoints::default().limit(limit).offset(offset);
            let response = rest.list_user_checkpoints(&request).await?;
            Ok((response.checkpoints, response.cursor.map(|cursor| cursor.total_count)))
        }
    })
    .await?;
    // A checkpoint created between two requests shifts others to the next page, where they repeat.
    let mut rows = fetched.rows;
    let mut seen = HashSet::new();
    rows.retain(|checkpoint| seen.insert(checkpoint.tinker_path.clone()));
    Ok((rows, fetched.total))
}

pub(super) async fn info(
    context: &mut CommandContext<'_>,
    checkpoint: &CheckpointReference,
) -> Result<(), CommandError> {
    #[derive(Serialize)]
    struct CheckpointInfo {
        #[serde(flatten)]
        checkpoint: Checkpoint,
        training_run_id: ModelId,
        is_lora: bool,
        lora_rank: Option<u32>,
    }

    let path = checkpoint.resolve(context, CheckpointUse::Any).await?;
    let rest = context.client().await?.rest();
    let response = rest.list_checkpoints(path.run().clone()).await;
    let response = response.map_err(|error| {
        CommandError::from(error).context(&format!("cannot list checkpoints of {}", path.run()))
    })?;
    let text = path.to_string();
    let mut checkpoints = response.checkpoints.into_iter();
    let Some(checkpoint) = checkpoints.find(|one| one.tinker_path == text) else {
        return Err(CommandError::new(Exit::NotFound, format!("checkpoint {path} does not exist"))
            .hint(format!(
                "List the checkpoints of the run with `tinkex checkpoint list --run-id {}`.",
                path.run()
            )));
    };
    let run = rest.get_training_run(path.run().clone(), AccessScope::Owned).await?;
    let now = Timestamp::now();
    let mut table =
        Table::of_properties().title(format!("Checkpoint: {}", checkpoint.checkpoint_id));
    table.property("Checkpoint ID", &checkpoint.checkpoint_id);
    table.property("Type", checkpoint.checkpoint_type.as_str());
    table.property("Tinker Path", &checkpoint.tinker_path);
    if let Some(size) = checkpoint.size_bytes {
        table.property("Size", TableCell::size(size));
    }
    table.property("Public", format::yes_no(checkpoint.public));
    table.property("Created", TableCell::time(checkpoint.time, now));
    table.property("Expires", expiry(&checkpoint, now));
    table.property("Training Run ID", path.run().as_str());
    table.property("LoRA", format::lora(run.is_lora, run.lora_rank));
    table.metadata(checkpoint.user_metadata.as_ref());
    let info = CheckpointInfo {
        checkpoint,
        training_run_id: path.run().clone(),
        is_lora: run.is_lora,
        lora_rank: run.lora_rank,
    };
    context.table(&table, &info)
}
