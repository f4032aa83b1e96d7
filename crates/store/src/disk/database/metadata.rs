//! Reads the metadata of objects, which is not kept in memory.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rusqlite::{Connection, OpenFlags, OptionalExtension as _};
use tinkex_wire::JsonObject;

use super::{BUSY_TIMEOUT, to_io_error};

/// Opens connections that read metadata. Cheap to clone.
#[derive(Clone, Debug)]
pub struct MetadataReader(Arc<Path>);

/// Read-only connection to the database.
#[derive(Debug)]
pub struct MetadataConnection(Connection);

impl MetadataReader {
    pub(super) fn new(database: &Path) -> Self {
        Self(database.into())
    }

    /// Connects to the database. Opening is cheap; a connection is not kept, because an open
    /// connection would outlive the server.
    ///
    /// # Errors
    /// If the database cannot be opened.
    pub fn connect(&self) -> io::Result<MetadataConnection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.0, flags).map_err(to_io_error)?;
        connection.busy_timeout(BUSY_TIMEOUT).map_err(to_io_error)?;
        Ok(MetadataConnection(connection))
    }

    /// Reads the metadata of an object. `bytes` is the size in its record: 0 returns `None` without
    /// a read.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn get(&self, object: &str, bytes: u64) -> io::Result<Option<JsonObject>> {
        if bytes == 0 { Ok(None) } else { self.connect()?.get(object) }
    }
}

impl MetadataConnection {
    /// Returns the metadata of an object; `None` if it has none, or if it was removed.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn get(&self, object: &str) -> io::Result<Option<JsonObject>> {
        let sql = "SELECT metadata FROM user_metadata WHERE object = ?";
        let mut statement = self.0.prepare_cached(sql).map_err(to_io_error)?;
        let text = statement.query_row([object], |row| row.get::<_, String>(0)).optional();
        let Some(text) = text.map_err(to_io_error)? else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|error| {
            let message = format!("cannot read the metadata of {object}: {error}");
            io::Error::new(io::ErrorKind::InvalidData, message)
        })
    }
}
