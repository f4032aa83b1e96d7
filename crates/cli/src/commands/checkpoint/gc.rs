//! `tinkex checkpoint gc`: finds and deletes old checkpoints.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::Duration;

use clap::Args;
use clap_complete::ArgValueCandidates;
use tinkex::CheckpointKind;
use tinkex::rest::Checkpoint;
use tinkex::{Timestamp, TinkerPath};

use crate::args::{duration, whole_number};
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::list::PageArgs;
use crate::reference::{self, RunReference};

use super::delete::{self, DeletionTarget};

/// Arguments of `tinkex checkpoint gc`.
#[derive(Debug, Args)]
pub(crate) struct GcArgs {
    /// Number of newest checkpoints to keep per run and kind
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = whole_number::<usize>)]
    keep_last: usize,
    /// Only checkpoints older than this, such as 30d
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    older_than: Option<Duration>,
    /// Only checkpoints of this run: id, name, folder or latest; repeatable
    #[arg(long, alias = "run", value_name = "RUN", add = ArgValueCandidates::new(reference::run_candidates))]
    run_id: Vec<RunReference>,
    /// Only this kind: weights, sampler_weights or external_weights
    #[arg(long = "type", value_name = "TYPE", value_parser = super::kind)]
    kind: Option<CheckpointKind>,
    /// Include public checkpoints
    #[arg(long)]
    include_public: bool,
    /// Delete the checkpoints instead of listing them
    #[arg(long)]
    delete: bool,
    /// Delete without a confirmation prompt
    #[arg(short, long, requires = "delete")]
    yes: bool,
}

pub(super) async fn gc(
    context: &mut CommandContext<'_>,
    args: GcArgs,
) -> Result<Exit, CommandError> {
    let interrupt = context.environment.interrupt.clone();
    match interrupt.run_until(1, select_targets(context, args)).await? {
        ControlFlow::Continue(targets) => delete::delete_all(context, &targets).await,
        ControlFlow::Break(exit) => Ok(exit),
    }
}

/// Finds the checkpoints to delete and asks for confirmation. Returns the exit status if nothing is
/// to be deleted.
async fn select_targets(
    context: &mut CommandContext<'_>,
    args: GcArgs,
) -> Result<ControlFlow<Exit, Vec<DeletionTarget>>, CommandError> {
    let mut all = Vec::new();
    if args.run_id.is_empty() {
        all = super::list::fetch(context, PageArgs::ALL).await?.0;
    } else {
        for run in &args.run_id {
            all.extend(super::list::of_run(context, run).await?.1);
        }
    }
    let targets = DeletionTarget::from_list(args.choose(all, Timestamp::now()))?;
    if !args.delete || targets.is_empty() {
        return delete::print_plan(context, &targets, "can be deleted (pass --delete)")
            .map(ControlFlow::Break);
    }
    if !args.yes && !delete::confirm(context, &targets).await? {
        context.notice("Nothing was deleted.");
        return delete::print_plan(context, &targets, "can be deleted").map(ControlFlow::Break);
    }
    Ok(ControlFlow::Continue(targets))
}

impl GcArgs {
    /// Returns the checkpoints to delete, oldest first.
    fn choose(&self, mut all: Vec<Checkpoint>, now: Timestamp) -> Vec<Checkpoint> {
        // Newest first, so that those to keep are counted first. The path breaks ties.
        all.sort_by(|a, b| {
            let key = |one: &Checkpoint| (one.time.unix_micros(), one.tinker_path.clone());
            key(b).cmp(&key(a))
        });
        // Pages may overlap. A checkpoint counted twice would use up the number to keep.
        all.dedup_by(|a, b| a.tinker_path == b.tinker_path);
        let mut counts: HashMap<(String, CheckpointKind), usize> = HashMap::new();
        let limit = self.older_than.map(|age| {
            let age = i64::try_from(age.as_micros()).unwrap_or(i64::MAX);
            now.unix_micros().saturating_sub(age)
        });
        all.retain(|one| {
            let run = one.tinker_path.parse().map_or_else(
                |_| one.tinker_path.clone(),
                |path: TinkerPath| path.run().to_string(),
            );
            let count = counts.entry((run, one.checkpoint_type)).or_default();
            *count += 1;
            let is_old = limit.is_none_or(|limit| one.time.unix_micros() < limit);
            *count > self.keep_last
                && is_old
                && self.kind.is_none_or(|kind| one.checkpoint_type == kind)
                && (self.include_public || !one.public)
        });
        all.reverse();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(run: &str, kind: CheckpointKind, day: u32, public: bool) -> Checkpoint {
        let path = format!("tinker://{run}/{}/{day}", kind.segment()).parse().unwrap();
        let time = format!("2026-01-{day:02}T00:00:00Z").parse().unwrap();
        Checkpoint::new(&path, time).size_bytes(Some(10)).public(public)
    }

    fn gc() -> GcArgs {
        GcArgs {
            keep_last: 1,
            older_than: None,
            run_id: Vec::new(),
            kind: None,
            include_public: false,
            delete: false,
            yes: false,
        }
    }

    #[test]
    fn the_newest_per_run_and_kind_and_public_checkpoints_are_kept() {
        use CheckpointKind::{Sampler, Training};
        let all = vec![
            checkpoint("a", Training, 1, false),
            checkpoint("a", Training, 3, false),
            checkpoint("a", Training, 2, true),
            checkpoint("a", Sampler, 1, false),
            checkpoint("b", Training, 1, false),
            checkpoint("b", Training, 9, false),
        ];
        let now = "2026-01-10T00:00:00Z".parse().unwrap();
        let chosen = |gc: GcArgs| {
            let paths = gc.choose(all.clone(), now).into_iter().map(|one| one.tinker_path);
            paths.collect::<Vec<_>>()
        };
        assert_eq!(chosen(gc()), ["tinker://a/weights/1", "tinker://b/weights/1"]);
        let twice = [all.clone(), all.clone()].concat();
        let again = gc().choose(twice, now).into_iter().map(|one| one.tinker_path);
        assert_eq!(
            again.collect::<Vec<_>>(),
            chosen(gc()),
            "a checkpoint listed twice counts once"
        );
        assert_eq!(
            chosen(GcArgs { include_public: true, keep_last: 2, ..gc() }),
            ["tinker://a/weights/1"],
            "public checkpoints count among the newest"
        );
        let young =
            GcArgs { keep_last: 0, older_than: Some(Duration::from_secs(8 * 86_400)), ..gc() };
        assert_eq!(chosen(young).len(), 3);
        let samplers = GcArgs { keep_last: 0, kind: Some(Sampler), ..gc() };
        assert_eq!(chosen(samplers), ["tinker://a/sampler_weights/1"]);
    }
}
