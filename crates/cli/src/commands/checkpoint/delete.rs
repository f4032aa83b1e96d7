//! `tinkex checkpoint delete`: permanent deletion of checkpoints.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::pin::pin;

use clap::Args;
use clap_complete::ArgValueCandidates;
use futures_util::future::{Either, select};
use futures_util::stream::{self, StreamExt as _};
use serde::Serialize;
use serde_json::json;
use tinkex::CheckpointKind;
use tinkex::rest::Checkpoint;
use tinkex::{Timestamp, TinkerPath};

use crate::args::timestamp;
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::progress::{Progress, ProgressUnit};
use crate::reference::{self, CheckpointReference, CheckpointUse, RunReference};

/// Maximum number of concurrent deletions.
const CONCURRENCY: usize = 32;

/// Arguments of `tinkex checkpoint delete`.
#[derive(Debug, Args)]
pub(crate) struct DeleteArgs {
    /// Checkpoints: tinker://RUN/weights/NAME, or RUN/NAME with the name of a run
    #[arg(
        value_name = "CHECKPOINTS",
        conflicts_with = "run_id",
        add = ArgValueCandidates::new(reference::checkpoint_candidates)
    )]
    paths: Vec<CheckpointReference>,
    /// Delete the checkpoints of this run: id, name, folder or latest
    #[arg(long, alias = "run", value_name = "RUN", add = ArgValueCandidates::new(reference::run_candidates))]
    run_id: Option<RunReference>,
    /// With --run-id, only this kind: weights, sampler_weights or external_weights
    #[arg(long = "type", value_name = "TYPE", value_parser = super::kind)]
    kind: Option<CheckpointKind>,
    /// With --run-id, only checkpoints created before this time, such as 2026-07-13 (UTC)
    #[arg(long, value_name = "TIME", value_parser = timestamp)]
    before: Option<Timestamp>,
    /// With --run-id, only checkpoints created after this time
    #[arg(long, value_name = "TIME", value_parser = timestamp)]
    after: Option<Timestamp>,
    /// Delete without a confirmation prompt
    #[arg(short, long)]
    yes: bool,
    /// List the checkpoints without deleting them
    #[arg(long)]
    dry_run: bool,
}

/// Checkpoint to delete.
pub(super) struct DeletionTarget {
    pub(super) path: TinkerPath,
    /// Listed properties; `None` for a path from the command line.
    details: Option<Checkpoint>,
}

impl DeletionTarget {
    /// Parses the paths of listed checkpoints.
    pub(super) fn from_list(checkpoints: Vec<Checkpoint>) -> Result<Vec<Self>, CommandError> {
        let parse = |details: Checkpoint| {
            let path = details.tinker_path.parse().map_err(|error: tinkex::InvalidInput| {
                CommandError::new(
                    Exit::Failed,
                    format!("the server returned an invalid checkpoint path: {error}"),
                )
            })?;
            Ok(Self { path, details: Some(details) })
        };
        checkpoints.into_iter().map(parse).collect()
    }
}

/// Returns the total size in bytes of the checkpoints whose size is known.
pub(super) fn total_bytes(targets: &[DeletionTarget]) -> u64 {
    targets.iter().filter_map(|one| one.details.as_ref()?.size_bytes).sum()
}

pub(super) async fn delete(
    context: &mut CommandContext<'_>,
    args: DeleteArgs,
) -> Result<Exit, CommandError> {
    args.check()?;
    let interrupt = context.environment.interrupt.clone();
    match interrupt.run_until(1, select_targets(context, args)).await? {
        ControlFlow::Continue(targets) => delete_all(context, &targets).await,
        ControlFlow::Break(exit) => Ok(exit),
    }
}

/// Finds the checkpoints to delete and asks for confirmation. Returns the exit status if nothing is
/// to be deleted.
async fn select_targets(
    context: &mut CommandContext<'_>,
    args: DeleteArgs,
) -> Result<ControlFlow<Exit, Vec<DeletionTarget>>, CommandError> {
    let targets = match &args.run_id {
        None => {
            let mut targets = Vec::new();
            let mut seen = HashSet::new();
            for reference in &args.paths {
                let path = reference.resolve(context, CheckpointUse::Any).await?;
                if seen.insert(path.clone()) {
                    targets.push(DeletionTarget { path, details: None });
                }
            }
            targets
        }
        Some(run) => {
            let (_, mut found) = super::list::of_run(context, run).await?;
            found.retain(|checkpoint| args.matches(checkpoint));
            DeletionTarget::from_list(found)?
        }
    };
    if targets.is_empty()
        && let Some(run) = &args.run_id
    {
        let text = format!("No checkpoints found for run {run} matching filters");
        context.text(&text, &json!({ "deleted_count": 0, "failed": [] }))?;
        return Ok(ControlFlow::Break(Exit::Success));
    }
    if args.dry_run {
        return print_plan(context, &targets, "would be deleted").map(ControlFlow::Break);
    }
    if !args.yes && !confirm(context, &targets).await? {
        context.text(
            "Deletion cancelled.",
            &json!({ "deleted_count": 0, "failed": [], "cancelled": true }),
        )?;
        return Ok(ControlFlow::Break(Exit::Success));
    }
    Ok(ControlFlow::Continue(targets))
}

impl DeleteArgs {
    /// Checks the rules that the parser cannot express.
    fn check(&self) -> Result<(), CommandError> {
        if self.run_id.is_some() {
            return Ok(());
        }
        if self.paths.is_empty() {
            return Err(CommandError::usage("no checkpoints given")
                .hint("Pass paths such as tinker://RUN/weights/NAME, or --run-id RUN."));
        }
        if self.kind.is_some() || self.before.is_some() || self.after.is_some() {
            let message = "--type, --before and --after require --run-id";
            return Err(CommandError::usage(message).hint("Pass --run-id RUN."));
        }
        Ok(())
    }

    fn matches(&self, checkpoint: &Checkpoint) -> bool {
        let created = checkpoint.time.unix_micros();
        self.kind.is_none_or(|kind| checkpoint.checkpoint_type == kind)
            && self.before.is_none_or(|before| created < before.unix_micros())
            && self.after.is_none_or(|after| created > after.unix_micros())
    }
}

/// Prints the checkpoints that would be deleted, and a summary: their number, then `status`, then their
/// size.
pub(super) fn print_plan(
    context: &mut CommandContext<'_>,
    targets: &[DeletionTarget],
    status: &str,
) -> Result<Exit, CommandError> {
    let paths: Vec<_> = targets.iter().map(|one| one.path.to_string()).collect();
    let bytes = total_bytes(targets);
    let lines: Vec<_> = targets.iter().map(describe).collect();
    let text = format!(
        "{}{} checkpoint(s) {status}, {} in total",
        lines.iter().map(|line| format!("{line}\n")).collect::<String>(),
        targets.len(),
        format::bytes(bytes)
    );
    let checkpoints: Vec<_> = targets.iter().filter_map(|one| one.details.as_ref()).collect();
    context.text(
        &text,
        &json!({ "dry_run": true, "count": paths.len(), "freed_bytes": bytes,
        "paths": paths, "checkpoints": checkpoints }),
    )?;
    Ok(Exit::Success)
}

fn describe(target: &DeletionTarget) -> String {
    match &target.details {
        None => format!("  - {}", target.path),
        Some(details) => {
            let size = format::or_na(details.size_bytes.map(format::bytes));
            format!("  - {} ({size}, created {})", target.path, format::date(details.time))
        }
    }
}

/// Shows the checkpoints and asks for confirmation.
pub(super) async fn confirm(
    context: &mut CommandContext<'_>,
    targets: &[DeletionTarget],
) -> Result<bool, CommandError> {
    let count = targets.len();
    if context.environment.terminals.input {
        let mut text = format!("Will delete {count} checkpoint(s):\n");
        for one in targets {
            text += &format!("{}\n", describe(one));
        }
        text.push('\n');
        if targets.iter().any(|one| one.details.is_some()) {
            text += &format!("Total size: {}\n", format::bytes(total_bytes(targets)));
        }
        context.prompt(&(text + "WARNING: This action is permanent and cannot be undone.\n"));
    }
    let question = format!("Are you sure you want to delete {count} checkpoint(s)?");
    context.confirm(&question, "--yes").await
}

/// Checkpoint that could not be deleted.
#[derive(Serialize)]
struct FailedDeletion {
    tinker_path: TinkerPath,
    error: String,
    #[serde(skip)]
    cause: CommandError,
}

/// Deletes the checkpoints concurrently and reports which deletions failed.
///
/// After an interruption it starts no further deletions but waits for the pending ones, so that the
/// report is complete. A second interruption ends the wait.
pub(super) async fn delete_all(
    context: &mut CommandContext<'_>,
    targets: &[DeletionTarget],
) -> Result<Exit, CommandError> {
    let interrupt = context.environment.interrupt.clone();
    let rest = interrupt.run_until(1, context.client()).await?.rest();
    let total = Some(targets.len() as u64);
    let progress = Progress::new(context, "Deleting checkpoints", ProgressUnit::Items, total);
    let requests = targets.iter().enumerate().map(|(index, target)| {
        let rest = rest.clone();
        async move { (index, rest.delete_checkpoint(&target.path).await) }
    });
    let requests = stream::iter(requests).take_until(interrupt.pressed(1));
    let mut requests = pin!(requests.buffer_unordered(CONCURRENCY));
    let mut interrupted_twice = pin!(interrupt.pressed(2));
    let mut results: Vec<_> = targets.iter().map(|_| None).collect();
    while let Either::Left((Some((index, result)), _)) =
        select(requests.next(), interrupted_twice.as_mut()).await
    {
        results[index] = Some(result);
        progress.advance(1);
    }
    drop(progress);
    let mut deleted = Vec::new();
    let mut failed = Vec::new();
    let mut remaining = Vec::new();
    for (target, result) in targets.iter().zip(results) {
        let path = &target.path;
        match result {
            Some(Ok(_)) => deleted.push(path),
            Some(Err(error)) => failed.push(FailedDeletion {
                tinker_path: path.clone(),
                error: error.to_string(),
                cause: error.into(),
            }),
            None => remaining.push(path),
        }
    }
    let mut json = json!({ "deleted_count": deleted.len(), "failed": failed });
    let mut text = format!("Deleted {} checkpoint(s)", deleted.len());
    if !remaining.is_empty() {
        json["deleted"] = json!(deleted);
        json["not_deleted"] = json!(remaining);
        text += &deleted.iter().map(|path| format!("\n  - {path}")).collect::<String>();
    } else if failed.is_empty() && total_bytes(targets) > 0 {
        json["freed_bytes"] = total_bytes(targets).into();
    }
    // If nothing was deleted, there is only an error and no result.
    if !deleted.is_empty() {
        context.text(&text, &json)?;
    }
    match (remaining.len(), failed.is_empty()) {
        (0, true) => Ok(Exit::Success),
        (0, false) => Err(deletion_error(deleted.len(), failed)),
        (count, _) => {
            let pending = if interrupt.count() > 1 { " or pending" } else { "" };
            let message = format!(
                "interrupted: {count} of {} checkpoint(s) not deleted{pending}{}",
                targets.len(),
                describe_failures(&failed)
            );
            Err(CommandError::new(Exit::Interrupted, message))
        }
    }
}

/// Combines the failed deletions into one error. The exit status is the status of the failures if they
/// agree and nothing was deleted.
fn deletion_error(deleted: usize, mut failed: Vec<FailedDeletion>) -> CommandError {
    if failed.len() == 1
        && let Some(FailedDeletion { tinker_path, cause, .. }) = failed.pop()
    {
        let operation = format!("cannot delete {tinker_path}");
        return if deleted > 0 { cause.partial(&operation) } else { cause.context(&operation) };
    }
    let first = failed.first().map_or(Exit::Failed, |one| one.cause.exit());
    let exit = match deleted {
        0 if failed.iter().all(|one| one.cause.exit() == first) => first,
        0 => Exit::Failed,
        _ => Exit::Partial,
    };
    let list = describe_failures(&failed);
    CommandError::new(exit, format!("cannot delete {} checkpoint(s){list}", failed.len()))
}

/// Returns one line per failure, each after a line break.
fn describe_failures(failed: &[FailedDeletion]) -> String {
    failed.iter().map(|one| format!("\n  - {}: {}", one.tinker_path, one.error)).collect()
}
