//! Format of the data folder: recognizes and creates databases.
//!
//! The header of the database stores the version of the format, which covers the tables, the JSON
//! form of the records and the payload file. Version 1 is the format of Tinkex 0.1.0.
//!
//! To change the format, increment [`VERSION`], convert databases of all earlier versions in one
//! transaction that includes the version in the header, and keep the upgrade test
//! (`crates/server/tests/it/upgrade.rs`) with its folder of every earlier version.

use rusqlite::Connection;

/// Statements that create the tables.
const SCHEMA: &str = include_str!("schema.sql");

/// Version of the format, stored as `user_version`.
pub(super) const VERSION: i32 = 1;

/// "TNKX", stored as `application_id` to recognize databases of this server.
const APPLICATION: i32 = 0x544E_4B58;

/// Values that identify the program and the version that wrote a database.
pub(super) struct DatabaseHeader {
    application: i32,
    version: i32,
    has_tables: bool,
}

/// Preparation that a database needs before its rows can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SchemaState {
    /// The database has no tables; [`create`] creates them.
    Empty,
    /// The database has the current schema.
    Current,
}

impl DatabaseHeader {
    pub(super) fn read(connection: &Connection) -> rusqlite::Result<Self> {
        let number = |name| connection.pragma_query_value(None, name, |row| row.get(0));
        let count_tables = "SELECT count(*) FROM sqlite_schema";
        let tables: i64 = connection.query_row(count_tables, [], |row| row.get(0))?;
        Ok(Self {
            application: number("application_id")?,
            version: number("user_version")?,
            has_tables: tables > 0,
        })
    }

    /// Returns the preparation that the database needs, or the reason why this server cannot use
    /// it.
    pub(super) fn schema_state(&self) -> Result<SchemaState, String> {
        if !self.has_tables {
            return Ok(SchemaState::Empty);
        }
        if self.application != APPLICATION {
            return Err("not a database of this server".to_owned());
        }
        match self.version {
            VERSION => Ok(SchemaState::Current),
            version => Err(format!(
                "the data folder has format {version} of {} version of Tinkex, and this version \
                 reads format {VERSION}; use that version of Tinkex, or another data folder",
                if version > VERSION { "a newer" } else { "an unknown" },
            )),
        }
    }
}

/// Creates the tables in an empty database, in one transaction that includes the version: after a
/// crash, the database is either empty or complete.
pub(super) fn create(connection: &mut Connection) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    transaction.execute_batch(SCHEMA)?;
    transaction.pragma_update(None, "application_id", APPLICATION)?;
    transaction.pragma_update(None, "user_version", VERSION)?;
    transaction.commit()
}
