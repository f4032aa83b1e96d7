//! What can be changed about a checkpoint.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap_complete::ArgValueCandidates;
use serde_json::json;
use tinkex::{CopyCheckpoint, TinkerPath};

use crate::args::duration;
use crate::error::CommandError;
use crate::format;
use crate::id_cache;
use crate::output::Shell;
use crate::table::Table;

/// When a checkpoint goes.
#[derive(Debug, Args)]
pub(crate) struct SetTtlArgs {
    /// Its address: tinker://run/weights/name
    #[arg(add = ArgValueCandidates::new(id_cache::checkpoints))]
    path: TinkerPath,
    /// From now, such as 7d; a bare number is seconds
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, value_parser = ttl, required_unless_present = "remove")]
    ttl: Option<u64>,
    /// It stays
    #[arg(long, conflicts_with = "ttl")]
    remove: bool,
}

/// What to copy.
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// Its address: tinker://run/weights/name
    #[arg(add = ArgValueCandidates::new(id_cache::checkpoints))]
    path: TinkerPath,
    /// When the copy goes, from now, such as 7d; without it, it stays
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, value_parser = ttl)]
    ttl: Option<u64>,
    /// A file with a key that may read the source, if your own may not
    #[arg(long, value_name = "FILE")]
    source_key_file: Option<PathBuf>,
}

/// A time to live, in whole seconds.
fn ttl(text: &str) -> Result<u64, String> {
    match duration(text)? {
        time if time < Duration::from_secs(1) => Err("a second is the least".to_owned()),
        time => Ok(time.as_secs()),
    }
}

pub(super) async fn publish(
    shell: &mut Shell<'_>,
    path: &TinkerPath,
    public: bool,
) -> Result<(), CommandError> {
    let rest = shell.client().await?.rest();
    let who = if public {
        rest.publish_checkpoint(path).await?;
        "everyone"
    } else {
        rest.unpublish_checkpoint(path).await?;
        "only its owner"
    };
    let json = json!({ "tinker_path": path, "public": public });
    shell.done(&format!("{who} can read {path} now"), &json)
}

pub(super) async fn set_ttl(shell: &mut Shell<'_>, what: SetTtlArgs) -> Result<(), CommandError> {
    let rest = shell.client().await?.rest();
    rest.set_checkpoint_ttl(&what.path, what.ttl).await?;
    let path = &what.path;
    let text = match what.ttl {
        Some(seconds) => format!("{path} goes in {}", format::span(seconds)),
        None => format!("{path} stays"),
    };
    shell.done(&text, &json!({ "tinker_path": path, "ttl_seconds": what.ttl }))
}

pub(super) async fn copy(shell: &mut Shell<'_>, what: CopyArgs) -> Result<(), CommandError> {
    let mut copy = CopyCheckpoint::of(what.path.clone());
    if let Some(seconds) = what.ttl {
        copy = copy.ttl_seconds(seconds);
    }
    if let Some(file) = &what.source_key_file {
        let key = std::fs::read_to_string(shell.environment.path(file))
            .map_err(|why| CommandError::file("read", &file.display().to_string(), &why))?;
        copy = copy.source_token(key.trim());
    }
    let made = shell.client().await?.rest().copy_weights(copy).await?;
    shell.text(&made.to_string(), &json!({ "source": what.path, "tinker_path": made }))
}

pub(super) async fn urls(shell: &mut Shell<'_>, path: &TinkerPath) -> Result<(), CommandError> {
    let rest = shell.client().await?.rest();
    let found = rest.get_external_weights_urls(path).await?;
    let mut table = Table::new(["File", "URL"]).title(format!("Files of {path}"));
    for (name, url) in &found.urls {
        table.row([name, url]);
    }
    let json = json!({ "tinker_path": path, "urls": found.urls, "expires": found.expires });
    shell.widen();
    shell.table(&table, &json)
}
