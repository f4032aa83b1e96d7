//! Durable storage: everything that must survive a crash.
//!
//! Records are rows of a SQLite `database`; request bodies and results are `payloads`, numbered
//! entries of a file next to it. One thread, the `writer`, owns both. Writes that arrive while it
//! is busy are grouped: their payloads are appended and flushed, then one transaction commits their
//! rows. A hundred concurrent requests need two flushes, and a row never refers to a payload that
//! is not durable. A payload that no row refers to is ignored and removed later.
//!
//! Each write has a callback that runs once the write is durable or has failed. Only this callback
//! acknowledges a request. After a failed write, the writer removes its bytes from both files.
//!
//! A data folder has one writer: see `database::epoch`. On a full disk, `reserve` has the space for
//! deletions.
//!
//! The write of a result is required: its request has already been executed, so the write cannot be
//! rejected. The writer retries required writes until they succeed, before any later write.

pub mod check;
mod database;
mod deletion;
mod frame;
mod payloads;
mod reserve;
mod scan;
mod writer;

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use self::database::Database;
pub(crate) use self::database::snapshot_into;
pub use self::database::{
    MetadataConnection, MetadataReader, StoredChange, StoredRequest, StoredResult, StoredRows,
    StoredRun,
};
pub use self::payloads::PayloadReader;
use self::payloads::Payloads;
use self::reserve::Reserve;
#[cfg(test)]
pub(crate) use self::tests::append as append_request;
use self::writer::{DiskWriter, PendingWrite, WriterCommand};
use crate::executor::{Executor, LoopHandle};
use crate::log;
use crate::record::Record;

/// Callback that runs on the writer thread once a write is durable or has failed.
pub type WriteCallback = Box<dyn FnOnce(io::Result<()>) + Send>;

/// Callback that receives the names of folders of weights.
pub type FoldersCallback = Box<dyn FnOnce(io::Result<HashSet<String>>) + Send>;

/// Database file in the data folder.
pub const DATABASE: &str = "metadata.sqlite";
/// File of the dashboard's sessions in the data folder.
pub const DASHBOARD_SESSIONS: &str = "dashboard-sessions.json";
/// Payload file in the data folder.
pub(crate) const PAYLOADS: &str = "payloads";
/// Folder of all adapter folders in the data folder.
pub const WEIGHTS: &str = "weights";

/// Handle of the writer. Dropping it finishes the queued writes and ends the writer.
pub struct Disk {
    /// Next payload number to assign.
    next: u64,
    sender: Option<UnboundedSender<WriterCommand>>,
    reader: PayloadReader,
    metadata: MetadataReader,
    health: Arc<Mutex<WriterHealth>>,
    server_health: watch::Sender<ServerHealth>,
    writer: Option<LoopHandle<()>>,
    executor: Executor,
}

/// Whether the server can execute requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerHealth {
    Working,
    /// A thread has panicked, which is a bug.
    Panicked,
    /// Another server has claimed the data folder.
    Superseded,
}

/// State of the writer thread for status messages and metrics.
#[derive(Debug, Default)]
struct WriterHealth {
    /// Error of the last attempt to persist a required write; `None` if no required write is
    /// outstanding.
    error: Option<(io::ErrorKind, String)>,
    /// Number of committed transactions.
    commits: u64,
}

impl Disk {
    /// Opens or creates the database and the payload file in `folder`, starts the writer on
    /// `executor`, and returns the stored rows.
    ///
    /// A write that a crash interrupted is removed: no client received an acknowledgement for it.
    ///
    /// # Errors
    /// Fails if a file cannot be read or belongs to another program or to a newer version, or if the
    /// payload file is empty although rows refer to payloads. A damaged payload fails only when it
    /// is read.
    pub fn open(folder: &Path, executor: &Executor) -> io::Result<(Self, StoredRows)> {
        let reserve = Reserve::new(folder);
        let opened = Self::open_files(folder).or_else(|error| {
            // A start on a full disk must succeed, so that something can be deleted.
            if reserve.is_needed(&error) && reserve.release_for_start(folder) {
                Self::open_files(folder)
            } else {
                Err(error)
            }
        });
        let (database, payloads, rows) = opened?;
        let next = payloads.first_free();
        Ok((Self::start(database, payloads, reserve, next, executor)?, rows))
    }

    /// Opens the files and reads the rows. Claims the data folder before the payload file is read:
    /// another server that still runs does not change the file afterwards.
    fn open_files(folder: &Path) -> io::Result<(Database, Payloads, StoredRows)> {
        let path = folder.join(DATABASE);
        if !path.exists() {
            check_no_data(folder)?;
        }
        let mut database = Database::open(&path)?;
        if database.is_new() {
            check_no_data(folder)?;
            database.create_tables()?;
        } else {
            database.add_missing()?;
        }
        database.claim()?;
        let rows = database.read()?;
        let next = database.next_payload_number()?;
        let needed = database.needed_payloads()?;
        let payloads = Payloads::open(&folder.join(PAYLOADS), next, &needed)?;
        Ok((database, payloads, rows))
    }

    fn start(
        database: Database,
        payloads: Payloads,
        reserve: Reserve,
        next: u64,
        executor: &Executor,
    ) -> io::Result<Self> {
        let (sender, receiver) = unbounded_channel();
        let health = Arc::default();
        let reader = payloads.reader();
        let metadata = database.metadata_reader();
        let server_health = watch::Sender::new(ServerHealth::Working);
        let writer = DiskWriter::new(
            database,
            payloads,
            reserve,
            Arc::clone(&health),
            server_health.clone(),
        );
        let panicked_health = server_health.clone();
        let on_panic = move || {
            tracing::error!(
                target: log::STORAGE,
                "the writer thread panicked; restart the server to continue with the accepted \
                 requests"
            );
            panicked_health.send_replace(ServerHealth::Panicked);
        };
        let writer = Some(executor.start("disk", writer.run(receiver), on_panic)?);
        let sender = Some(sender);
        let executor = executor.clone();
        Ok(Self { next, sender, reader, metadata, health, server_health, writer, executor })
    }

    /// Returns the channel that reports whether the server can execute requests.
    pub fn server_health(&self) -> watch::Sender<ServerHealth> {
        self.server_health.clone()
    }

    /// Assigns the next payload number.
    pub fn next_payload_number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }

    /// Queues records and the payload that they refer to, written together or not at all.
    /// `on_written` never runs on the caller's thread.
    pub fn append(
        &mut self,
        records: Vec<Record>,
        payload: Option<(u64, Bytes)>,
        on_written: WriteCallback,
    ) {
        self.send_write(records, payload, false, on_written);
    }

    /// Queues a write that is retried until it succeeds. `on_written` gets an error only if the
    /// server shuts down before the write succeeds, or if the payload exceeds the size limit.
    pub fn append_required(
        &mut self,
        records: Vec<Record>,
        payload: Option<(u64, Bytes)>,
        on_written: WriteCallback,
    ) {
        self.send_write(records, payload, true, on_written);
    }

    fn send_write(
        &mut self,
        records: Vec<Record>,
        payload: Option<(u64, Bytes)>,
        required: bool,
        on_written: WriteCallback,
    ) {
        self.send(WriterCommand::Write(PendingWrite { records, payload, required, on_written }));
    }

    /// Calls `on_written` once all previously queued writes are durable or have failed, with an
    /// error if a required write is still outstanding.
    pub fn barrier(&mut self, on_written: WriteCallback) {
        self.send(WriterCommand::Barrier { on_written });
    }

    /// Queues a compaction of the payload file. The file is rewritten if at least half of its bytes
    /// belong to payloads that no row needs, and it either has at least `min_bytes` bytes or nothing
    /// was written since the last call. After the deletion of a run, the file is rewritten if it has
    /// any payload that no row needs. The WAL is truncated then, and after the start.
    pub fn compact(&mut self, min_bytes: u64, on_written: WriteCallback) {
        self.send(WriterCommand::Compact { min_bytes, on_written });
    }

    /// Calls `on_read` with the names of the folders of weights that durable rows refer to. Unlike a
    /// [`barrier`](Self::barrier), this does not wait for required writes that are outstanding.
    pub fn stored_folders(&mut self, on_read: FoldersCallback) {
        self.send(WriterCommand::StoredFolders { on_read });
    }

    fn send(&mut self, command: WriterCommand) {
        let unsent = match &self.sender {
            Some(sender) => sender.send(command).err().map(|unsent| unsent.0),
            None => Some(command),
        };
        let Some(unsent) = unsent else { return };
        // Defer the callback: the caller may hold a lock that the callback takes. If no thread can
        // be spawned, the callback is dropped, which its receivers treat as a shutdown.
        self.executor.defer(move || unsent.fail(io::Error::other("the server is shutting down")));
    }

    /// Rejects further writes and returns the handle of the writer, which ends once the queued
    /// writes are finished; `None` if the disk was already closed.
    pub fn close(&mut self) -> Option<LoopHandle<()>> {
        self.sender = None;
        self.writer.take()
    }

    /// Returns why required writes are failing, if they are.
    pub fn write_error(&self) -> Option<String> {
        self.health.lock().error.as_ref().map(|(_, error)| error.clone())
    }

    /// Returns the number of committed transactions.
    pub fn commits(&self) -> u64 {
        self.health.lock().commits
    }

    /// Returns the size of the payload file in bytes.
    pub fn payload_bytes(&self) -> u64 {
        self.reader.len()
    }

    pub fn reader(&self) -> PayloadReader {
        self.reader.clone()
    }

    /// Returns the size of a payload with its header in bytes; 0 if there is no such payload.
    pub fn payload_len(&self, number: u64) -> u64 {
        self.reader.len_of(number)
    }

    /// Returns a reader of the metadata of objects.
    pub fn metadata(&self) -> MetadataReader {
        self.metadata.clone()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A callback on the writer thread may drop the last reference to the server. `block`
        // returns at once on that thread, so the thread does not wait for itself.
        if let Some(writer) = self.close() {
            writer.block();
        }
    }
}

/// Returns an error if `folder` contains data without a database. A new database would not refer to
/// that data, and the expiry task would remove the weights.
fn check_no_data(folder: &Path) -> io::Result<()> {
    let empty = frame::MAGIC.len() as u64;
    let payloads = std::fs::metadata(folder.join(PAYLOADS));
    let (name, message) = if payloads.is_ok_and(|file| file.len() > empty) {
        let message = "payload file without its database metadata.sqlite; restore the data \
                       folder from a backup, or use another one";
        (PAYLOADS, message)
    } else if std::fs::read_dir(folder.join(WEIGHTS))
        .is_ok_and(|mut entries| entries.next().is_some())
    {
        let message = "weights without the database metadata.sqlite; restore the data folder \
                       from a backup, or use another one";
        (WEIGHTS, message)
    } else {
        return Ok(());
    };
    let path = folder.join(name);
    Err(io::Error::new(io::ErrorKind::InvalidData, format!("{}: {message}", path.display())))
}

#[cfg(test)]
pub mod tests;
