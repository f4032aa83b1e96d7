//! Deleting, which cannot be undone.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::pin::pin;

use clap::Args;
use clap_complete::ArgValueCandidates;
use futures_util::future::{Either, select};
use futures_util::stream::{self, StreamExt as _};
use serde::Serialize;
use serde_json::json;
use tinkex::rest::Checkpoint;
use tinkex::wire::CheckpointKind;
use tinkex::{ModelId, Timestamp, TinkerPath};

use crate::error::{CommandError, Exit};
use crate::format;
use crate::id_cache;
use crate::output::Shell;
use crate::progress::{Progress, ProgressUnit};

/// How many are under way at once.
const AT_ONCE: usize = 32;

/// What to delete.
#[derive(Debug, Args)]
pub(crate) struct DeleteArgs {
    /// Their addresses: tinker://run/weights/name
    #[arg(conflicts_with = "run_id", add = ArgValueCandidates::new(id_cache::checkpoints))]
    paths: Vec<TinkerPath>,
    /// Those of this run
    #[arg(long, value_name = "ID", add = ArgValueCandidates::new(id_cache::runs))]
    run_id: Option<ModelId>,
    /// Only this kind: weights, sampler_weights or external_weights
    #[arg(long = "type", value_name = "TYPE", value_parser = super::kind)]
    kind: Option<CheckpointKind>,
    /// Only those made before this, such as 2026-07-13; UTC unless it says otherwise
    #[arg(long, value_name = "TIME", value_parser = moment)]
    before: Option<Timestamp>,
    /// Only those made after this
    #[arg(long, value_name = "TIME", value_parser = moment)]
    after: Option<Timestamp>,
    /// Without a question
    #[arg(short, long)]
    yes: bool,
    /// Only show what would go
    #[arg(long)]
    dry_run: bool,
}

fn moment(text: &str) -> Result<Timestamp, String> {
    text.parse().map_err(|_| "say a time such as 2026-07-13 or 2026-07-13T12:00:00Z".to_owned())
}

/// One that is to go: its address, and what is known about it.
pub(super) struct DeletionTarget {
    pub(super) path: TinkerPath,
    known: Option<Checkpoint>,
}

impl DeletionTarget {
    /// Those among a list whose addresses make sense; the server made them, so all do.
    pub(super) fn of(checkpoints: Vec<Checkpoint>) -> Result<Vec<Self>, CommandError> {
        let one = |known: Checkpoint| {
            let path = known.tinker_path.parse().map_err(|why: tinkex::wire::InvalidInput| {
                CommandError::new(
                    Exit::Failed,
                    format!("the server named a checkpoint oddly: {why}"),
                )
            })?;
            Ok(Self { path, known: Some(known) })
        };
        checkpoints.into_iter().map(one).collect()
    }
}

/// How many bytes they take, as far as it is known.
pub(super) fn total_bytes(targets: &[DeletionTarget]) -> u64 {
    targets.iter().filter_map(|one| one.known.as_ref()?.size_bytes).sum()
}

pub(super) async fn delete(shell: &mut Shell<'_>, what: DeleteArgs) -> Result<Exit, CommandError> {
    what.check()?;
    let interrupt = shell.environment.interrupt.clone();
    match interrupt.stops(1, find(shell, what)).await? {
        ControlFlow::Continue(targets) => carry_out(shell, &targets).await,
        ControlFlow::Break(exit) => Ok(exit),
    }
}

/// Those that are to go, if any are.
async fn find(
    shell: &mut Shell<'_>,
    what: DeleteArgs,
) -> Result<ControlFlow<Exit, Vec<DeletionTarget>>, CommandError> {
    let targets = match &what.run_id {
        None => {
            let mut seen = HashSet::new();
            let once = what.paths.iter().filter(|path| seen.insert(path.to_string()));
            once.map(|path| DeletionTarget { path: path.clone(), known: None }).collect()
        }
        Some(run) => {
            let rest = shell.client().await?.rest();
            let mut found = rest.list_checkpoints(run.clone()).await?.checkpoints;
            found.retain(|one| what.wants(one));
            DeletionTarget::of(found)?
        }
    };
    if let (true, Some(run)) = (targets.is_empty(), &what.run_id) {
        let text = format!("No checkpoints found for run {run} matching filters");
        shell.text(&text, &json!({ "deleted_count": 0, "failed": [] }))?;
        return Ok(ControlFlow::Break(Exit::Success));
    }
    if what.dry_run {
        return dry(shell, &targets, "would be deleted").map(ControlFlow::Break);
    }
    if !what.yes && !agreed(shell, &targets).await? {
        shell.text(
            "Deletion cancelled.",
            &json!({ "deleted_count": 0, "failed": [], "cancelled": true }),
        )?;
        return Ok(ControlFlow::Break(Exit::Success));
    }
    Ok(ControlFlow::Continue(targets))
}

impl DeleteArgs {
    /// What the parser cannot say: `--run-id` and addresses exclude each other.
    fn check(&self) -> Result<(), CommandError> {
        if self.run_id.is_some() {
            return Ok(());
        }
        if self.paths.is_empty() {
            return Err(CommandError::usage("nothing to delete is named")
                .hint("say PATHS such as tinker://run/weights/name, or --run-id"));
        }
        if self.kind.is_some() || self.before.is_some() || self.after.is_some() {
            let why = "--type, --before and --after choose among the checkpoints of a run";
            return Err(CommandError::usage(why).hint("say --run-id"));
        }
        Ok(())
    }

    fn wants(&self, one: &Checkpoint) -> bool {
        let at = one.time.unix_micros();
        self.kind.is_none_or(|kind| one.checkpoint_type == kind)
            && self.before.is_none_or(|before| at < before.unix_micros())
            && self.after.is_none_or(|after| at > after.unix_micros())
    }
}

/// Shows what would go.
pub(super) fn dry(
    shell: &mut Shell<'_>,
    targets: &[DeletionTarget],
    what: &str,
) -> Result<Exit, CommandError> {
    let paths: Vec<_> = targets.iter().map(|one| one.path.to_string()).collect();
    let bytes = total_bytes(targets);
    let lines: Vec<_> = targets.iter().map(line).collect();
    let text = format!(
        "{}{} checkpoint(s) {what}, {} in all",
        lines.iter().map(|line| format!("{line}\n")).collect::<String>(),
        targets.len(),
        format::bytes(bytes)
    );
    let checkpoints: Vec<_> = targets.iter().filter_map(|one| one.known.as_ref()).collect();
    shell.text(
        &text,
        &json!({ "dry_run": true, "count": paths.len(), "freed_bytes": bytes,
        "paths": paths, "checkpoints": checkpoints }),
    )?;
    Ok(Exit::Success)
}

fn line(one: &DeletionTarget) -> String {
    match &one.known {
        None => format!("  - {}", one.path),
        Some(known) => {
            let size = format::or_missing(known.size_bytes.map(format::bytes));
            format!("  - {} ({size}, created {})", one.path, format::date(known.time))
        }
    }
}

/// Whether the user wants it, having seen what it is.
pub(super) async fn agreed(
    shell: &mut Shell<'_>,
    targets: &[DeletionTarget],
) -> Result<bool, CommandError> {
    let count = targets.len();
    if shell.environment.terminals.input {
        let mut text = format!("Will delete {count} checkpoint(s):\n");
        for one in targets {
            text += &format!("{}\n", line(one));
        }
        text.push('\n');
        if targets.iter().any(|one| one.known.is_some()) {
            text += &format!("Total size: {}\n", format::bytes(total_bytes(targets)));
        }
        shell.say(&(text + "WARNING: This action is permanent and cannot be undone.\n"));
    }
    let question = format!("Are you sure you want to delete {count} checkpoint(s)?");
    shell.confirm(&question, "--yes").await
}

#[derive(Serialize)]
struct FailedDeletion {
    tinker_path: TinkerPath,
    error: String,
    #[serde(skip)]
    why: CommandError,
}

/// Deletes them, many at a time, and says which could not be.
///
/// Once it is interrupted it starts no more, and waits for those under way, so that it can say what
/// is gone; a second time it does not wait.
pub(super) async fn carry_out(
    shell: &mut Shell<'_>,
    targets: &[DeletionTarget],
) -> Result<Exit, CommandError> {
    let interrupt = shell.environment.interrupt.clone();
    let rest = interrupt.stops(1, shell.client()).await?.rest();
    let mut bar = Progress::new(
        shell,
        "Deleting checkpoints",
        ProgressUnit::Things,
        Some(targets.len() as u64),
    );
    let calls = targets.iter().enumerate().map(|(at, one)| {
        let rest = rest.clone();
        async move { (at, rest.delete_checkpoint(&one.path).await) }
    });
    let calls = stream::iter(calls).take_until(interrupt.pressed(1));
    let mut calls = pin!(calls.buffer_unordered(AT_ONCE));
    let mut hurry = pin!(interrupt.pressed(2));
    let mut ends: Vec<_> = targets.iter().map(|_| None).collect();
    while let Either::Left((Some((at, end)), _)) = select(calls.next(), hurry.as_mut()).await {
        ends[at] = Some(end);
        bar.advance(shell, 1);
    }
    bar.clear(shell);
    let (mut gone, mut failed, mut left) = (Vec::new(), Vec::new(), Vec::new());
    for (one, end) in targets.iter().zip(ends) {
        let path = &one.path;
        match end {
            Some(Ok(_)) => gone.push(path),
            Some(Err(error)) => {
                let (tinker_path, said) = (path.clone(), error.to_string());
                failed.push(FailedDeletion { tinker_path, error: said, why: error.into() });
            }
            None => left.push(path),
        }
    }
    let mut json = json!({ "deleted_count": gone.len(), "failed": failed });
    let mut text = format!("Deleted {} checkpoint(s)", gone.len());
    if !left.is_empty() {
        json["deleted"] = json!(gone);
        json["not_deleted"] = json!(left);
        text += &gone.iter().map(|path| format!("\n  - {path}")).collect::<String>();
    } else if failed.is_empty() && total_bytes(targets) > 0 {
        json["freed_bytes"] = total_bytes(targets).into();
    }
    // Where nothing was done there is no result.
    if !gone.is_empty() {
        shell.text(&text, &json)?;
    }
    match (left.len(), failed.is_empty()) {
        (0, true) => Ok(Exit::Success),
        (0, false) => Err(refusal(gone.len(), failed)),
        (count, _) => {
            let sure = if interrupt.count() > 1 { ", or are being deleted now" } else { "" };
            let why = format!(
                "interrupted: {count} of {} checkpoint(s) are not deleted{sure}{}",
                targets.len(),
                list(&failed)
            );
            Err(CommandError::new(Exit::Interrupted, why))
        }
    }
}

/// That some could not be deleted, and why.
fn refusal(done: usize, mut failed: Vec<FailedDeletion>) -> CommandError {
    if failed.len() == 1
        && let Some(FailedDeletion { tinker_path, why, .. }) = failed.pop()
    {
        let what = format!("{tinker_path} was not deleted");
        return if done > 0 { why.partly(&what) } else { why.during(&what) };
    }
    let first = failed.first().map_or(Exit::Failed, |one| one.why.exit());
    let exit = match done {
        0 if failed.iter().all(|one| one.why.exit() == first) => first,
        0 => Exit::Failed,
        _ => Exit::Partial,
    };
    CommandError::new(
        exit,
        format!("{} checkpoint(s) were not deleted{}", failed.len(), list(&failed)),
    )
}

/// Each on a line of its own, below what is said about them.
fn list(failed: &[FailedDeletion]) -> String {
    failed.iter().map(|one| format!("\n  - {}: {}", one.tinker_path, one.error)).collect()
}
