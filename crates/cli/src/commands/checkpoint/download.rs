//! `tinkex checkpoint download` and `urls`: the files of a checkpoint.

use std::path::PathBuf;

use clap::Args;
use clap_complete::ArgValueCandidates;
use serde_json::json;
use tinkex::CheckpointKind;

use crate::args::number_between;
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::progress;
use crate::reference::{self, CheckpointReference, CheckpointUse};
use crate::table::{Table, TableCell};

/// Arguments of `tinkex checkpoint download`.
#[derive(Debug, Args)]
pub(crate) struct DownloadArgs {
    /// Checkpoint: tinker://RUN/weights/NAME, RUN/NAME, or RUN for its latest checkpoint
    #[arg(value_name = "CHECKPOINT", add = ArgValueCandidates::new(reference::checkpoint_candidates))]
    path: CheckpointReference,
    /// Parent of the download folder, which is named after the checkpoint [default: the current folder]
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Folder to create, with any name
    #[arg(long, value_name = "FOLDER", conflicts_with = "output")]
    to: Option<PathBuf>,
    /// Replace an existing download once the new files are complete
    #[arg(long)]
    force: bool,
    /// Download only files that match, such as `*.json`; repeatable
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// Skip files that match; repeatable
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
    /// Keep the files as the server sends them, without converting them for PEFT
    #[arg(long)]
    raw: bool,
    /// Number of parallel downloads
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = number_between::<1, 32>)]
    parallel: u16,
}

pub(super) async fn download(
    context: &mut CommandContext<'_>,
    args: DownloadArgs,
) -> Result<(), CommandError> {
    let path = args.path.resolve(context, CheckpointUse::Download).await?;
    // Some file systems and many programs do not accept colons.
    let name = path.to_string().trim_start_matches("tinker://").replace(['/', ':'], "_");
    let parent = || args.output.clone().unwrap_or_else(|| context.environment.folder.clone());
    let shown = args.to.clone().unwrap_or_else(|| parent().join(&name));
    let target = context.environment.path(&shown);
    if target.exists() && !args.force {
        let message = format!("{} already exists", shown.display());
        return Err(CommandError::new(Exit::Failed, message)
            .hint("Pass --force to replace it, or choose another folder with --to FOLDER."));
    }
    if let Some(folder) = target.parent() {
        std::fs::create_dir_all(folder)
            .map_err(|error| CommandError::file("create", folder.display(), &error))?;
    }
    if path.kind() == CheckpointKind::Training {
        context.notice(&format!(
            "Exporting {path} as external weights (this starts a training session on the \
             checkpoint's base model)..."
        ));
    }
    let mut download = context.client().await?.rest().download(path.clone(), target);
    download = download.replace(args.force).parallel(usize::from(args.parallel)).peft(!args.raw);
    download = args.include.into_iter().fold(download, tinkex::CheckpointDownload::include);
    download = args.exclude.into_iter().fold(download, tinkex::CheckpointDownload::exclude);
    let download = progress::show_download(context, &name, |report| {
        download.on_progress(report).into_future()
    });
    let downloaded = download.await.map_err(|failure| match failure.exit() {
        Exit::Interrupted | Exit::Temporary => failure.hint(format!(
            "Run the command again to continue; the files so far are in {}.part.",
            shown.display()
        )),
        _ => failure,
    })?;
    let mut table = Table::of_properties().title(format!("Checkpoint Download: {path}"));
    table.property("Checkpoint Path", path.to_string());
    if downloaded.bytes > 0 {
        table.property("Total Size", TableCell::size(downloaded.bytes));
    }
    table.property("Downloaded to", shown.display().to_string());
    let mut json = json!({
        "checkpoint_path": path, "destination": shown.display().to_string(),
        "files": downloaded.files,
    });
    if downloaded.bytes > 0 {
        json["file_size_bytes"] = downloaded.bytes.into();
    }
    context.table(&table, &json)
}

/// Prints the signed URL of every file of external weights.
pub(super) async fn print_urls(
    context: &mut CommandContext<'_>,
    checkpoint: &CheckpointReference,
) -> Result<(), CommandError> {
    let path = checkpoint.resolve(context, CheckpointUse::External).await?;
    let rest = context.client().await?.rest();
    let response = rest.get_external_weights_urls(&path).await?;
    let mut table = Table::new(["File", "URL"]).title(format!("Files of {path}"));
    for (name, url) in &response.urls {
        table.row([name, url]);
    }
    let json = json!({ "tinker_path": path, "urls": response.urls, "expires": response.expires });
    context.widen();
    context.table(&table, &json)
}
