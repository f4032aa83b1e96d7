//! The writer thread: groups writes, retries required writes, and compacts the payload file.
//!
//! When another server claims the data folder, the thread rejects all writes, also required ones:
//! the other server executes the requests again.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::watch;
use tokio::time::timeout;

use super::database::{Database, is_superseded};
use super::deletion::Deletion;
use super::frame::{MAGIC, MAX_PAYLOAD};
use super::payloads::{Compaction, Payloads};
use super::reserve::Reserve;
use super::{FoldersCallback, ServerHealth, WriteCallback, WriterHealth};
use crate::log;
use crate::record::Record;

/// Command for the writer thread.
pub(super) enum WriterCommand {
    Write(PendingWrite),
    Barrier { on_written: WriteCallback },
    Compact { min_bytes: u64, on_written: WriteCallback },
    StoredFolders { on_read: FoldersCallback },
}

/// Records and a payload that are written together.
pub(super) struct PendingWrite {
    pub(super) records: Vec<Record>,
    pub(super) payload: Option<(u64, Bytes)>,
    /// Whether the write is retried until it succeeds.
    pub(super) required: bool,
    pub(super) on_written: WriteCallback,
}

impl WriterCommand {
    /// Calls the callback with an error.
    pub(super) fn fail(self, error: io::Error) {
        match self {
            Self::Write(PendingWrite { on_written, .. })
            | Self::Barrier { on_written }
            | Self::Compact { on_written, .. } => on_written(Err(error)),
            Self::StoredFolders { on_read } => on_read(Err(error)),
        }
    }
}

/// State of the writer thread.
pub(super) struct DiskWriter {
    database: Database,
    payloads: Payloads,
    reserve: Reserve,
    health: Arc<Mutex<WriterHealth>>,
    server_health: watch::Sender<ServerHealth>,
    /// Required writes that have failed so far, in order.
    outstanding: Vec<PendingWrite>,
    /// Other writes whose commit failed and may be complete in the WAL. The writer rejects them
    /// once the commit is overwritten in the WAL: until then a crash could restore them.
    in_doubt: Vec<PendingWrite>,
    compaction: Option<(Compaction, WriteCallback)>,
    /// Whether a run was deleted since the start of the process, and the payload file may still have
    /// its payloads.
    has_deleted_payloads: bool,
    /// Whether the WAL may have rows of a deleted run. True after the start: the process may have
    /// ended between a deletion and the truncation.
    has_deleted_rows: bool,
    /// Number of commits at the last command to compact the payload file.
    commits_at_compaction: u64,
}

/// Failed attempt to write a group.
struct WriteFailure {
    error: io::Error,
    /// Whether a crash could still apply the group.
    in_doubt: bool,
}

impl From<io::Error> for WriteFailure {
    fn from(error: io::Error) -> Self {
        Self { error, in_doubt: false }
    }
}

/// Maximum number of writes in one transaction.
const MAX_GROUP: usize = 4_096;
/// Delay before outstanding writes are retried if no new command arrives.
const RETRY_DELAY: Duration = Duration::from_millis(200);

impl DiskWriter {
    pub(super) fn new(
        database: Database,
        payloads: Payloads,
        reserve: Reserve,
        health: Arc<Mutex<WriterHealth>>,
        server_health: watch::Sender<ServerHealth>,
    ) -> Self {
        Self {
            database,
            payloads,
            reserve,
            health,
            server_health,
            outstanding: Vec::new(),
            in_doubt: Vec::new(),
            compaction: None,
            has_deleted_payloads: false,
            has_deleted_rows: true,
            commits_at_compaction: 0,
        }
    }

    /// Executes commands until the sender is dropped.
    pub(super) async fn run(mut self, mut receiver: UnboundedReceiver<WriterCommand>) {
        loop {
            let first = if self.compaction.is_some() {
                match receiver.try_recv() {
                    Ok(first) => Some(Some(first)),
                    Err(TryRecvError::Empty) => Some(None),
                    Err(TryRecvError::Disconnected) => None,
                }
            } else if self.outstanding.is_empty() && !self.needs_repair() {
                receiver.recv().await.map(Some)
            } else {
                timeout(RETRY_DELAY, receiver.recv()).await.map_or(Some(None), |c| c.map(Some))
            };
            // `Some(None)`: no command arrived, and outstanding writes are retried.
            let Some(first) = first else { break };
            let mut group = Vec::new();
            let mut last = None;
            let further = std::iter::from_fn(|| receiver.try_recv().ok());
            for command in first.into_iter().chain(further.take(MAX_GROUP)) {
                match command {
                    WriterCommand::Write(write) => group.push(write),
                    // Barriers and compactions run before the commands queued after them.
                    other => {
                        last = Some(other);
                        break;
                    }
                }
            }
            self.write(group);
            match last {
                Some(WriterCommand::Barrier { on_written }) => {
                    let owned = self.database.check_epoch();
                    self.notice_superseded(owned.as_ref().err());
                    on_written(owned.and_then(|()| self.check_nothing_outstanding()));
                }
                Some(WriterCommand::Compact { min_bytes, on_written }) => {
                    self.reserve.keep();
                    self.truncate_wal();
                    self.start_compaction(min_bytes, on_written);
                }
                Some(WriterCommand::StoredFolders { on_read }) => {
                    on_read(self.database.stored_folders());
                }
                Some(WriterCommand::Write(_)) | None => {}
            }
            self.continue_compaction();
            if self.compaction.is_some() {
                // A simulation runs other tasks between two steps.
                tokio::task::yield_now().await;
            }
        }
        if let Some((_, on_written)) = self.compaction.take() {
            on_written(Err(io::Error::other("the server shut down")));
        }
        self.write(Vec::new());
        for PendingWrite { on_written, .. } in
            self.outstanding.drain(..).chain(self.in_doubt.drain(..))
        {
            on_written(Err(io::Error::other("the server shut down before the write succeeded")));
        }
    }

    /// Stops the server if `error` says that another server has claimed the data folder. Returns
    /// whether it says so.
    fn notice_superseded(&mut self, error: Option<&io::Error>) -> bool {
        let superseded = error.is_some_and(is_superseded);
        if superseded {
            let reported = |health: &mut ServerHealth| {
                let is_first = *health == ServerHealth::Working;
                if is_first {
                    *health = ServerHealth::Superseded;
                }
                is_first
            };
            if self.server_health.send_if_modified(reported) {
                tracing::error!(
                    target: log::STORAGE,
                    "another server has taken over the data folder; this server stops and \
                     acknowledges nothing more"
                );
            }
        }
        superseded
    }

    /// Returns an error if a required write is outstanding or if another write is in doubt.
    fn check_nothing_outstanding(&self) -> io::Result<()> {
        if self.outstanding.is_empty() && self.in_doubt.is_empty() {
            return Ok(());
        }
        let error = self.health.lock().error.clone();
        let error = error.map_or_else(|| "a commit failed".to_owned(), |(_, error)| error);
        Err(io::Error::other(format!("earlier writes are still failing: {error}")))
    }

    /// Writes the outstanding writes and then a group, each in one transaction.
    fn write(&mut self, group: Vec<PendingWrite>) {
        let group = reject_oversized(group);
        // Repair even if there is nothing to write: the client of a failed write received an error,
        // so the write must not be applied after a restart. If the repair fails, the next write
        // repeats it first.
        let repaired = self.repair();
        if self.notice_superseded(repaired.as_ref().err()) {
            let outstanding = std::mem::take(&mut self.outstanding);
            let in_doubt = std::mem::take(&mut self.in_doubt);
            let all = outstanding.into_iter().chain(in_doubt).chain(group);
            return reject(all, &super::database::superseded());
        }
        if !self.outstanding.is_empty() {
            let outstanding = std::mem::take(&mut self.outstanding);
            self.write_group(outstanding);
        }
        if group.is_empty() {
            return;
        }
        if self.outstanding.is_empty() {
            self.write_group(group);
            if !self.outstanding.is_empty() {
                // Retry the required writes at once: without the rejected writes they may fit on
                // the disk.
                let outstanding = std::mem::take(&mut self.outstanding);
                self.write_group(outstanding);
            }
        } else {
            let last = self.health.lock().error.clone();
            let (kind, error) = last.unwrap_or((io::ErrorKind::Other, String::new()));
            self.fail(group, &io::Error::new(kind, error).into());
        }
    }

    fn write_group(&mut self, group: Vec<PendingWrite>) {
        match self.try_write(&group) {
            Ok(()) => {
                if self.health.lock().error.take().is_some() {
                    tracing::info!(target: log::STORAGE, "writing to disk succeeds again");
                }
                self.confirm(group);
            }
            Err(failure) => self.fail(group, &failure),
        }
    }

    /// Reports a committed group.
    fn confirm(&mut self, group: Vec<PendingWrite>) {
        self.health.lock().commits += 1;
        for write in group {
            let deletes_run = |record: &Record| matches!(record, Record::RunDeleted { .. });
            if write.records.iter().any(deletes_run) {
                self.has_deleted_payloads = true;
                self.has_deleted_rows = true;
            }
            (write.on_written)(Ok(()));
        }
    }

    /// Commits the deletions of a group that failed because the disk is full, with the space of the
    /// reserve. Returns the other writes of the group.
    fn write_deletions(&mut self, group: Vec<PendingWrite>) -> Vec<PendingWrite> {
        let is_deletion = |write: &PendingWrite| {
            write.payload.is_none() && write.records.iter().all(|r| Deletion::of(r).is_some())
        };
        let (deletions, mut others): (Vec<PendingWrite>, Vec<PendingWrite>) =
            group.into_iter().partition(is_deletion);
        // Only a deletion that does not concern the objects of an earlier write may overtake it.
        let may_overtake = |write: &PendingWrite| {
            let earlier =
                || self.outstanding.iter().chain(&others).flat_map(|write| &write.records);
            let mut deletions = write.records.iter().filter_map(Deletion::of);
            deletions.all(|deletion| !earlier().any(|record| deletion.concerns(record)))
        };
        let (deletions, kept): (Vec<PendingWrite>, Vec<PendingWrite>) =
            deletions.into_iter().partition(may_overtake);
        others.extend(kept);
        if deletions.is_empty() {
            return others;
        }
        self.reserve.release();
        let written = self.try_write(&deletions);
        // Create the reserve again before any other write uses the space.
        self.reserve.refill();
        match written {
            Ok(()) => {
                self.confirm(deletions);
                others
            }
            Err(failure) => {
                tracing::warn!(
                    target: log::STORAGE,
                    error = %failure.error,
                    "cannot write a deletion with the reserved space"
                );
                if failure.in_doubt {
                    let (required, in_doubt): (Vec<PendingWrite>, Vec<PendingWrite>) =
                        deletions.into_iter().partition(|write| write.required);
                    self.outstanding.extend(required);
                    self.in_doubt.extend(in_doubt);
                } else {
                    others.extend(deletions);
                }
                others
            }
        }
    }

    /// Keeps the required writes of a failed group for a retry and rejects the others, at once or
    /// when it is certain that they are not applied.
    fn fail(&mut self, group: Vec<PendingWrite>, failure: &WriteFailure) {
        let error = &failure.error;
        if self.notice_superseded(Some(error)) {
            let outstanding = std::mem::take(&mut self.outstanding);
            return reject(outstanding.into_iter().chain(group), error);
        }
        let use_reserve = self.reserve.is_needed(error) && !failure.in_doubt;
        let group = if use_reserve { self.write_deletions(group) } else { group };
        let (required, rejected): (Vec<PendingWrite>, Vec<PendingWrite>) =
            group.into_iter().partition(|write| write.required);
        self.outstanding.extend(required);
        {
            let outstanding_error =
                (!self.outstanding.is_empty()).then(|| (error.kind(), error.to_string()));
            let mut health = self.health.lock();
            if outstanding_error.is_some() && health.error.is_none() {
                tracing::warn!(
                    target: log::STORAGE,
                    %error,
                    "cannot write results to disk; retrying until it succeeds"
                );
            }
            health.error = outstanding_error;
        }
        if failure.in_doubt {
            self.in_doubt.extend(rejected);
            return;
        }
        reject(rejected, error);
    }

    fn needs_repair(&self) -> bool {
        self.payloads.is_torn() || self.database.needs_repair()
    }

    /// Removes the rows and payloads of a failed write. The payloads are removed last, when no row
    /// can refer to them any more.
    fn repair(&mut self) -> io::Result<()> {
        self.database.repair()?;
        for write in self.in_doubt.drain(..) {
            (write.on_written)(Err(io::Error::other("the commit failed; the log has the cause")));
        }
        if self.payloads.is_torn() {
            self.database.exclusively(|| self.payloads.repair())?;
        }
        Ok(())
    }

    /// Writes a group. The payloads are written first, so that no row refers to a payload that is
    /// not durable.
    fn try_write(&mut self, group: &[PendingWrite]) -> Result<(), WriteFailure> {
        self.repair()?;
        let payloads = || group.iter().filter_map(|write| write.payload.as_ref());
        let next = payloads().map(|(number, _)| number + 1).max();
        let append = || self.payloads.append(payloads());
        let records = group.iter().flat_map(|write| &write.records);
        match self.database.write(append, records, next) {
            Ok(appended) => {
                self.payloads.commit(appended);
                Ok(())
            }
            Err(error) => {
                self.payloads.abandon();
                // A failed repair is repeated before the next write.
                let _ = self.repair();
                Err(WriteFailure { error, in_doubt: self.database.is_in_doubt() })
            }
        }
    }

    /// Truncates the WAL if it may have rows of a deleted run. The next command to compact the
    /// payload file repeats a failed attempt.
    fn truncate_wal(&mut self) {
        // A failed commit in the WAL must be overwritten first.
        if !self.has_deleted_rows || self.database.needs_repair() {
            return;
        }
        match self.database.truncate_wal() {
            Ok(truncated) => self.has_deleted_rows = !truncated,
            Err(error) => {
                tracing::warn!(target: log::STORAGE, %error, "cannot truncate the write-ahead log");
            }
        }
    }

    /// Starts a compaction of the payload file if it is worth it, and no other compaction is
    /// running.
    fn start_compaction(&mut self, min_bytes: u64, on_written: WriteCallback) {
        if self.compaction.is_some() {
            return on_written(Ok(()));
        }
        match self.prepare_compaction(min_bytes) {
            Ok(Some(compaction)) => self.compaction = Some((compaction, on_written)),
            Ok(None) => on_written(Ok(())),
            Err(error) => on_written(Err(error)),
        }
    }

    fn prepare_compaction(&mut self, min_bytes: u64) -> io::Result<Option<Compaction>> {
        self.check_nothing_outstanding()?;
        // Repair first: a crash could restore the rows of a failed commit, and they would need
        // payloads that the compaction removes.
        self.repair()?;
        let commits = self.health.lock().commits;
        let is_quiet = commits == self.commits_at_compaction;
        self.commits_at_compaction = commits;
        let length = self.payloads.len();
        // Do not rewrite a small file again and again while it is in use.
        if length < min_bytes && !is_quiet && !self.has_deleted_payloads {
            return Ok(None);
        }
        let needed = self.database.needed_payloads()?;
        let needed_bytes = self.payloads.len_of(&needed);
        let has_unneeded = length > MAGIC.len() as u64 + needed_bytes;
        let is_worth_it = needed_bytes <= length / 2 || self.has_deleted_payloads;
        if !has_unneeded || !is_worth_it {
            self.has_deleted_payloads &= has_unneeded;
            return Ok(None);
        }
        let payloads = &mut self.payloads;
        let compaction = self.database.exclusively(|| payloads.start_compaction(needed))?;
        // The copy has the payloads of a run that is deleted from now on.
        self.has_deleted_payloads = false;
        Ok(Some(compaction))
    }

    /// Copies the next part of a running compaction, and finishes the compaction after the last
    /// part. Writes are executed between the parts, so that they do not wait for the whole copy.
    fn continue_compaction(&mut self) {
        let Some((mut compaction, on_written)) = self.compaction.take() else { return };
        let finished = match self.payloads.copy_part(&mut compaction) {
            Ok(false) => {
                self.compaction = Some((compaction, on_written));
                return;
            }
            Ok(true) => self.finish_compaction(compaction),
            Err(error) => Err(error),
        };
        // The file that the compaction did not replace may have payloads of a deleted run.
        self.has_deleted_payloads |= finished.is_err();
        on_written(finished);
    }

    fn finish_compaction(&mut self, compaction: Compaction) -> io::Result<()> {
        // Repair first, as at the start of the compaction: a failed commit may be in the WAL.
        self.repair()?;
        let payloads = &mut self.payloads;
        self.database.exclusively(|| payloads.switch_to(compaction))
    }
}

/// Calls the callbacks of writes with an error.
fn reject(writes: impl IntoIterator<Item = PendingWrite>, error: &io::Error) {
    for write in writes {
        (write.on_written)(Err(io::Error::new(error.kind(), error.to_string())));
    }
}

/// Rejects the writes whose payloads exceed the size limit and returns the others. Required writes
/// are rejected too: retrying them forever would block all later writes.
fn reject_oversized(group: Vec<PendingWrite>) -> Vec<PendingWrite> {
    let fits = |write: &PendingWrite| {
        write.payload.as_ref().is_none_or(|(_, payload)| payload.len() <= MAX_PAYLOAD)
    };
    let (fitting, oversized): (Vec<PendingWrite>, Vec<PendingWrite>) =
        group.into_iter().partition(fits);
    for write in oversized {
        (write.on_written)(Err(super::frame::oversized()));
    }
    fitting
}
