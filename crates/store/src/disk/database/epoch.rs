//! The epoch of the data folder: a server stops when another server has claimed the data folder.
//!
//! The lock file excludes a second server on the same machine. The lock has no effect if the file
//! was removed, or on a file system whose locks are per machine. Each start increments the epoch in
//! the database, and every transaction compares it. The claim and the writes are transactions, so a
//! server that was superseded writes neither rows nor payloads after the claim.

use std::error::Error;
use std::fmt;
use std::io;

use rusqlite::Connection;

use super::{Database, to_io_error};

/// Error of a write after another server has claimed the data folder.
#[derive(Debug)]
struct Superseded;

impl fmt::Display for Superseded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another server has taken over the data folder")
    }
}

impl Error for Superseded {}

/// Returns whether a write failed because another server has claimed the data folder.
pub(in crate::disk) fn is_superseded(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|error| error.is::<Superseded>())
}

/// Returns the error for which [`is_superseded`] is true.
pub(in crate::disk) fn superseded() -> io::Error {
    io::Error::other(Superseded)
}

impl Database {
    /// Claims the data folder for this server.
    pub(in crate::disk) fn claim(&mut self) -> io::Result<()> {
        let sql = "UPDATE writer_state SET epoch = epoch + 1 RETURNING epoch";
        let epoch = self.connection.query_row(sql, [], |row| row.get(0)).map_err(to_io_error)?;
        self.epoch = Some(epoch);
        Ok(())
    }

    /// Returns an error if another server has claimed the data folder.
    pub(in crate::disk) fn check_epoch(&self) -> io::Result<()> {
        check_epoch(&self.connection, self.epoch)
    }

    /// Runs `action`, which changes the payload file, within a transaction: no other server can
    /// claim the data folder in between.
    pub(in crate::disk) fn exclusively<T>(
        &mut self,
        action: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let behavior = rusqlite::TransactionBehavior::Immediate;
        let transaction =
            self.connection.transaction_with_behavior(behavior).map_err(to_io_error)?;
        check_epoch(&transaction, self.epoch)?;
        action()
    }
}

/// Returns an error if `own` is not the epoch of the data folder.
pub(super) fn check_epoch(connection: &Connection, own: Option<i64>) -> io::Result<()> {
    let Some(own) = own else { return Ok(()) };
    let sql = "SELECT epoch FROM writer_state";
    let mut statement = connection.prepare_cached(sql).map_err(to_io_error)?;
    let epoch: i64 = statement.query_row([], |row| row.get(0)).map_err(to_io_error)?;
    if epoch == own { Ok(()) } else { Err(superseded()) }
}
