//! Administration of a running server: an extension of `tinkex` servers.

use serde::{Deserialize, Serialize};

use crate::request::{bare_request, json_request, json_response};

/// Makes the server refuse new work with 503, before it is stopped. Accepted requests are executed,
/// and their results can be polled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StartDrain;

/// Makes the server accept new work again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CancelDrain;

/// Returns whether the server refuses new work, and what it still executes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetDrainStatus;

/// Response to [`StartDrain`], [`CancelDrain`] and [`GetDrainStatus`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DrainStatus {
    /// Whether the server refuses new work.
    pub draining: bool,
    /// Number of accepted requests without a result. They are durable: a server that is stopped
    /// executes them after its next start.
    pub requests: u64,
    /// Number of running inference requests. They are not durable: they fail if the server is
    /// stopped.
    pub inference_requests: u64,
    /// Whether the server refuses new work and executes nothing, so that no client notices a stop
    /// except by the time that the restart takes.
    pub may_stop: bool,
}

impl DrainStatus {
    /// Creates the status of a server that executes `requests` requests and `inference_requests`
    /// inference requests.
    #[must_use]
    pub fn new(draining: bool, requests: u64, inference_requests: u64) -> Self {
        let may_stop = draining && requests == 0 && inference_requests == 0;
        Self { draining, requests, inference_requests, may_stop }
    }
}

/// Starts a backup of the server's data folder, on the server's machine.
///
/// A retry with the same id does not start another backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StartBackup {
    /// Id that the client chooses.
    pub id: String,
    /// Absolute path of the folder in which the backup is made.
    pub folder: String,
}

impl StartBackup {
    /// Requests a backup in `folder`.
    pub fn new(id: impl Into<String>, folder: impl Into<String>) -> Self {
        Self { id: id.into(), folder: folder.into() }
    }
}

/// Returns the status of the last backup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetBackupStatus;

/// Status of the last backup: the response to [`StartBackup`] and [`GetBackupStatus`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BackupStatus {
    /// Id of the backup; `None` if there was no backup since the start of the server.
    #[serde(default)]
    pub id: Option<String>,
    /// Progress of the backup.
    #[serde(flatten)]
    pub state: BackupState,
}

/// Progress of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
#[non_exhaustive]
pub enum BackupState {
    /// No backup was started.
    None,
    /// The backup is being made.
    Running,
    /// The backup is complete.
    Complete {
        /// Folder of the backup.
        folder: String,
        /// Number of files.
        files: u64,
        /// Total size of the files in bytes.
        bytes: u64,
        /// Size of the files that an earlier backup already had, in bytes.
        linked_bytes: u64,
        /// Folders of weights that the database refers to and that do not exist.
        missing: Vec<String>,
    },
    /// The backup failed.
    Failed {
        /// Reason.
        error: String,
    },
}

impl BackupStatus {
    /// Creates the status of a backup.
    #[must_use]
    pub fn new(id: Option<String>, state: BackupState) -> Self {
        Self { id, state }
    }
}

/// Returns the sizes of the files in the server's data folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetDiskUsage;

/// Sizes of the files in a data folder: the response to [`GetDiskUsage`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DiskUsage {
    /// Total size in bytes.
    pub bytes: u64,
    /// Sizes by kind, largest first.
    pub kinds: Vec<KindUsage>,
    /// Sizes of the weights of users, largest first.
    pub users: Vec<UserUsage>,
    /// Sizes of the weights of runs, largest first, at most 1,000.
    pub runs: Vec<RunUsage>,
}

/// Size of the files of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct KindUsage {
    /// `checkpoints`, `snapshots`, `samplers`, `unreferenced`, `payloads`, `database` or `other`.
    pub kind: String,
    /// Number of folders or files.
    pub count: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// Size of the files of one user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UserUsage {
    /// Name of the user.
    pub user: String,
    /// Number of runs.
    pub runs: u64,
    /// Size of the weights in bytes.
    pub bytes: u64,
    /// Cost of the records in bytes, which the server limits.
    pub record_bytes: u64,
}

/// Size of the files of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunUsage {
    /// Id of the run.
    pub run: String,
    /// Name of the run, if it has one.
    #[serde(default)]
    pub name: Option<String>,
    /// User to whom the run belongs.
    pub user: String,
    /// Number of folders of weights: checkpoints, snapshots and weights of sampling sessions.
    pub folders: u64,
    /// Size in bytes.
    pub bytes: u64,
}

impl DiskUsage {
    /// Creates a report. Sorts the parts by size.
    #[must_use]
    pub fn new(
        mut kinds: Vec<KindUsage>,
        mut users: Vec<UserUsage>,
        mut runs: Vec<RunUsage>,
    ) -> Self {
        kinds.sort_by_key(|kind| std::cmp::Reverse(kind.bytes));
        users.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.user.cmp(&b.user)));
        runs.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.run.cmp(&b.run)));
        runs.truncate(MAX_RUNS);
        let bytes = kinds.iter().map(|kind| kind.bytes).sum();
        Self { bytes, kinds, users, runs }
    }
}

/// Maximum number of runs in a report.
const MAX_RUNS: usize = 1_000;

impl KindUsage {
    /// Creates the size of `count` folders or files of a kind.
    pub fn new(kind: impl Into<String>, count: u64, bytes: u64) -> Self {
        Self { kind: kind.into(), count, bytes }
    }
}

impl UserUsage {
    /// Creates the usage of a user without runs.
    pub fn new(user: impl Into<String>, record_bytes: u64) -> Self {
        Self { user: user.into(), runs: 0, bytes: 0, record_bytes }
    }
}

impl RunUsage {
    /// Creates the usage of a run without weights.
    pub fn new(run: impl Into<String>, name: Option<String>, user: impl Into<String>) -> Self {
        Self { run: run.into(), name, user: user.into(), folders: 0, bytes: 0 }
    }
}

json_response!(DrainStatus, BackupStatus, DiskUsage);

json_request! {
    StartBackup: StartBackup => BackupStatus;
}

bare_request! {
    StartDrain: StartDrain => DrainStatus, |r| params [];
    CancelDrain: CancelDrain => DrainStatus, |r| params [];
    GetDrainStatus: GetDrainStatus => DrainStatus, |r| params [];
    GetBackupStatus: GetBackupStatus => BackupStatus, |r| params [];
    GetDiskUsage: GetDiskUsage => DiskUsage, |r| params [];
}
