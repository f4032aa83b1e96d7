//! Format of the data folder: recognizes and creates databases.
//!
//! The header of the database stores the version of the format, which covers the tables, the JSON
//! form of the records and the payload file. Version 1 is the format of Tinkex 0.1.0. Changes
//! before its release are [`Addition`]s to version 1, and earlier builds must not open a database
//! that has them.
//!
//! To change the format, increment [`VERSION`], convert databases of all earlier versions in one
//! transaction that includes the version in the header, and keep the upgrade test
//! (`crates/server/tests/it/upgrade.rs`) with its folder of every earlier version.

use rusqlite::Connection;

/// Statements that create the tables.
pub(in crate::disk) const SCHEMA: &str = include_str!("schema.sql");

/// Version of the format, stored as `user_version`.
pub(in crate::disk) const VERSION: i32 = 1;

/// "TNKX", stored as `application_id` to recognize databases of this server.
const APPLICATION: i32 = 0x544E_4B58;

/// A part of the tables that databases of earlier builds lack.
struct Addition {
    /// Table and column that exist once the statements were executed.
    table: &'static str,
    column: &'static str,
    statements: &'static str,
}

const ADDITIONS: &[Addition] = &[
    Addition {
        table: "writer_state",
        column: "epoch",
        statements: "ALTER TABLE writer_state ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0",
    },
    Addition {
        table: "user_metadata",
        column: "metadata",
        statements: "
            CREATE TABLE user_metadata (object TEXT PRIMARY KEY, metadata TEXT NOT NULL);
            INSERT INTO user_metadata SELECT id, record -> '$.user_metadata' FROM sessions
                WHERE json_type(record, '$.user_metadata') = 'object';
            INSERT INTO user_metadata SELECT id, record -> '$.user_metadata' FROM runs
                WHERE json_type(record, '$.user_metadata') = 'object';
            INSERT INTO user_metadata SELECT path, record -> '$.user_metadata' FROM checkpoints
                WHERE json_type(record, '$.user_metadata') = 'object';
            UPDATE runs SET record = json_set(record, '$.name', record ->> '$.user_metadata.name')
                WHERE json_type(record, '$.user_metadata.name') = 'text';
            UPDATE sessions SET record = json_set(json_remove(record, '$.user_metadata'),
                '$.metadata_bytes', octet_length(record -> '$.user_metadata'))
                WHERE json_type(record, '$.user_metadata') = 'object';
            UPDATE runs SET record = json_set(json_remove(record, '$.user_metadata'),
                '$.metadata_bytes', octet_length(record -> '$.user_metadata'))
                WHERE json_type(record, '$.user_metadata') = 'object';
            UPDATE checkpoints SET record = json_set(json_remove(record, '$.user_metadata'),
                '$.metadata_bytes', octet_length(record -> '$.user_metadata'))
                WHERE json_type(record, '$.user_metadata') = 'object'",
    },
    Addition {
        table: "sessions",
        column: "owner",
        statements: "ALTER TABLE sessions \
                     ADD COLUMN owner AS (ifnull(record ->> 'owner', 'admin'))",
    },
    Addition {
        table: "runs",
        column: "owner",
        statements: "ALTER TABLE runs \
                     ADD COLUMN owner AS (ifnull(record ->> 'owner', 'admin'))",
    },
    Addition {
        table: "sample_log",
        column: "owner",
        statements: "ALTER TABLE sample_log ADD COLUMN owner TEXT NOT NULL DEFAULT 'admin'",
    },
    Addition {
        table: "keys",
        column: "id",
        statements: "CREATE TABLE keys (id TEXT PRIMARY KEY, record TEXT NOT NULL)",
    },
    Addition {
        table: "users",
        column: "id",
        statements: "CREATE TABLE users (id TEXT PRIMARY KEY, record TEXT NOT NULL)",
    },
    Addition {
        table: "audit_log",
        column: "number",
        statements: "CREATE TABLE audit_log (number INTEGER PRIMARY KEY, record TEXT NOT NULL)",
    },
    // The primary key contains the new column, so the table is created again.
    Addition {
        table: "usage",
        column: "owner",
        statements: "
            ALTER TABLE usage RENAME TO usage_without_owner;
            CREATE TABLE usage (
                hour INTEGER NOT NULL,
                owner TEXT NOT NULL,
                session TEXT NOT NULL,
                base_model TEXT NOT NULL,
                meter TEXT NOT NULL,
                count INTEGER NOT NULL,
                PRIMARY KEY (hour, owner, session, base_model, meter)
            ) WITHOUT ROWID;
            INSERT INTO usage (hour, owner, session, base_model, meter, count)
                SELECT hour, 'admin', session, base_model, meter, count FROM usage_without_owner;
            DROP TABLE usage_without_owner",
    },
];

/// Values that identify the program and the version that wrote a database.
pub(in crate::disk) struct DatabaseHeader {
    application: i32,
    version: i32,
    has_tables: bool,
}

/// Preparation that a database needs before its rows can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::disk) enum SchemaState {
    /// The database has no tables; [`create`] creates them.
    Empty,
    /// The database has the current schema.
    Current,
}

impl DatabaseHeader {
    pub(in crate::disk) fn read(connection: &Connection) -> rusqlite::Result<Self> {
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
    pub(in crate::disk) fn schema_state(&self) -> Result<SchemaState, String> {
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
pub(in crate::disk) fn create(connection: &mut Connection) -> rusqlite::Result<()> {
    create_with(connection, SCHEMA)
}

/// Creates tables as [`create`] does, with the statements `schema`.
pub(in crate::disk) fn create_with(
    connection: &mut Connection,
    schema: &str,
) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    transaction.execute_batch(schema)?;
    transaction.pragma_update(None, "application_id", APPLICATION)?;
    transaction.pragma_update(None, "user_version", VERSION)?;
    transaction.commit()
}

/// Adds the parts that a database of an earlier build lacks, in one transaction. Writes nothing to a
/// database that is complete.
pub(in crate::disk) fn add_missing(connection: &mut Connection) -> rusqlite::Result<()> {
    let is_missing = |addition: &&Addition| -> rusqlite::Result<bool> {
        let sql = "SELECT count(*) FROM pragma_table_xinfo(?) WHERE name = ?";
        let count: i64 =
            connection.query_row(sql, [addition.table, addition.column], |row| row.get(0))?;
        Ok(count == 0)
    };
    let mut missing = Vec::new();
    for addition in ADDITIONS {
        if is_missing(&addition)? {
            missing.push(addition.statements);
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let transaction = connection.transaction()?;
    for statements in missing {
        transaction.execute_batch(statements)?;
    }
    transaction.commit()
}
