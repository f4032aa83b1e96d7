//! Which checkpoints there are.

use std::collections::HashSet;

use clap::Args;
use clap_complete::ArgValueCandidates;
use serde::Serialize;
use tinkex::rest::{AccessScope, Checkpoint, ListUserCheckpoints};
use tinkex::{ModelId, Timestamp, TinkerPath};

use crate::error::{CommandError, Exit};
use crate::format;
use crate::id_cache;
use crate::list::{self, ListColumn, PageArgs, SortKey, ViewArgs};
use crate::output::Shell;
use crate::table::Table;

/// Which checkpoints to list.
#[derive(Debug, Args)]
pub(crate) struct ListCheckpointsArgs {
    /// All of this run, whatever the limit
    #[arg(long, value_name = "ID", add = ArgValueCandidates::new(id_cache::runs))]
    run_id: Option<ModelId>,
    #[command(flatten)]
    page: PageArgs,
    #[command(flatten)]
    view: ViewArgs,
}

/// How many checkpoints one request brings: the query is slow, so few and large.
const BATCH: u64 = 1000;

pub(super) const COLUMNS: [ListColumn<Checkpoint>; 7] = [
    ListColumn {
        name: "id",
        header: "Checkpoint ID",
        usual: true,
        cell: |checkpoint, _| checkpoint.checkpoint_id.clone(),
        key: |checkpoint| SortKey::text(&checkpoint.checkpoint_id),
    },
    ListColumn {
        name: "type",
        header: "Type",
        usual: true,
        cell: |checkpoint, _| checkpoint.checkpoint_type.as_str().to_owned(),
        key: |checkpoint| SortKey::text(checkpoint.checkpoint_type.as_str()),
    },
    ListColumn {
        name: "size",
        header: "Size",
        usual: true,
        cell: |checkpoint, _| format::or_missing(checkpoint.size_bytes.map(format::bytes)),
        key: |checkpoint| SortKey::size(checkpoint.size_bytes),
    },
    ListColumn {
        name: "public",
        header: "Public",
        usual: true,
        cell: |checkpoint, _| format::yes(checkpoint.public).to_owned(),
        key: |checkpoint| SortKey::Number(checkpoint.public.into()),
    },
    ListColumn {
        name: "created",
        header: "Created",
        usual: true,
        cell: |checkpoint, now| format::time(checkpoint.time, now),
        key: |checkpoint| SortKey::time(Some(checkpoint.time)),
    },
    ListColumn {
        name: "expires",
        header: "Expires",
        usual: true,
        cell: expiry,
        key: |checkpoint| SortKey::time(checkpoint.expires_at),
    },
    ListColumn {
        name: "path",
        header: "Path",
        usual: true,
        cell: |checkpoint, _| checkpoint.tinker_path.clone(),
        key: |checkpoint| SortKey::text(&checkpoint.tinker_path),
    },
];

fn expiry(checkpoint: &Checkpoint, now: Timestamp) -> String {
    checkpoint.expires_at.map_or_else(|| "Never".to_owned(), |time| format::time(time, now))
}

pub(super) async fn list(
    shell: &mut Shell<'_>,
    what: ListCheckpointsArgs,
) -> Result<(), CommandError> {
    #[derive(Serialize)]
    struct Listed {
        #[serde(skip_serializing_if = "Option::is_none")]
        run_id: Option<ModelId>,
        checkpoints: Vec<Checkpoint>,
        total: u64,
        shown: usize,
    }

    let shown = what.view.of(shell, &COLUMNS)?;
    let (mut rows, total) = match &what.run_id {
        Some(run) => {
            let rows =
                shell.client().await?.rest().list_checkpoints(run.clone()).await?.checkpoints;
            let total = rows.len() as u64;
            (rows, total)
        }
        None => all(shell, what.page).await?,
    };
    let paths = rows.iter().map(|one| one.tinker_path.clone());
    id_cache::remember(&shell.environment.variables, id_cache::IdKind::Checkpoint, paths);
    shown.sort(&mut rows);
    let mut title = list::title(rows.len(), total, "checkpoint", "checkpoints");
    if let Some(run) = &what.run_id {
        title += &format!(" for run {run}");
    }
    let table = shown.table(&rows, Timestamp::now()).title(title).whole("Path");
    let count = rows.len();
    shell.table(&table, &Listed { run_id: what.run_id, checkpoints: rows, total, shown: count })
}

/// The user's checkpoints, and how many there are.
pub(super) async fn all(
    shell: &mut Shell<'_>,
    page: PageArgs,
) -> Result<(Vec<Checkpoint>, u64), CommandError> {
    let rest = shell.client().await?.rest();
    let found = list::pages(shell, "checkpoints", page, BATCH, |offset, limit| {
        let rest = rest.clone();
        async move {
            let reply = rest
                .list_user_checkpoints(&ListUserCheckpoints::default().limit(limit).offset(offset))
                .await?;
            Ok((reply.checkpoints, reply.cursor.map(|cursor| cursor.total_count)))
        }
    })
    .await?;
    // One that is made between two pages moves others to the next, where they come again.
    let (mut rows, mut seen) = (found.rows, HashSet::new());
    rows.retain(|one| seen.insert(one.tinker_path.clone()));
    Ok((rows, found.total))
}

pub(super) async fn info(shell: &mut Shell<'_>, path: &TinkerPath) -> Result<(), CommandError> {
    #[derive(Serialize)]
    struct Info {
        #[serde(flatten)]
        checkpoint: Checkpoint,
        training_run_id: ModelId,
        is_lora: bool,
        lora_rank: Option<u32>,
    }

    let rest = shell.client().await?.rest();
    let all = rest.list_checkpoints(path.run().clone()).await;
    let all = all.map_err(|why| {
        CommandError::from(why).during(&format!("no checkpoints of {}", path.run()))
    })?;
    let all = all.checkpoints;
    let address = path.to_string();
    let Some(checkpoint) = all.into_iter().find(|one| one.tinker_path == address) else {
        return Err(CommandError::new(Exit::NotFound, format!("there is no checkpoint {address}"))
            .hint(format!(
                "`tinkex checkpoint list --run-id {}` shows those of the run",
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
        table.property("Size", format::bytes(size));
    }
    table.property("Public", format::yes(checkpoint.public));
    table.property("Created", format::time(checkpoint.time, now));
    table.property("Expires", expiry(&checkpoint, now));
    table.property("Training Run ID", path.run().as_str());
    table.property("LoRA", format::lora(run.is_lora, run.lora_rank));
    table.metadata(checkpoint.user_metadata.as_ref());
    let info = Info {
        checkpoint,
        training_run_id: path.run().clone(),
        is_lora: run.is_lora,
        lora_rank: run.lora_rank,
    };
    shell.table(&table, &info)
}
