//! The SQLite database: records as rows, written in transactions by the writer thread.
//!
//! All rows except metadata are read once, at the start; requests then use the copy in memory. After
//! the start, the database is read only for the metadata of objects, and to find the payloads that
//! are still needed.

mod column;
mod epoch;
mod metadata;
pub(super) mod schema;
mod snapshot;
mod stored_rows;
mod write_history;
mod write_records;

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, TransactionBehavior};
use tinkex_files::{FileOperation, announce};

use self::column::{read_u64, to_i64};
use self::epoch::check_epoch;
pub(super) use self::epoch::{is_superseded, superseded};
pub use self::metadata::{MetadataConnection, MetadataReader};
use self::schema::{DatabaseHeader, SchemaState};
pub(crate) use self::snapshot::snapshot_into;
pub use self::stored_rows::{StoredChange, StoredRequest, StoredResult, StoredRows, StoredRun};
use self::write_records::{execute, write_records};
use crate::record::Record;

/// Time to wait for a lock that another program holds, for example a database browser.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);

/// Settings of the connection. A commit must survive a power failure, so that a request can be
/// acknowledged as soon as its transaction is committed.
const SETTINGS: &[(&str, &str)] = &[
    ("journal_mode", "wal"),
    ("synchronous", "full"),
    ("fullfsync", "on"),
    ("checkpoint_fullfsync", "on"),
    ("temp_store", "memory"),
    // Overwrite deleted rows: they contain prompts and completions.
    ("secure_delete", "on"),
    // Truncate the WAL to 16 MiB after a burst.
    ("journal_size_limit", "16777216"),
];

/// Selects the payloads that rows need. The body of a finished request is not needed, except for a
/// custom loss, which is restored from it after a restart.
const NEEDED_PAYLOADS: &str = "
    SELECT body_payload AS payload FROM requests
        WHERE result_payload IS NULL OR kind = 'create_custom_loss'
    UNION SELECT result_payload FROM requests WHERE result_payload IS NOT NULL
    UNION SELECT body_payload FROM changes";

/// Selects the folders of weights that rows refer to.
const STORED_FOLDERS: &str = "
    SELECT folder FROM (
        SELECT record ->> '$.weights.local' AS folder FROM checkpoints
        UNION SELECT record ->> '$.weights.local' FROM samplers
        UNION SELECT record ->> '$.snapshot.weights.local' FROM runs
        UNION SELECT record ->> '$.source.local' FROM requests
    ) WHERE folder IS NOT NULL";

/// Connection of the writer thread.
pub(super) struct Database {
    connection: Connection,
    /// Whether the database has no tables yet.
    is_new: bool,
    /// Whether the WAL may contain a commit that failed; see [`repair`](Self::repair).
    pub(super) needs_repair: bool,
    /// Whether the failed commit may be complete in the WAL, so that SQLite would apply it after a
    /// crash.
    in_doubt: bool,
    /// Epoch of this server; `None` before [`claim`](Self::claim).
    epoch: Option<i64>,
    /// Maximum number of pages, to simulate a full disk.
    #[cfg(test)]
    pub(super) max_pages: std::sync::Arc<std::sync::atomic::AtomicU32>,
    /// Whether commits fail after writing to the WAL, as if its flush failed.
    #[cfg(test)]
    pub(super) failing_commits: std::sync::Arc<std::sync::atomic::AtomicBool>,
}

impl Database {
    /// Opens or creates the database at `path`. A new database needs
    /// [`create_tables`](Self::create_tables).
    ///
    /// # Errors
    /// Fails if the file cannot be read, is not a database of this server, or has a format that
    /// this version does not read. The file is unchanged then.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let invalid = |message: String| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{}: {message}", path.display()))
        };
        // Create the file with owner-only permissions; SQLite gives its WAL and shared-memory
        // files the permissions of the database.
        drop(super::payloads::private_file().open(path)?);
        // SQLite interprets a relative name that starts with `file:` as a URI.
        let absolute = std::path::absolute(path)?;
        let (connection, header) =
            connect(&absolute).map_err(|error| invalid(error.to_string()))?;
        // Check before applying the settings: some settings modify the file.
        let state = header.schema_state().map_err(invalid)?;
        for (name, value) in SETTINGS {
            // Use `pragma_update`: it accepts the row that some of these settings return.
            connection.pragma_update(None, name, value).map_err(to_io_error)?;
        }
        make_durable(&connection).map_err(|error| {
            let message = "cannot write the last commits to disk";
            io::Error::new(error.kind(), format!("{}: {message}: {error}", path.display()))
        })?;
        Ok(Self {
            connection,
            is_new: state == SchemaState::Empty,
            needs_repair: false,
            in_doubt: false,
            epoch: None,
            #[cfg(test)]
            max_pages: std::sync::Arc::new(u32::MAX.into()),
            #[cfg(test)]
            failing_commits: std::sync::Arc::default(),
        })
    }

    /// Returns whether the database has no tables yet.
    pub(super) fn is_new(&self) -> bool {
        self.is_new
    }

    /// Creates the tables of a new database.
    pub(super) fn create_tables(&mut self) -> io::Result<()> {
        schema::create(&mut self.connection).map_err(to_io_error)?;
        self.is_new = false;
        Ok(())
    }

    /// Adds the tables and columns that a database of an earlier build lacks.
    pub(super) fn add_missing(&mut self) -> io::Result<()> {
        schema::add_missing(&mut self.connection).map_err(to_io_error)
    }

    /// Returns a reader of the metadata of objects.
    pub(super) fn metadata_reader(&self) -> MetadataReader {
        MetadataReader::new(Path::new(self.connection.path().unwrap_or_default()))
    }

    /// Returns the first payload number that no row refers to.
    pub(super) fn next_payload_number(&self) -> io::Result<u64> {
        let sql = "SELECT next_payload FROM writer_state";
        let next = self.connection.query_row(sql, [], |row| read_u64(row, "next_payload"));
        next.map_err(to_io_error)
    }

    /// Returns the numbers of the payloads that rows need.
    pub(super) fn needed_payloads(&self) -> io::Result<HashSet<u64>> {
        let read = || -> rusqlite::Result<HashSet<u64>> {
            let mut statement = self.connection.prepare_cached(NEEDED_PAYLOADS)?;
            statement.query_map([], |row| read_u64(row, "payload"))?.collect()
        };
        read().map_err(to_io_error)
    }

    /// Returns the names of the folders of weights that rows refer to.
    pub(super) fn stored_folders(&self) -> io::Result<HashSet<String>> {
        self.check_epoch()?;
        let read = || -> rusqlite::Result<HashSet<String>> {
            let mut statement = self.connection.prepare_cached(STORED_FOLDERS)?;
            statement.query_map([], |row| row.get(0))?.collect()
        };
        read().map_err(to_io_error)
    }

    /// Truncates the WAL, so that it has no content of deleted rows. Returns whether it was
    /// truncated: it is not while another connection reads the database.
    pub(super) fn truncate_wal(&self) -> io::Result<bool> {
        let sql = "PRAGMA wal_checkpoint(TRUNCATE)";
        // Do not wait for the reader: writes would wait too.
        self.connection.busy_timeout(Duration::ZERO).map_err(to_io_error)?;
        let busy = self.connection.query_row(sql, [], |row| row.get::<_, bool>(0));
        self.connection.busy_timeout(BUSY_TIMEOUT).map_err(to_io_error)?;
        busy.map(|busy| !busy).map_err(to_io_error)
    }

    /// Reads all rows.
    pub(super) fn read(&self) -> io::Result<StoredRows> {
        StoredRows::read(&self.connection).map_err(|error| match error {
            rusqlite::Error::FromSqlConversionFailure(..) => io::Error::new(
                io::ErrorKind::InvalidData,
                format!("cannot read a stored record: {error}"),
            ),
            error => to_io_error(error),
        })
    }

    /// Writes records in one transaction. `prepare` writes the payloads, after the transaction has
    /// begun: no other server can claim the data folder in between. `next_payload` is the first
    /// payload number that no row refers to; `None` leaves it unchanged. After a failure,
    /// [`repair`](Self::repair) must run before the next write.
    pub(super) fn write<'a, T>(
        &mut self,
        prepare: impl FnOnce() -> io::Result<T>,
        records: impl Iterator<Item = &'a Record>,
        next_payload: Option<u64>,
    ) -> io::Result<T> {
        #[cfg(test)]
        self.limit_pages()?;
        let behavior = TransactionBehavior::Immediate;
        let transaction =
            self.connection.transaction_with_behavior(behavior).map_err(to_io_error)?;
        check_epoch(&transaction, self.epoch)?;
        let prepared = prepare()?;
        write_records(&transaction, records).map_err(to_io_error)?;
        if let Some(next) = next_payload {
            let sql = "UPDATE writer_state SET next_payload = ?";
            execute(&transaction, sql, [to_i64(next)]).map_err(to_io_error)?;
        }
        announce(FileOperation::Commit)?;
        #[cfg(test)]
        if self.failing_commits.load(std::sync::atomic::Ordering::Relaxed) {
            drop(transaction);
            self.needs_repair = true;
            self.in_doubt = true;
            return Err(io::Error::other("the test fails the commit"));
        }
        let committed = transaction.commit();
        self.needs_repair = committed.is_err();
        self.in_doubt = committed.as_ref().is_err_and(may_be_applied);
        committed.map(|()| prepared).map_err(to_io_error)
    }

    #[cfg(test)]
    fn limit_pages(&self) -> io::Result<()> {
        let max_pages = self.max_pages.load(std::sync::atomic::Ordering::Relaxed);
        self.connection.pragma_update(None, "max_page_count", max_pages).map_err(to_io_error)
    }

    /// Overwrites a failed commit in the WAL with another commit. If only the flush failed, the WAL
    /// contains the whole commit, and SQLite would apply it after a crash although the client
    /// received an error.
    pub(super) fn repair(&mut self) -> io::Result<()> {
        if self.needs_repair {
            #[cfg(test)]
            if self.failing_commits.load(std::sync::atomic::Ordering::Relaxed) {
                return Err(io::Error::other("the test fails the repair"));
            }
            let sql = "UPDATE writer_state SET overwritten_commits = overwritten_commits + 1 \
                       WHERE epoch = ifnull(?, epoch)";
            announce(FileOperation::Commit)?;
            if self.connection.execute(sql, [self.epoch]).map_err(to_io_error)? == 0 {
                return Err(superseded());
            }
            self.needs_repair = false;
            self.in_doubt = false;
        }
        Ok(())
    }

    pub(super) fn needs_repair(&self) -> bool {
        self.needs_repair
    }

    /// Returns whether a crash could apply the last commit, which failed.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }
}

/// Connects to the database at `path` and reads its header. Changes neither schema nor rows.
fn connect(path: &Path) -> rusqlite::Result<(Connection, DatabaseHeader)> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.set_prepared_statement_cache_capacity(48);
    let header = DatabaseHeader::read(&connection)?;
    Ok((connection, header))
}

/// Makes all commits in the WAL durable, before the server shows anything that they wrote.
///
/// The WAL may contain commits that are not durable: their flush failed, or the process died before
/// the flush. If a power failure removed such a commit, the server would assign the payload numbers
/// of its results again, and a client that has seen a higher number would ignore the new results.
/// Copying the commits to the database file flushes the database file. A second flush of the WAL is
/// not enough: after a failed flush it may do nothing.
fn make_durable(connection: &Connection) -> io::Result<()> {
    let sql = "PRAGMA wal_checkpoint(PASSIVE)";
    let is_complete = |row: &rusqlite::Row<'_>| Ok(row.get::<_, i64>(2)? >= row.get::<_, i64>(1)?);
    if connection.query_row(sql, [], is_complete).map_err(to_io_error)? {
        return Ok(());
    }
    // Another program is reading an old state, so the commits cannot be copied to the database
    // file. A new commit flushes the WAL instead.
    let sql = "UPDATE writer_state SET next_payload = next_payload";
    connection.execute(sql, []).map(drop).map_err(to_io_error)
}

/// Returns whether a failed commit may be complete in the WAL because only its flush failed. If a
/// write failed, the end of the commit is missing, and SQLite never applies it.
fn may_be_applied(error: &rusqlite::Error) -> bool {
    use rusqlite::ffi::{SQLITE_BUSY, SQLITE_FULL, SQLITE_IOERR_WRITE};
    let code = error.sqlite_error().map(|error| error.extended_code);
    !matches!(code, Some(SQLITE_BUSY | SQLITE_FULL | SQLITE_IOERR_WRITE))
}

/// Converts an SQLite error to an I/O error.
#[expect(clippy::needless_pass_by_value, reason = "`map_err` passes the error by value")]
fn to_io_error(error: rusqlite::Error) -> io::Error {
    let kind = match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::DiskFull) => io::ErrorKind::StorageFull,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, format!("database: {error}"))
}

#[cfg(test)]
mod tests;
