//! `tinkex run delete`: permanent deletion of training runs.

use clap::Args;
use clap_complete::ArgValueCandidates;
use serde_json::json;
use tinkex::rest::TrainingRun;
use tinkex::{ErrorKind, RestClient};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::reference::{self, RunReference, name_of};

/// Arguments of `tinkex run delete`.
#[derive(Debug, Args)]
pub(crate) struct DeleteRunsArgs {
    /// Runs: id or its start, name, folder or latest
    #[arg(
        value_name = "RUN",
        required = true,
        add = ArgValueCandidates::new(reference::run_candidates)
    )]
    runs: Vec<RunReference>,
    /// Delete without a confirmation prompt
    #[arg(short, long)]
    yes: bool,
}

/// Run to delete, and what is deleted with it.
struct RunTarget {
    run: TrainingRun,
    checkpoints: usize,
    bytes: u64,
}

pub(super) async fn delete(
    context: &mut CommandContext<'_>,
    args: DeleteRunsArgs,
) -> Result<(), CommandError> {
    let rest = context.client().await?.rest();
    let mut targets: Vec<RunTarget> = Vec::new();
    for reference in &args.runs {
        for run in reference.find_all(context, &rest).await? {
            let id = &run.training_run_id;
            if targets.iter().any(|target| target.run.training_run_id == *id) {
                continue;
            }
            let listed = rest.list_checkpoints(id.clone()).await?.checkpoints;
            let bytes = listed.iter().filter_map(|one| one.size_bytes).sum();
            targets.push(RunTarget { checkpoints: listed.len(), bytes, run });
        }
    }
    if !args.yes && !confirm(context, &targets).await? {
        let json = json!({ "deleted": [], "cancelled": true });
        return context.text("Deletion cancelled.", &json);
    }
    let mut deleted = Vec::new();
    for target in &targets {
        if let Err(error) = delete_run(&rest, &target.run).await {
            if deleted.is_empty() {
                return Err(error);
            }
            let count = format::count(deleted.len(), "training run");
            return Err(error.partial(&format!("deleted {count} of {}", targets.len())));
        }
        deleted.push(&target.run.training_run_id);
    }
    let bytes: u64 = targets.iter().map(|target| target.bytes).sum();
    let checkpoints: usize = targets.iter().map(|target| target.checkpoints).sum();
    let text = format!(
        "Deleted {} with {}, {}",
        format::count(deleted.len(), "training run"),
        format::count(checkpoints, "checkpoint"),
        format::bytes(bytes),
    );
    let json = json!({ "deleted": deleted, "checkpoints": checkpoints, "freed_bytes": bytes });
    context.text(&text, &json)
}

/// Shows the runs and asks for confirmation.
async fn confirm(
    context: &mut CommandContext<'_>,
    targets: &[RunTarget],
) -> Result<bool, CommandError> {
    let count = format::count(targets.len(), "training run");
    if context.environment.terminals.input {
        let mut text = format!("Will delete {count}:\n");
        for RunTarget { run, checkpoints, bytes } in targets {
            text += &format!(
                "  - {} ({}{}, {}, {})\n",
                run.training_run_id,
                name_of(run)
                    .map(|name| format!("{}, ", format::escape_controls(name)))
                    .unwrap_or_default(),
                run.base_model,
                format::count(*checkpoints, "checkpoint"),
                format::bytes(*bytes),
            );
        }
        context.prompt(&(text + "\nWARNING: This action is permanent and cannot be undone.\n"));
    }
    let question = format!("Are you sure you want to delete {count} with all checkpoints?");
    context.confirm(&question, "--yes").await
}

async fn delete_run(rest: &RestClient, run: &TrainingRun) -> Result<(), CommandError> {
    let id = &run.training_run_id;
    let shown = name_of(run).unwrap_or(id.as_str());
    let Err(error) = rest.delete_training_run(id.clone()).await else { return Ok(()) };
    // The run was found before, so the server does not know the request.
    if matches!(error.status(), Some(404 | 405 | 501)) {
        let message = format!("cannot delete run {shown}: this server cannot delete training runs");
        let hint = format!(
            "Delete its checkpoints instead: tinkex checkpoint delete --run-id {}",
            format::shell_quote(shown)
        );
        return Err(CommandError::new(Exit::Failed, message).hint(hint));
    }
    let in_use = error.kind() == ErrorKind::Conflict;
    let error = CommandError::from(error).context(&format!("cannot delete run {shown}"));
    if in_use {
        return Err(error.hint(
            "Stop the program that trains the run, or wait: its session ends after 15 minutes \
             without a request.",
        ));
    }
    Err(error)
}
