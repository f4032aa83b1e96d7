//! `tinkex checkpoint`: lists, downloads, publishes and deletes checkpoints.

mod attributes;
mod copy;
mod delete;
mod download;
mod gc;
mod list;
mod push;

use clap::Subcommand;
use clap_complete::ArgValueCandidates;
use tinkex::CheckpointKind;

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::reference::{self, CheckpointReference};

use super::save;

#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List checkpoints, newest first
    #[command(after_help = "Examples:
  tinkex checkpoint list
  tinkex checkpoint list --run-id animals                the checkpoints of the run animals
  tinkex checkpoint list --run-id latest --sort -size
  tinkex checkpoint list --limit 0 --columns path --format plain

Columns: id, type, size, public, created, expires, path.")]
    List(list::ListCheckpointsArgs),
    /// Show a checkpoint
    #[command(after_help = "Examples:
  tinkex checkpoint info tinker://RUN/weights/0001
  tinkex checkpoint info animals/weights/step-30         a checkpoint of the run animals")]
    Info {
        /// Checkpoint: tinker://RUN/weights/NAME, or RUN/NAME with the name of a run
        #[arg(value_name = "CHECKPOINT", add = ArgValueCandidates::new(reference::checkpoint_candidates))]
        path: CheckpointReference,
    },
    /// Make a checkpoint public
    #[command(after_help = "Example:
  tinkex checkpoint publish tinker://RUN/sampler_weights/final")]
    Publish {
        /// Checkpoint: tinker://RUN/weights/NAME, or RUN/NAME with the name of a run
        #[arg(value_name = "CHECKPOINT", add = ArgValueCandidates::new(reference::checkpoint_candidates))]
        path: CheckpointReference,
    },
    /// Make a public checkpoint private again
    #[command(after_help = "Example:
  tinkex checkpoint unpublish tinker://RUN/sampler_weights/final")]
    Unpublish {
        /// Checkpoint: tinker://RUN/weights/NAME, or RUN/NAME with the name of a run
        #[arg(value_name = "CHECKPOINT", add = ArgValueCandidates::new(reference::checkpoint_candidates))]
        path: CheckpointReference,
    },
    /// Set or remove the expiry of a checkpoint
    #[command(after_help = "Examples:
  tinkex checkpoint set-ttl tinker://RUN/weights/0001 --ttl 7d
  tinkex checkpoint set-ttl tinker://RUN/weights/0001 --remove")]
    SetTtl(attributes::SetTtlArgs),
    /// Delete checkpoints permanently
    #[command(after_help = "Examples:
  tinkex checkpoint delete tinker://RUN/weights/0001
  tinkex checkpoint delete --run-id RUN --type weights --before 2026-01-01 --dry-run
  tinkex checkpoint delete --run-id RUN --yes")]
    Delete(delete::DeleteArgs),
    /// Download the files of a checkpoint
    #[command(
        after_help = "A training checkpoint is exported first. Files are downloaded in parallel to NAME.part, which is
renamed when all are complete. Run the command again to continue an interrupted download.

Examples:
  tinkex checkpoint download tinker://RUN/external_weights/hf
  tinkex checkpoint download animals                     the latest checkpoint of the run animals
  tinkex checkpoint download tinker://RUN/weights/0001 --output models
  tinkex checkpoint download tinker://RUN/weights/0001 --to adapter
  tinkex checkpoint download tinker://RUN/weights/0001 --include '*.json'"
    )]
    Download(download::DownloadArgs),
    /// Save a new, untrained adapter for sampling
    #[command(after_help = "Example:
  tinkex checkpoint save --base-model Qwen/Qwen3-8B --rank 16 --name start")]
    Save(save::SaveArgs),
    /// Copy a checkpoint to a project
    #[command(after_help = "Examples:
  tinkex checkpoint copy tinker://RUN/weights/0001 --project-id proj-2
  tinkex checkpoint copy tinker://RUN/sampler_weights/final --ttl 30d")]
    Copy(copy::CopyArgs),
    /// Print download URLs of external weights
    #[command(after_help = "The URLs need no credential and expire.

Example:
  tinkex checkpoint urls tinker://RUN/external_weights/hf --format plain")]
    Urls {
        /// Checkpoint: tinker://RUN/external_weights/NAME, or RUN/NAME with the name of a run
        #[arg(value_name = "CHECKPOINT", add = ArgValueCandidates::new(reference::checkpoint_candidates))]
        path: CheckpointReference,
    },
    /// Upload a checkpoint to a repository of the Hugging Face hub
    #[command(after_help = "Examples:
  tinkex checkpoint push-hf tinker://RUN/weights/final --repo me/my-adapter
  tinkex checkpoint push-hf tinker://RUN/external_weights/hf --repo me/x --public --create-pr")]
    PushHf(push::PushArgs),
    /// List old checkpoints, or delete them with --delete
    #[command(
        after_help = "Keeps the newest checkpoints of every run and kind, and public ones. Deletes nothing without
--delete.

Examples:
  tinkex checkpoint gc --keep-last 3                     list what would be deleted
  tinkex checkpoint gc --older-than 30d --type weights
  tinkex checkpoint gc --run-id animals --keep-last 1 --delete --yes"
    )]
    Gc(gc::GcArgs),
}

impl CheckpointCommand {
    /// Returns whether the command handles interruptions itself.
    pub(super) fn handles_interrupts(&self) -> bool {
        matches!(self, Self::Delete(_) | Self::Gc(_))
    }
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    command: CheckpointCommand,
) -> Result<Exit, CommandError> {
    match command {
        CheckpointCommand::List(args) => list::list(context, args).await?,
        CheckpointCommand::Info { path } => list::info(context, &path).await?,
        CheckpointCommand::Publish { path } => attributes::publish(context, &path, true).await?,
        CheckpointCommand::Unpublish { path } => attributes::publish(context, &path, false).await?,
        CheckpointCommand::SetTtl(args) => attributes::set_ttl(context, args).await?,
        CheckpointCommand::Delete(args) => return delete::delete(context, args).await,
        CheckpointCommand::Download(args) => download::download(context, args).await?,
        CheckpointCommand::Save(args) => save::run(context, args).await?,
        CheckpointCommand::Copy(args) => copy::copy(context, args).await?,
        CheckpointCommand::Urls { path } => download::print_urls(context, &path).await?,
        CheckpointCommand::PushHf(args) => push::push(context, args).await?,
        CheckpointCommand::Gc(args) => return gc::gc(context, args).await,
    }
    Ok(Exit::Success)
}

/// Parses a kind of checkpoint, as in paths or as in lists.
fn kind(text: &str) -> Result<CheckpointKind, String> {
    let all = CheckpointKind::ALL;
    all.into_iter().find(|kind| kind.segment() == text || kind.as_str() == text).ok_or_else(|| {
        let words: Vec<_> = all.iter().map(|kind| kind.segment()).collect();
        format!("expected one of {}", words.join(", "))
    })
}
