//! `tinkex session export-trace`: downloads the trace of a session.

use std::path::PathBuf;

use clap::Args;
use clap_complete::ArgValueCandidates;
use serde_json::json;
use tinkex::SessionId;

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::id_cache;
use crate::progress;
use crate::table::{Table, TableCell};

/// Arguments of `tinkex session export-trace`.
#[derive(Debug, Args)]
pub(crate) struct ExportTraceArgs {
    /// Id of the session
    #[arg(add = ArgValueCandidates::new(id_cache::sessions))]
    session_id: SessionId,
    /// Output file [default: SESSION_ID.pftrace]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print the download URL instead of downloading the trace
    #[arg(long)]
    url_only: bool,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: ExportTraceArgs,
) -> Result<(), CommandError> {
    let id = &args.session_id;
    let rest = context.client().await?.rest();
    context.notice(&format!("Exporting trace for session {id} (this may take a while)..."));
    let url = rest.export_session_trace(id.clone()).await?;
    if args.url_only {
        return context.text(&url, &json!({ "session_id": id, "url": url }));
    }
    let shown =
        args.output.unwrap_or_else(|| context.environment.folder.join(format!("{id}.pftrace")));
    let target = context.environment.path(&shown);
    let shown = shown.display().to_string();
    if let Some(folder) = target.parent() {
        std::fs::create_dir_all(folder)
            .map_err(|error| CommandError::file("create", &shown, &error))?;
    }
    let download = progress::show_download(context, "Downloading trace", |report| {
        rest.download_file(&url, &target).on_progress(report).into_future()
    });
    let bytes = download.await.map_err(|failure| {
        let hint = match failure.exit() {
            Exit::Interrupted => {
                format!("Run the command again to continue; the data so far is in {shown}.part.")
            }
            _ => "Run the command again for a new signed URL; a URL expires after about an hour."
                .to_owned(),
        };
        failure.context("cannot download the trace").hint(hint)
    })?;
    let mut table = Table::of_properties().title(format!("Trace Export: {id}"));
    table.property("Session ID", id.as_str());
    table.property("Saved to", &shown);
    let mut json = json!({ "session_id": id, "destination": shown });
    if bytes > 0 {
        table.property("Size", TableCell::size(bytes));
        json["file_size_bytes"] = bytes.into();
    }
    context.table(&table, &json)
}
