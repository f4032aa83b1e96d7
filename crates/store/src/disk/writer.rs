//! The writer thread: groups writes, retries required writes, and compacts the payload file.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::time::timeout;

use super::database::Database;
use super::frame::MAX_PAYLOAD;
use super::payloads::{Compaction, Payloads};
use super::{WriteCallback, WriterHealth};
use crate::log;
use crate::record::Record;

/// Command for the writer thread.
pub(super) enum WriterCommand {
    Write(PendingWrite),
    Barrier { on_written: WriteCallback },
    Compact { min_bytes: u64, on_written: WriteCallback },
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
    pub(super) fn into_callback(self) -> WriteCallback {
        match self {
            Self::Write(PendingWrite { on_written, .. })
            | Self::Barrier { on_written }
            | Self::Compact { on_written, .. } => on_written,
        }
    }
}

/// State of the writer thread.
pub(super) struct DiskWriter {
    database: Database,
    payloads: Payloads,
    health: Arc<Mutex<WriterHealth>>,
    /// Required writes that have failed so far, in order.
    outstanding: Vec<PendingWrite>,
    /// Other writes whose commit failed and may be complete in the WAL. The writer rejects them
    /// once the commit is overwritten in the WAL: until then a crash could restore them.
    in_doubt: Vec<PendingWrite>,
    compaction: Option<(Compaction, WriteCallback)>,
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
        health: Arc<Mutex<WriterHealth>>,
    ) -> Self {
        Self {
            database,
            payloads,
            health,
            outstanding: Vec::new(),
            in_doubt: Vec::new(),
            compaction: None,
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
                    on_written(self.check_nothing_outstanding());
                }
                Some(WriterCommand::Compact { min_bytes, on_written }) => {
                    self.start_compaction(min_bytes, on_written);
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

    /// Returns an error if a required write is outstanding or if another write is in doubt.
    fn check_nothing_outstanding(&self) -> io::Result<()> {
        if self.outstanding.is_empty() && self.in_doubt.is_empty() {
            return Ok(());
        }
        let error = self.health.lock().error.clone();
        let error = error.unwrap_or_else(|| "a commit failed".to_owned());
        Err(io::Error::other(format!("earlier writes are still failing: {error}")))
    }

    /// Writes the outstanding writes and then a group, each in one transaction.
    fn write(&mut self, group: Vec<PendingWrite>) {
        let group = reject_oversized(group);
        // Repair even if there is nothing to write: the client of a failed write received an error,
        // so the write must not be applied after a restart. If the repair fails, the next write
        // repeats it first.
        let _ = self.repair();
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
            let error = self.health.lock().error.clone().unwrap_or_default();
            self.fail(group, &io::Error::other(error).into());
        }
    }

    fn write_group(&mut self, group: Vec<PendingWrite>) {
        match self.try_write(&group) {
            Ok(()) => {
                {
                    let mut health = self.health.lock();
                    if health.error.take().is_some() {
                        tracing::info!(target: log::STORAGE, "writing to disk succeeds again");
                    }
                    health.commits += 1;
                }
                for write in group {
                    (write.on_written)(Ok(()));
                }
            }
            Err(failure) => self.fail(group, &failure),
        }
    }

    /// Keeps the required writes of a failed group for a retry and rejects the others, at once or
    /// when it is certain that they are not applied.
    fn fail(&mut self, group: Vec<PendingWrite>, failure: &WriteFailure) {
        let error = &failure.error;
        let (required, rejected): (Vec<PendingWrite>, Vec<PendingWrite>) =
            group.into_iter().partition(|write| write.required);
        self.outstanding.extend(required);
        {
            let outstanding_error = (!self.outstanding.is_empty()).then(|| error.to_string());
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
        for write in rejected {
            (write.on_written)(Err(io::Error::new(error.kind(), error.to_string())));
        }
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
        self.payloads.repair()
    }

    /// Writes a group. The payloads are written first, so that no row refers to a payload that is
    /// not durable.
    fn try_write(&mut self, group: &[PendingWrite]) -> Result<(), WriteFailure> {
        self.repair()?;
        let payloads = || group.iter().filter_map(|write| write.payload.as_ref());
        let appended = self.payloads.append(payloads())?;
        let next = payloads().map(|(number, _)| number + 1).max();
        match self.database.write(group.iter().flat_map(|write| &write.records), next) {
            Ok(()) => {
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

    /// Starts a compaction of the payload file, if it has at least `min_bytes` bytes, no row needs
    /// at least half of them, and no other compaction is running.
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
        let length = self.payloads.len();
        if length < min_bytes {
            return Ok(None);
        }
        let needed = self.database.needed_payloads()?;
        if self.payloads.len_of(&needed) > length / 2 {
            return Ok(None);
        }
        self.payloads.start_compaction(needed).map(Some)
    }

    /// Copies the next part of a running compaction, and finishes the compaction after the last
    /// part. Writes are executed between the parts, so that they do not wait for the whole copy.
    fn continue_compaction(&mut self) {
        let Some((mut compaction, on_written)) = self.compaction.take() else { return };
        match self.payloads.copy_part(&mut compaction) {
            Ok(false) => self.compaction = Some((compaction, on_written)),
            // Repair first, as at the start of the compaction: a failed commit may be in the WAL.
            Ok(true) => {
                let finished = self.repair().and_then(|()| self.payloads.switch_to(compaction));
                on_written(finished);
            }
            Err(error) => on_written(Err(error)),
        }
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
