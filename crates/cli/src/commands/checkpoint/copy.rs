//! `tinkex checkpoint copy`: copies a checkpoint to a project.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap_complete::ArgValueCandidates;
use serde_json::json;
use tinkex::CopyCheckpoint;

use crate::context::CommandContext;
use crate::error::CommandError;
use crate::reference::{self, CheckpointReference, CheckpointUse};

use super::attributes::ttl;

/// Arguments of `tinkex checkpoint copy`.
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// Checkpoint: tinker://RUN/weights/NAME, or RUN/NAME with the name of a run
    #[arg(value_name = "CHECKPOINT", add = ArgValueCandidates::new(reference::checkpoint_candidates))]
    path: CheckpointReference,
    /// Time until the copy is deleted, such as 7d [default: never]
    #[arg(long, value_name = "DURATION", allow_negative_numbers = true, value_parser = ttl)]
    ttl: Option<u64>,
    /// File with an API key that can read the source, if yours cannot
    #[arg(long, value_name = "FILE")]
    source_key_file: Option<PathBuf>,
}

pub(super) async fn copy(
    context: &mut CommandContext<'_>,
    args: CopyArgs,
) -> Result<(), CommandError> {
    let path = args.path.resolve(context, CheckpointUse::Any).await?;
    let mut copy = CopyCheckpoint::new(path.clone());
    if let Some(seconds) = args.ttl {
        copy = copy.ttl(Duration::from_secs(seconds));
    }
    if let Some(file) = &args.source_key_file {
        let shown = format!("API key file {}", file.display());
        let key = std::fs::read_to_string(context.environment.path(file))
            .map_err(|error| CommandError::file("read", shown, &error))?;
        copy = copy.source_token(key.trim());
    }
    let created = context.client().await?.rest().copy_weights(copy).await?;
    let json = json!({ "source": path, "tinker_path": created });
    context.text(&created.to_string(), &json)
}
