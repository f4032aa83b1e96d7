//! `tinkex server backup` and `tinkex server restore`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tinkex::Timestamp;
use tinkex::rest::BackupState;
use tinkex_server::restore_backup;
use tokio::time::sleep;

use super::running::RunningServer;
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;

/// Interval at which the command asks for the status of the backup.
const INTERVAL: Duration = Duration::from_millis(200);

/// Arguments of `tinkex server backup`.
#[derive(Debug, Args)]
pub(crate) struct BackupArgs {
    /// Folder for backups; each backup is a new folder in it
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    #[command(flatten)]
    server: RunningServer,
}

/// Arguments of `tinkex server restore`.
#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// Folder of one backup, or folder with backups, of which the newest is restored
    #[arg(value_name = "DIR")]
    backup: PathBuf,
    /// New data folder; must not exist or be empty
    #[arg(long, value_name = "NEW")]
    data_dir: PathBuf,
}

pub(super) async fn back_up(
    context: &mut CommandContext<'_>,
    args: BackupArgs,
) -> Result<Exit, CommandError> {
    let client = args.server.client(context).await?;
    let folder = context.environment.path(&args.folder);
    let absolute = std::path::absolute(&folder)
        .map_err(|error| CommandError::file("use", folder.display(), &error))?;
    let id = format!("{}-{}", std::process::id(), Timestamp::now().unix_micros());
    let mut status = client.start_backup(&id, &absolute.to_string_lossy()).await?;
    while status.state == BackupState::Running && status.id.as_deref() == Some(&*id) {
        sleep(INTERVAL).await;
        status = client.get_backup_status().await?;
    }
    if status.id.as_deref() != Some(&*id) {
        let message = "the server was restarted during the backup, which is not complete";
        return Err(CommandError::new(Exit::Temporary, message).hint("Run the command again."));
    }
    match &status.state {
        BackupState::Complete { folder, files, bytes, linked_bytes, missing } => {
            let mut text = format!(
                "Backup {folder}: {}, {}, of which {} copied",
                format::count(*files, "file"),
                format::bytes(*bytes),
                format::bytes(bytes.saturating_sub(*linked_bytes)),
            );
            for name in missing {
                text += &format!("\nwarning: the weights {name} are missing in the data folder");
            }
            context.text(&text, &status)?;
            Ok(if missing.is_empty() { Exit::Success } else { Exit::Partial })
        }
        BackupState::Failed { error } => {
            Err(CommandError::new(Exit::Failed, format!("the backup failed: {error}")))
        }
        _ => Err(CommandError::new(Exit::Failed, "the server has not made a backup")),
    }
}

pub(super) fn restore(
    context: &mut CommandContext<'_>,
    args: &RestoreArgs,
) -> Result<Exit, CommandError> {
    let backup = context.environment.path(&args.backup);
    let data_dir = context.environment.path(&args.data_dir);
    let restored = restore_backup(&backup, &data_dir).map_err(|error| {
        let message = format!("cannot restore {}: {error}", backup.display());
        match error.kind() {
            std::io::ErrorKind::AlreadyExists => CommandError::usage(message)
                .hint("Pass a --data-dir that does not exist: nothing is overwritten."),
            std::io::ErrorKind::NotFound => CommandError::new(Exit::NotFound, message),
            _ => CommandError::new(Exit::Failed, message),
        }
    })?;
    let text = format!(
        "Restored {} to {}: {}, {}. Start it with `tinkex serve --data-dir {}`.",
        restored.backup.display(),
        data_dir.display(),
        format::count(restored.files, "file"),
        format::bytes(restored.bytes),
        format::shell_quote(&data_dir.to_string_lossy()),
    );
    let json = json!({
        "backup": restored.backup, "data_dir": data_dir, "files": restored.files,
        "bytes": restored.bytes,
    });
    context.text(&text, &json)?;
    Ok(Exit::Success)
}
