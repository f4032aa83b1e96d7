//! A session's trace: what ran when.

use std::path::PathBuf;

use clap::Args;
use clap_complete::ArgValueCandidates;
use serde_json::json;
use tinkex::SessionId;

use crate::error::{CommandError, Exit};
use crate::format;
use crate::id_cache;
use crate::output::Shell;
use crate::progress;
use crate::table::Table;

/// Which trace, and where to.
#[derive(Debug, Args)]
pub(crate) struct ExportTraceArgs {
    /// The session's id
    #[arg(add = ArgValueCandidates::new(id_cache::sessions))]
    session_id: SessionId,
    /// The file; SESSION_ID.pftrace here if nothing is said
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Only say where it can be downloaded
    #[arg(long)]
    url_only: bool,
}

pub(super) async fn run(shell: &mut Shell<'_>, what: ExportTraceArgs) -> Result<(), CommandError> {
    let id = &what.session_id;
    let rest = shell.client().await?.rest();
    shell.notice(&format!("Exporting trace for session {id} (this may take a while)..."));
    let url = rest.export_session_trace(id.clone()).await?;
    if what.url_only {
        return shell.text(&url, &json!({ "session_id": id, "url": url }));
    }
    let shown =
        what.output.unwrap_or_else(|| shell.environment.folder.join(format!("{id}.pftrace")));
    let target = shell.environment.path(&shown);
    let shown = shown.display().to_string();
    if let Some(folder) = target.parent() {
        std::fs::create_dir_all(folder).map_err(|why| CommandError::file("made", &shown, &why))?;
    }
    let brought = progress::of_download(shell, "Downloading trace", |told| {
        rest.download_file(&url, &target).on_progress(told).into_future()
    });
    let bytes = brought.await.map_err(|failure| {
        let hint = match failure.exit() {
            Exit::Interrupted => format!("what is here already is kept in {shown}.part"),
            _ => "the signed URL may have expired (it works for about an hour); \
                  the same command gets a fresh one"
                .to_owned(),
        };
        failure.during("the trace was not downloaded").hint(hint)
    })?;
    let mut table = Table::of_properties().title(format!("Trace Export: {id}"));
    table.property("Session ID", id.as_str());
    table.property("Saved to", &shown);
    let mut json = json!({ "session_id": id, "destination": shown });
    if bytes > 0 {
        table.property("Size", format::bytes(bytes));
        json["file_size_bytes"] = bytes.into();
    }
    shell.table(&table, &json)
}
