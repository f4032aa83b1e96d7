//! Bringing the files of a checkpoint here.

use std::path::PathBuf;

use clap::Args;
use clap_complete::ArgValueCandidates;
use serde_json::json;
use tinkex::TinkerPath;
use tinkex::wire::CheckpointKind;

use crate::error::{CommandError, Exit};
use crate::format;
use crate::id_cache;
use crate::output::Shell;
use crate::progress;
use crate::table::Table;

/// What to download.
#[derive(Debug, Args)]
pub(crate) struct DownloadArgs {
    /// Its address: tinker://run/weights/name or tinker://run/external_weights/name
    #[arg(value_parser = with_files, add = ArgValueCandidates::new(id_cache::checkpoints))]
    path: TinkerPath,
    /// The folder that gets a folder of the checkpoint's name; this one if nothing is said
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Replace what is there, once the new files are complete
    #[arg(long)]
    force: bool,
    /// Only files like this, such as `*.json`; may be said more than once
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// No files like this; may be said more than once
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
    /// How many files at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=32))]
    parallel: u8,
}

/// The address of a checkpoint that has files, or can be given some.
fn with_files(text: &str) -> Result<TinkerPath, String> {
    let path: TinkerPath =
        text.parse().map_err(|why: tinkex::wire::InvalidInput| why.to_string())?;
    if path.kind() == CheckpointKind::Sampler {
        return Err("checkpoints to sample from cannot be downloaded; take a training checkpoint \
                    (weights) or external weights"
            .to_owned());
    }
    Ok(path)
}

pub(super) async fn download(
    shell: &mut Shell<'_>,
    what: DownloadArgs,
) -> Result<(), CommandError> {
    let name = what.path.to_string().trim_start_matches("tinker://").replace('/', "_");
    let folder = what.output.clone().unwrap_or_else(|| shell.environment.folder.clone());
    let shown = folder.join(&name);
    let target = shell.environment.path(&shown);
    if target.exists() && !what.force {
        let why = format!("{} exists already", shown.display());
        return Err(CommandError::new(Exit::Failed, why)
            .hint("say --force to replace it, or choose another folder with --output"));
    }
    if let Some(folder) = target.parent() {
        std::fs::create_dir_all(folder)
            .map_err(|why| CommandError::file("made", &folder.display().to_string(), &why))?;
    }
    if what.path.kind() == CheckpointKind::Training {
        shell.notice(&format!(
            "Exporting {} as external weights (this starts a training session on the checkpoint's \
             base model)...",
            what.path
        ));
    }
    let mut download = shell.client().await?.rest().download(what.path.clone(), target);
    download = download.replace(what.force).parallel(usize::from(what.parallel));
    download = what.include.into_iter().fold(download, tinkex::CheckpointDownload::include);
    download = what.exclude.into_iter().fold(download, tinkex::CheckpointDownload::exclude);
    let brought =
        progress::of_download(shell, &name, |told| download.on_progress(told).into_future());
    let brought = brought.await.map_err(|failure| match failure.exit() {
        Exit::Interrupted | Exit::Temporary => failure.hint(format!(
            "what is here already is kept in {}.part; the same command goes on from there",
            shown.display()
        )),
        _ => failure,
    })?;
    let mut table = Table::of_properties().title(format!("Checkpoint Download: {}", what.path));
    table.property("Checkpoint Path", what.path.to_string());
    if brought.bytes > 0 {
        table.property("Total Size", format::bytes(brought.bytes));
    }
    table.property("Downloaded to", shown.display().to_string());
    let mut json = json!({
        "checkpoint_path": what.path, "destination": shown.display().to_string(),
        "files": brought.files,
    });
    if brought.bytes > 0 {
        json["file_size_bytes"] = brought.bytes.into();
    }
    shell.table(&table, &json)
}
