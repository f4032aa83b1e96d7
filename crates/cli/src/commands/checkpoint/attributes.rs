//! Visibility and expiry of checkpoints: `publish`, `unpublish` and `set-ttl`.

use std::time::Duration;

use clap::Args;
use clap_complete::ArgValueCandidates;
use serde_json::json;

use crate::args::duration;
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::reference::{self, CheckpointReference, CheckpointUse};

/// Arguments of `tinkex checkpoint set-ttl`.
#[derive(Debug, Args)]
pub(crate) struct SetTtlArgs {
    /// Checkpoint: tinker://RUN/weights/NAME, or RUN/NAME with the name of a run
    #[arg(value_name = "CHECKPOINT", add = ArgValueCandidates::new(reference::checkpoint_candidates))]
    path: CheckpointReference,
    /// Time until the checkpoint is deleted, such as 7d; a bare number is seconds
    #[arg(long, value_name = "DURATION", allow_negative_numbers = true, value_parser = ttl, required_unless_present = "remove")]
    ttl: Option<u64>,
    /// Remove the expiry, so that the checkpoint is kept
    #[arg(long, conflicts_with = "ttl")]
    remove: bool,
}

/// Parses a time to live of at least one second, and returns it in seconds.
pub(super) fn ttl(text: &str) -> Result<u64, String> {
    match duration(text)? {
        ttl if ttl < Duration::from_secs(1) => Err("expected at least one second".to_owned()),
        ttl => Ok(ttl.as_secs()),
    }
}

pub(super) async fn publish(
    context: &mut CommandContext<'_>,
    checkpoint: &CheckpointReference,
    public: bool,
) -> Result<(), CommandError> {
    let path = checkpoint.resolve(context, CheckpointUse::Any).await?;
    let rest = context.client().await?.rest();
    let visibility = if public {
        rest.publish_checkpoint(&path).await?;
        "public"
    } else {
        rest.unpublish_checkpoint(&path).await?;
        "private"
    };
    let json = json!({ "tinker_path": path, "public": public });
    context.confirm_change(&format!("{path} is now {visibility}"), &json)
}

pub(super) async fn set_ttl(
    context: &mut CommandContext<'_>,
    args: SetTtlArgs,
) -> Result<(), CommandError> {
    let path = args.path.resolve(context, CheckpointUse::Any).await?;
    let rest = context.client().await?.rest();
    rest.set_checkpoint_ttl(&path, args.ttl.map(Duration::from_secs)).await?;
    let text = match args.ttl {
        Some(seconds) => format!("{path} expires in {}", format::duration_in_words(seconds)),
        None => format!("{path} does not expire"),
    };
    context.confirm_change(&text, &json!({ "tinker_path": path, "ttl_seconds": args.ttl }))
}
