//! Reads all rows of a database, also of a damaged one, and copies them to a new one.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use rusqlite::types::Value;
use rusqlite::{Connection, OpenFlags, params_from_iter};
use serde::de::DeserializeOwned;

use super::super::database::schema::{self, DatabaseHeader};
use super::{FileReport, FileState, LostObject};
use crate::record::{
    CheckpointRecord, ModelRunRecord, RequestRecord, ResultKind, SamplerRecord, SessionRecord,
};

/// Maximum number of problems that SQLite reports.
const MAX_PROBLEMS: u32 = 20;

/// Rows of all tables of a database.
pub(super) struct StoredTables {
    tables: Vec<StoredTable>,
    /// Statements that create these tables and their indexes. A database of an earlier build has
    /// other tables than a new one.
    schema: String,
    problems: Vec<String>,
}

/// Result of copying rows to a new database.
pub(super) struct WrittenRows {
    /// Number of rows that were copied.
    pub(super) rows: usize,
    /// Rows that violate a constraint, for example because their key occurs twice.
    pub(super) rejected: Vec<LostObject>,
}

/// Rows of one table.
pub(super) struct StoredTable {
    pub(super) name: String,
    columns: Vec<String>,
    /// Rows that can be read and whose records are valid.
    pub(super) rows: Vec<Vec<Value>>,
    /// First columns of the rows whose records are not valid.
    invalid: Vec<String>,
}

impl StoredTables {
    /// Reads all rows that can be read. The error is a problem with the whole database.
    pub(super) fn read(path: &Path) -> Result<Self, Option<String>> {
        let failed = |error: rusqlite::Error| Some(error.to_string());
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags).map_err(failed)?;
        let header = DatabaseHeader::read(&connection).map_err(failed)?;
        header.schema_state().map_err(Some)?;
        let mut problems = integrity_problems(&connection);
        let names = "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name";
        let names: Vec<String> = connection
            .prepare(names)
            .and_then(|mut statement| statement.query_map([], |row| row.get(0))?.collect())
            .map_err(failed)?;
        let schema = "SELECT group_concat(sql, ';\n' ORDER BY rowid) FROM sqlite_schema \
                      WHERE type IN ('table', 'index') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'";
        let schema: Option<String> =
            connection.query_row(schema, [], |row| row.get(0)).map_err(failed)?;
        let names = names.into_iter().filter(|name| !name.starts_with("sqlite_"));
        let tables: Vec<StoredTable> =
            names.map(|name| StoredTable::read(&connection, name, &mut problems)).collect();
        for table in &tables {
            for key in &table.invalid {
                problems.push(format!("table {}: row {key} has no valid record", table.name));
            }
        }
        let schema = schema.unwrap_or_else(|| schema::SCHEMA.to_owned());
        Ok(Self { tables, schema, problems })
    }

    pub(super) fn report(&self) -> FileReport {
        let state = if self.problems.is_empty() { FileState::Intact } else { FileState::Damaged };
        let readable = self.tables.iter().map(|table| table.rows.len()).sum();
        FileReport { state, readable, problems: self.problems.clone() }
    }

    /// Returns the rows whose records are not valid.
    pub(super) fn unreadable(&self) -> Vec<LostObject> {
        let lost = |table: &StoredTable| -> Vec<LostObject> {
            let reason = "its record is damaged";
            table.invalid.iter().map(|key| table.lost_row(key, reason)).collect()
        };
        self.tables.iter().flat_map(lost).collect()
    }

    pub(super) fn get(&self, name: &str) -> Option<&StoredTable> {
        self.tables.iter().find(|table| table.name == name)
    }

    /// Writes the rows to a new database at `path`, and adds what a database of an earlier build
    /// lacks. `next_payload` is a number above the numbers of all payloads.
    pub(super) fn write_to(&self, path: &Path, next_payload: u64) -> io::Result<WrittenRows> {
        drop(super::super::payloads::private_file().open(path)?);
        self.try_write_to(path, next_payload)
            .map_err(|error| io::Error::other(format!("cannot write a new database: {error}")))
    }

    fn try_write_to(&self, path: &Path, next_payload: u64) -> rusqlite::Result<WrittenRows> {
        let mut connection = Connection::open(path)?;
        schema::create_with(&mut connection, &self.schema)?;
        let transaction = connection.transaction()?;
        let mut written = WrittenRows { rows: 0, rejected: Vec::new() };
        for table in &self.tables {
            table.insert(&transaction, &mut written)?;
        }
        let state = "INSERT INTO writer_state (next_payload, overwritten_commits) \
                     SELECT 1, 0 WHERE NOT EXISTS (SELECT * FROM writer_state)";
        transaction.execute(state, [])?;
        let next = "UPDATE writer_state SET next_payload = max(next_payload, ?)";
        transaction.execute(next, [next_payload.cast_signed()])?;
        transaction.commit()?;
        schema::add_missing(&mut connection)?;
        Ok(written)
    }
}

impl StoredTable {
    fn read(connection: &Connection, name: String, problems: &mut Vec<String>) -> Self {
        let mut table = Self { name, columns: Vec::new(), rows: Vec::new(), invalid: Vec::new() };
        match table.read_columns(connection) {
            Ok(columns) => table.columns = columns,
            Err(error) => {
                problems.push(format!("table {}: {error}", table.name));
                return table;
            }
        }
        let mut rows = Vec::new();
        // A damaged page ends the iteration. Read from both ends, to get the rows behind it.
        if let Err(error) = table.read_rows(connection, "ASC", &mut rows) {
            problems.push(format!("table {}: {error}", table.name));
            let mut behind = Vec::new();
            // The second read usually ends at the same page.
            let _ = table.read_rows(connection, "DESC", &mut behind);
            let seen: HashSet<String> = rows.iter().map(|row| format!("{row:?}")).collect();
            behind.retain(|row| !seen.contains(&format!("{row:?}")));
            rows.extend(behind.into_iter().rev());
        }
        for row in rows {
            if table.is_valid(&row) {
                table.rows.push(row);
            } else {
                table.invalid.push(key(&row));
            }
        }
        table
    }

    /// Returns the names of the columns that are stored, without generated columns.
    fn read_columns(&self, connection: &Connection) -> rusqlite::Result<Vec<String>> {
        let sql = "SELECT name FROM pragma_table_info(?)";
        connection.prepare(sql)?.query_map([&self.name], |row| row.get(0))?.collect()
    }

    fn read_rows(
        &self,
        connection: &Connection,
        order: &str,
        rows: &mut Vec<Vec<Value>>,
    ) -> rusqlite::Result<()> {
        let columns = self.columns.join(", ");
        // Tables without a rowid are ordered by their primary key.
        let by_rowid = format!("SELECT {columns} FROM {} ORDER BY rowid {order}", self.name);
        let key_columns = "SELECT name FROM pragma_table_info(?) WHERE pk > 0 ORDER BY pk";
        let mut statement = match connection.prepare(&by_rowid) {
            Ok(statement) => statement,
            Err(_) => {
                let keys: Vec<String> = connection
                    .prepare(key_columns)?
                    .query_map([&self.name], |row| row.get(0))?
                    .collect::<rusqlite::Result<_>>()?;
                let keys: Vec<String> = keys.iter().map(|key| format!("{key} {order}")).collect();
                let keys = keys.join(", ");
                connection
                    .prepare(&format!("SELECT {columns} FROM {} ORDER BY {keys}", self.name))?
            }
        };
        let mut found = statement.query([])?;
        while let Some(row) = found.next()? {
            let values = (0..self.columns.len()).map(|column| row.get(column));
            rows.push(values.collect::<rusqlite::Result<_>>()?);
        }
        Ok(())
    }

    /// Returns whether the record of a row can be used.
    fn is_valid(&self, row: &[Value]) -> bool {
        match &*self.name {
            "sessions" => self.record::<SessionRecord>(row).is_some(),
            "runs" => self.record::<ModelRunRecord>(row).is_some(),
            "samplers" => self.record::<SamplerRecord>(row).is_some(),
            "checkpoints" => self.record::<CheckpointRecord>(row).is_some(),
            "requests" => {
                let result = self.value(row, "result_kind");
                let is_result = |value: &Value| match value {
                    Value::Text(text) => serde_json::from_str::<ResultKind>(text).is_ok(),
                    value => *value == Value::Null,
                };
                self.record::<RequestRecord>(row).is_some() && result.is_some_and(is_result)
            }
            _ => true,
        }
    }

    /// Returns a column of a row.
    pub(super) fn value<'a>(&self, row: &'a [Value], column: &str) -> Option<&'a Value> {
        row.get(self.columns.iter().position(|name| name == column)?)
    }

    /// Returns an integer column of a row.
    pub(super) fn number(&self, row: &[Value], column: &str) -> Option<u64> {
        match self.value(row, column)? {
            Value::Integer(number) => Some(number.cast_unsigned()),
            _ => None,
        }
    }

    /// Returns the record of a row.
    pub(super) fn record<T: DeserializeOwned>(&self, row: &[Value]) -> Option<T> {
        match self.value(row, "record")? {
            Value::Text(text) => serde_json::from_str(text).ok(),
            _ => None,
        }
    }

    fn lost_row(&self, key: &str, reason: &str) -> LostObject {
        LostObject::new(&format!("row {key} of the table {}", self.name), reason)
    }

    /// Inserts the rows into the table with the same name, except rows that violate a constraint.
    fn insert(&self, connection: &Connection, written: &mut WrittenRows) -> rusqlite::Result<()> {
        if self.rows.is_empty() {
            return Ok(());
        }
        let columns = self.columns.join(", ");
        let parameters = vec!["?"; self.columns.len()].join(", ");
        let name = &self.name;
        let sql = format!("INSERT OR IGNORE INTO {name} ({columns}) VALUES ({parameters})");
        let mut insert = connection.prepare(&sql)?;
        for row in &self.rows {
            if insert.execute(params_from_iter(row))? == 1 {
                written.rows += 1;
            } else {
                let reason = "it violates a constraint of the database";
                written.rejected.push(self.lost_row(&key(row), reason));
            }
        }
        Ok(())
    }
}

/// Returns the problems that SQLite finds in the pages and indexes of a database.
fn integrity_problems(connection: &Connection) -> Vec<String> {
    let sql = format!("PRAGMA integrity_check({MAX_PROBLEMS})");
    let read = || -> rusqlite::Result<Vec<String>> {
        connection.prepare(&sql)?.query_map([], |row| row.get(0))?.collect()
    };
    match read() {
        Ok(problems) => problems.into_iter().filter(|problem| problem != "ok").collect(),
        Err(error) => vec![error.to_string()],
    }
}

/// Returns the first column of a row for a message.
fn key(row: &[Value]) -> String {
    match row.first() {
        Some(Value::Text(text)) => text.clone(),
        Some(Value::Integer(number)) => number.to_string(),
        _ => "without a key".to_owned(),
    }
}
