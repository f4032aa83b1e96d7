//! Versions of the database schema: recognizes, creates and migrates databases.
//!
//! The file header stores the version. Each version but the first has a migration from its
//! predecessor, and opening an older database runs all migrations that it lacks. Creation and
//! migration are single transactions that include the version in the header: after a crash, the
//! database has either the old schema and version or the new ones.

use rusqlite::{Connection, TransactionBehavior};

/// Statements that create the current schema.
const SCHEMA: &str = include_str!("schema.sql");

/// Version of the current schema, stored as `user_version`.
pub(super) const VERSION: i32 = 4;

/// Oldest version that this server can convert.
const OLDEST_VERSION: i32 = 1;

/// Conversion of a database to the next version.
struct Migration {
    from_version: i32,
    statements: &'static str,
}

/// All migrations, in order of versions.
///
/// To change the schema, copy `schema.sql` to a file for the tests of the migration, as
/// `schema_1.sql`, then edit it, increment [`VERSION`] and append a migration. Never edit an
/// existing migration: it has already converted databases that are in use.
const MIGRATIONS: &[Migration] = &[
    Migration { from_version: 1, statements: include_str!("migrate_1_to_2.sql") },
    Migration { from_version: 2, statements: include_str!("migrate_2_to_3.sql") },
    Migration { from_version: 3, statements: include_str!("migrate_3_to_4.sql") },
];

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
    /// An earlier version of the server wrote the database; [`migrate`] converts it.
    Outdated { version: i32 },
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
            version @ OLDEST_VERSION..VERSION => Ok(SchemaState::Outdated { version }),
            version => Err(format!(
                "written by {} version of this server (schema {version}, this version supports \
                 {OLDEST_VERSION} to {VERSION}); use that version, or another data folder",
                if version > VERSION { "a newer" } else { "an unknown" },
            )),
        }
    }
}

/// Creates the tables of the current schema in an empty database.
pub(super) fn create(connection: &mut Connection) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    transaction.execute_batch(SCHEMA)?;
    transaction.pragma_update(None, "application_id", APPLICATION)?;
    set_version(&transaction)?;
    transaction.commit()
}

/// Converts a database from the schema `version` to the current one.
///
/// The connection must have the settings for durable commits, and the caller must hold the lock of
/// the data folder, which keeps a second server from migrating at the same time. A failure leaves
/// the database in its old schema, except if only the flush of the commit fails: then the next
/// start finds one schema or the other, complete in both cases.
pub(super) fn migrate(connection: &mut Connection, version: i32) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for migration in MIGRATIONS.iter().filter(|migration| migration.from_version >= version) {
        transaction.execute_batch(migration.statements)?;
    }
    set_version(&transaction)?;
    transaction.commit()
}

/// Stores the current version in the file header. Like any other page, the header changes only when
/// the transaction commits.
fn set_version(transaction: &Connection) -> rusqlite::Result<()> {
    transaction.pragma_update(None, "user_version", VERSION)
}
