//! Copies the database while the server writes to it.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::path::Path;

use rusqlite::{Connection, OpenFlags};

use super::column::read_u64;
use super::{BUSY_TIMEOUT, NEEDED_PAYLOADS, StoredRows, to_io_error};

/// Files that a copy of the database refers to.
pub(crate) struct SnapshotContent {
    /// Names of folders of weights.
    pub(crate) weights: BTreeSet<String>,
    /// Numbers of payloads.
    pub(crate) payloads: HashSet<u64>,
}

/// Writes a copy of the database at one moment to the new file `target`. The server can commit
/// meanwhile.
pub(crate) fn snapshot_into(database: &Path, target: &Path) -> io::Result<SnapshotContent> {
    let connect = |path: &Path| -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        Ok(connection)
    };
    // Create the file first, so that only its owner can read it: SQLite writes into an empty file.
    drop(super::super::payloads::private_file().open(target)?);
    let path = target.to_str().ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "the path of a backup must be valid UTF-8")
    })?;
    let copy = connect(database).and_then(|connection| {
        connection.execute("VACUUM INTO ?", [path])?;
        connect(target)
    });
    let copy = copy.map_err(to_io_error)?;
    let rows = StoredRows::read(&copy).map_err(to_io_error)?;
    let payloads = || -> rusqlite::Result<HashSet<u64>> {
        let mut statement = copy.prepare(NEEDED_PAYLOADS)?;
        statement.query_map([], |row| read_u64(row, "payload"))?.collect()
    };
    Ok(SnapshotContent {
        weights: rows.weights().map(str::to_owned).collect(),
        payloads: payloads().map_err(to_io_error)?,
    })
}
