//! Deleting, which cannot be undone.

use clap::Args;
use clap_complete::ArgValueCandidates;
use futures_util::stream::{self, StreamExt as _};
use serde::Serialize;
use serde_json::json;
use tinkex::rest::Checkpoint;
use tinkex::wire::CheckpointKind;
use tinkex::{ModelId, Timestamp, TinkerPath};

use crate::cache;
use crate::failure::{Exit, Failure};
use crate::human::{self, visible};
use crate::output::Shell;
use crate::progress::{Bar, Unit};

/// How many are under way at once.
const AT_ONCE: usize = 32;

/// What to delete.
#[derive(Debug, Args)]
pub(crate) struct Delete {
    /// Their addresses: tinker://run/weights/name
    #[arg(conflicts_with = "run_id", add = ArgValueCandidates::new(cache::checkpoints))]
    paths: Vec<TinkerPath>,
    /// Those of this run
    #[arg(long, value_name = "ID", add = ArgValueCandidates::new(cache::runs))]
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
pub(super) struct Doomed {
    pub(super) path: TinkerPath,
    known: Option<Checkpoint>,
}

impl Doomed {
    /// Those among a list whose addresses make sense; the server made them, so all do.
    pub(super) fn of(checkpoints: Vec<Checkpoint>) -> Result<Vec<Self>, Failure> {
        let one = |known: Checkpoint| {
            let path = known.tinker_path.parse().map_err(|why: tinkex::wire::InvalidInput| {
                Failure::new(Exit::Failed, format!("the server named a checkpoint oddly: {why}"))
            })?;
            Ok(Self { path, known: Some(known) })
        };
        checkpoints.into_iter().map(one).collect()
    }
}

/// How many bytes they take, as far as it is known.
pub(super) fn total_bytes(doomed: &[Doomed]) -> u64 {
    doomed.iter().filter_map(|one| one.known.as_ref()?.size_bytes).sum()
}

pub(super) async fn delete(shell: &mut Shell<'_>, what: Delete) -> Result<Exit, Failure> {
    what.check()?;
    let doomed = match &what.run_id {
        None => what.paths.iter().map(|path| Doomed { path: path.clone(), known: None }).collect(),
        Some(run) => {
            let rest = shell.client().await?.rest();
            let mut found = rest.list_checkpoints(run.clone()).await?.checkpoints;
            found.retain(|one| what.wants(one));
            Doomed::of(found)?
        }
    };
    if let (true, Some(run)) = (doomed.is_empty(), &what.run_id) {
        let text = format!("No checkpoints found for run {run} matching filters");
        shell.text(&text, &json!({ "deleted_count": 0, "failed": [] }))?;
        return Ok(Exit::Done);
    }
    if what.dry_run {
        return dry(shell, &doomed, "would be deleted");
    }
    if !what.yes && !agreed(shell, &doomed).await? {
        shell.text(
            "Deletion cancelled.",
            &json!({ "deleted_count": 0, "failed": [], "cancelled": true }),
        )?;
        return Ok(Exit::Done);
    }
    carry_out(shell, &doomed).await
}

impl Delete {
    /// What the parser cannot say: `--run-id` and addresses exclude each other.
    fn check(&self) -> Result<(), Failure> {
        if self.run_id.is_some() {
            return Ok(());
        }
        if self.paths.is_empty() {
            return Err(Failure::usage("nothing to delete is named")
                .hint("say PATHS such as tinker://run/weights/name, or --run-id"));
        }
        if self.kind.is_some() || self.before.is_some() || self.after.is_some() {
            let why = "--type, --before and --after choose among the checkpoints of a run";
            return Err(Failure::usage(why).hint("say --run-id"));
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
pub(super) fn dry(shell: &mut Shell<'_>, doomed: &[Doomed], what: &str) -> Result<Exit, Failure> {
    let paths: Vec<_> = doomed.iter().map(|one| one.path.to_string()).collect();
    let bytes = total_bytes(doomed);
    let lines: Vec<_> = doomed.iter().map(line).collect();
    let text = format!(
        "{}{} checkpoint(s) {what}, {} in all",
        lines.iter().map(|line| format!("{line}\n")).collect::<String>(),
        doomed.len(),
        human::bytes(bytes)
    );
    let checkpoints: Vec<_> = doomed.iter().filter_map(|one| one.known.as_ref()).collect();
    shell.text(
        &text,
        &json!({ "dry_run": true, "count": paths.len(), "freed_bytes": bytes,
        "paths": paths, "checkpoints": checkpoints }),
    )?;
    Ok(Exit::Done)
}

fn line(one: &Doomed) -> String {
    match &one.known {
        None => format!("  - {}", one.path),
        Some(known) => {
            let size = human::or_missing(known.size_bytes.map(human::bytes));
            format!("  - {} ({size}, created {})", one.path, human::date(known.time))
        }
    }
}

/// Whether the user wants it, having seen what it is.
pub(super) async fn agreed(shell: &mut Shell<'_>, doomed: &[Doomed]) -> Result<bool, Failure> {
    let count = doomed.len();
    if shell.world.terminals.input {
        let mut text = format!("Will delete {count} checkpoint(s):\n");
        for one in doomed {
            text += &format!("{}\n", line(one));
        }
        text.push('\n');
        if doomed.iter().any(|one| one.known.is_some()) {
            text += &format!("Total size: {}\n", human::bytes(total_bytes(doomed)));
        }
        shell.say(&(text + "WARNING: This action is permanent and cannot be undone.\n"));
    }
    let question = format!("Are you sure you want to delete {count} checkpoint(s)?");
    shell.confirm(&question, "--yes").await
}

#[derive(Serialize)]
struct Refused {
    tinker_path: TinkerPath,
    error: String,
    #[serde(skip)]
    exit: Exit,
}

/// Deletes them, many at a time, and says which could not be.
pub(super) async fn carry_out(shell: &mut Shell<'_>, doomed: &[Doomed]) -> Result<Exit, Failure> {
    let rest = shell.client().await?.rest();
    let count = doomed.len();
    let mut bar = Bar::new(shell, "Deleting checkpoints", Unit::Things, Some(count as u64));
    let calls = doomed.iter().enumerate().map(|(at, one)| {
        let rest = rest.clone();
        async move { (at, rest.delete_checkpoint(&one.path).await) }
    });
    let mut calls = stream::iter(calls).buffer_unordered(AT_ONCE);
    let mut failed: Vec<(usize, Refused)> = Vec::new();
    while let Some((at, ended)) = calls.next().await {
        if let Err(error) = ended {
            let tinker_path = doomed[at].path.clone();
            let said = error.to_string();
            let exit = Failure::from(error).exit();
            failed.push((at, Refused { tinker_path, error: said, exit }));
        }
        bar.advance(shell, 1);
    }
    bar.clear(shell);
    failed.sort_by_key(|(at, _)| *at);
    let failed: Vec<Refused> = failed.into_iter().map(|(_, refused)| refused).collect();
    let done = count - failed.len();
    let freed = total_bytes(doomed);
    let mut json = json!({ "deleted_count": done, "failed": failed });
    if failed.is_empty() && freed > 0 {
        json["freed_bytes"] = freed.into();
    }
    shell.text(&format!("Deleted {done} checkpoint(s)"), &json)?;
    if !failed.is_empty() && !shell.is_json() {
        let mut text = format!("Failed to delete {} checkpoint(s):\n", failed.len());
        for refused in &failed {
            text += &format!("  - {}: {}\n", refused.tinker_path, visible(&refused.error));
        }
        shell.say(&text);
    }
    Ok(match failed.first() {
        None => Exit::Done,
        Some(_) if done > 0 => Exit::Partly,
        Some(first) if failed.iter().all(|one| one.exit == first.exit) => first.exit,
        Some(_) => Exit::Failed,
    })
}
