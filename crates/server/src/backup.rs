//! Backups of the data folder while the server runs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tinkex_store::backup::{self, BackupReport, BackupSource};
use tinkex_store::error::ServerError;
use tinkex_store::log;
use tinkex_wire::rest::{BackupState, BackupStatus, StartBackup};
use tokio::sync::oneshot;

use crate::state::ServerState;

/// The last backup since the start of the server.
pub(crate) struct LastBackup(Mutex<BackupStatus>);

impl Default for LastBackup {
    fn default() -> Self {
        Self(Mutex::new(BackupStatus::new(None, BackupState::None)))
    }
}

impl LastBackup {
    /// Returns the status of the last backup.
    pub(crate) fn status(&self) -> BackupStatus {
        self.0.lock().clone()
    }

    /// Marks a new backup as running. Returns false if the request is a retry.
    ///
    /// # Errors
    /// If another backup is running.
    fn begin(&self, id: &str) -> Result<bool, ServerError> {
        let mut last = self.0.lock();
        if last.id.as_deref() == Some(id) {
            return Ok(false);
        }
        if last.state == BackupState::Running {
            let message = "another backup is running; wait until it is finished";
            return Err(ServerError::Conflict(message.to_owned()));
        }
        *last = BackupStatus::new(Some(id.to_owned()), BackupState::Running);
        Ok(true)
    }

    fn finish(&self, state: BackupState) {
        self.0.lock().state = state;
    }
}

/// Starts a backup, unless the request is a retry.
///
/// # Errors
/// If the folder is not an absolute path, or if another backup is running.
pub(crate) fn start(state: &Arc<ServerState>, request: &StartBackup) -> Result<(), ServerError> {
    let folder = PathBuf::from(&request.folder);
    if !folder.is_absolute() || request.id.is_empty() || request.id.len() > 64 {
        let message = "expected an id of at most 64 bytes, and the absolute path of a folder";
        return Err(ServerError::invalid(message));
    }
    if state.last_backup.begin(&request.id)? {
        let task_state = Arc::clone(state);
        state.executor.spawn("backup", async move {
            let made = make(&task_state, &folder).await;
            task_state.last_backup.finish(report(made));
        });
    }
    Ok(())
}

/// Makes a backup. Meanwhile no weights are deleted and no compaction of payloads starts.
async fn make(state: &Arc<ServerState>, folder: &Path) -> Result<BackupReport, String> {
    let stopping = || "the server is shutting down".to_owned();
    let files = state.expiry.lock_files().await;
    let (sender, written) = oneshot::channel();
    // Wait until the requests that were acknowledged before are a part of the database.
    state.store().disk.barrier(Box::new(move |written| drop(sender.send(written))));
    written.await.map_err(|_| stopping())?.map_err(|error| error.to_string())?;
    let source = BackupSource {
        data_dir: state.options.data_dir.clone(),
        payloads: state.store().reader(),
        created_at: state.clock.now(),
    };
    let folder = folder.to_owned();
    let job = move || {
        let made = backup::create(&source, &folder);
        // The job keeps the lock: it continues if the server drops the task.
        drop(files);
        made.map_err(|error| error.to_string())
    };
    state.executor.run_job(job).await.map_err(|error| error.to_string())?
}

fn report(made: Result<BackupReport, String>) -> BackupState {
    let to_u64 = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    match made {
        Ok(BackupReport { folder, files, bytes, linked_bytes, missing }) => {
            tracing::info!(
                target: log::STORAGE,
                folder = %folder.display(),
                bytes,
                copied_bytes = bytes.saturating_sub(linked_bytes),
                missing = missing.len(),
                "made a backup"
            );
            let folder = folder.display().to_string();
            BackupState::Complete { folder, files: to_u64(files), bytes, linked_bytes, missing }
        }
        Err(error) => {
            tracing::warn!(target: log::STORAGE, error, "a backup failed");
            BackupState::Failed { error }
        }
    }
}
