//! Checkpoints.

mod attributes;
mod delete;
mod download;
mod gc;
mod list;
mod push;

use clap::Subcommand;
use clap_complete::ArgValueCandidates;
use tinkex::TinkerPath;
use tinkex::wire::CheckpointKind;

use crate::error::{CommandError, Exit};
use crate::id_cache;
use crate::output::Shell;

use super::save;

#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List checkpoints, newest first
    #[command(after_help = "Examples:
  tinkex checkpoint list
  tinkex checkpoint list --run-id RUN --sort -size
  tinkex checkpoint list --limit 0 --columns path --format plain

Columns: id, type, size, public, created, expires, path.")]
    List(list::ListCheckpointsArgs),
    /// Show one checkpoint
    #[command(after_help = "Example:
  tinkex checkpoint info tinker://RUN/weights/0001")]
    Info {
        /// Its address: tinker://run/weights/name
        #[arg(add = ArgValueCandidates::new(id_cache::checkpoints))]
        path: TinkerPath,
    },
    /// Let everyone read a checkpoint
    #[command(after_help = "Example:
  tinkex checkpoint publish tinker://RUN/sampler_weights/final")]
    Publish {
        /// Its address: tinker://run/weights/name
        #[arg(add = ArgValueCandidates::new(id_cache::checkpoints))]
        path: TinkerPath,
    },
    /// Let only its owner read a checkpoint again
    #[command(after_help = "Example:
  tinkex checkpoint unpublish tinker://RUN/sampler_weights/final")]
    Unpublish {
        /// Its address: tinker://run/weights/name
        #[arg(add = ArgValueCandidates::new(id_cache::checkpoints))]
        path: TinkerPath,
    },
    /// Say when a checkpoint is deleted, or that it stays
    #[command(after_help = "Examples:
  tinkex checkpoint set-ttl tinker://RUN/weights/0001 --ttl 7d
  tinkex checkpoint set-ttl tinker://RUN/weights/0001 --remove")]
    SetTtl(attributes::SetTtlArgs),
    /// Delete checkpoints, for good
    #[command(after_help = "Examples:
  tinkex checkpoint delete tinker://RUN/weights/0001
  tinkex checkpoint delete --run-id RUN --type weights --before 2026-01-01 --dry-run
  tinkex checkpoint delete --run-id RUN --yes")]
    Delete(delete::DeleteArgs),
    /// Download a checkpoint's files; a training checkpoint is exported first
    #[command(
        after_help = "Files come side by side and appear under the folder's name when all are complete;
an interrupted download goes on where it was.

Examples:
  tinkex checkpoint download tinker://RUN/external_weights/hf
  tinkex checkpoint download tinker://RUN/weights/0001 --output models
  tinkex checkpoint download tinker://RUN/weights/0001 --include '*.json'"
    )]
    Download(download::DownloadArgs),
    /// Save a fresh adapter to sample from
    #[command(after_help = "Example:
  tinkex checkpoint save --base-model Qwen/Qwen3-8B --rank 16 --name start")]
    Save(save::SaveArgs),
    /// Copy a checkpoint into a project
    #[command(after_help = "Examples:
  tinkex checkpoint copy tinker://RUN/weights/0001 --project-id proj-2
  tinkex checkpoint copy tinker://RUN/sampler_weights/final --ttl 30d")]
    Copy(attributes::CopyArgs),
    /// Where to download the files of a checkpoint that was saved for that
    #[command(after_help = "The URLs need no credential and work for a while.

Example:
  tinkex checkpoint urls tinker://RUN/external_weights/hf --format plain")]
    Urls {
        /// Its address: tinker://run/external_weights/name
        #[arg(value_parser = external, add = ArgValueCandidates::new(id_cache::checkpoints))]
        path: TinkerPath,
    },
    /// Put a checkpoint into a repository of a model hub
    #[command(after_help = "Examples:
  tinkex checkpoint push-hf tinker://RUN/weights/final --repo me/my-adapter
  tinkex checkpoint push-hf tinker://RUN/external_weights/hf --repo me/x --public --create-pr")]
    PushHf(push::PushArgs),
    /// Find old checkpoints, and delete them with --delete
    #[command(
        after_help = "Of every run and kind the newest checkpoints stay, and so do public ones.
Nothing is deleted without --delete.

Examples:
  tinkex checkpoint gc --keep-last 3                     what could go
  tinkex checkpoint gc --older-than 30d --type weights
  tinkex checkpoint gc --run-id RUN --keep-last 1 --delete --yes"
    )]
    Gc(gc::GcArgs),
}

impl CheckpointCommand {
    /// Whether the command ends itself in order when it is interrupted.
    pub(super) fn minds_interrupts(&self) -> bool {
        matches!(self, Self::Delete(_) | Self::Gc(_))
    }
}

pub(super) async fn run(
    shell: &mut Shell<'_>,
    command: CheckpointCommand,
) -> Result<Exit, CommandError> {
    match command {
        CheckpointCommand::List(what) => list::list(shell, what).await?,
        CheckpointCommand::Info { path } => list::info(shell, &path).await?,
        CheckpointCommand::Publish { path } => attributes::publish(shell, &path, true).await?,
        CheckpointCommand::Unpublish { path } => attributes::publish(shell, &path, false).await?,
        CheckpointCommand::SetTtl(what) => attributes::set_ttl(shell, what).await?,
        CheckpointCommand::Delete(what) => return delete::delete(shell, what).await,
        CheckpointCommand::Download(what) => download::download(shell, what).await?,
        CheckpointCommand::Save(what) => save::run(shell, what).await?,
        CheckpointCommand::Copy(what) => attributes::copy(shell, what).await?,
        CheckpointCommand::Urls { path } => attributes::urls(shell, &path).await?,
        CheckpointCommand::PushHf(what) => push::push(shell, what).await?,
        CheckpointCommand::Gc(what) => return gc::gc(shell, what).await,
    }
    Ok(Exit::Success)
}

/// The address of a checkpoint that was saved for download.
fn external(text: &str) -> Result<TinkerPath, String> {
    let path: TinkerPath =
        text.parse().map_err(|why: tinkex::wire::InvalidInput| why.to_string())?;
    if path.kind() == CheckpointKind::External {
        return Ok(path);
    }
    Err("only checkpoints saved for download (external_weights) have files".to_owned())
}

/// A kind of checkpoint: as in addresses, or as in lists.
fn kind(text: &str) -> Result<CheckpointKind, String> {
    let all = CheckpointKind::ALL;
    all.into_iter().find(|kind| kind.segment() == text || kind.as_str() == text).ok_or_else(|| {
        let words: Vec<_> = all.iter().map(|kind| kind.segment()).collect();
        format!("say one of {}", words.join(", "))
    })
}
