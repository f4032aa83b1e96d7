//! The SQLite database: records as rows, written in transactions by the writer thread.
//!
//! All rows are read once, at the start; requests then use the copy in memory. After the start, the
//! database is read only to find the payloads that are still needed.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::Path;
use std::time::Duration;

use rusqlite::{
    CachedStatement, Connection, Params, Row, Transaction, TransactionBehavior, params,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tinkex_wire::ModelId;

use crate::record::{
    ChangeRecord, CheckpointRecord, Record, RequestRecord, ResultKind, ResultRecord, RunRecord,
    SamplerRecord, SequenceScope, SessionRecord, UnixMicros, UsageKey,
};

const SCHEMA: &str = include_str!("schema.sql");
/// Version of the schema, stored as `user_version`.
const VERSION: i32 = 1;
/// "TNKX", stored as `application_id` to recognize databases of this server.
const APPLICATION: i32 = 0x544E_4B58;
/// Time to wait for a lock that another program holds, for example a database browser.
const BUSY: Duration = Duration::from_secs(1);

/// Selects the payloads that rows need. The body of a finished request is not needed, except for a
/// custom loss, which is restored from it after a restart.
const NEEDED: &str = "
    SELECT body FROM requests WHERE answer IS NULL OR kind = 'create_custom_loss'
    UNION SELECT answer FROM requests WHERE answer IS NOT NULL
    UNION SELECT body FROM changes";

/// Connection of the writer thread.
pub(super) struct Database {
    connection: Connection,
    new: bool,
    /// Whether a commit has failed that the WAL may contain nevertheless.
    pub(super) needs_repair: bool,
    /// Maximum number of pages, to simulate a full disk.
    #[cfg(test)]
    pub(super) max_pages: std::sync::Arc<std::sync::atomic::AtomicU32>,
}

/// All rows of the database.
#[derive(Debug, Default)]
pub(crate) struct StoredRows {
    pub(crate) sessions: Vec<SessionRecord>,
    /// Runs with the time of their last use.
    pub(crate) runs: Vec<(RunRecord, UnixMicros)>,
    pub(crate) changes: Vec<(ModelId, u64, ChangeRecord)>,
    pub(crate) samplers: Vec<SamplerRecord>,
    pub(crate) checkpoints: Vec<CheckpointRecord>,
    /// Requests in order of admission, with the results of the finished ones.
    pub(crate) requests: Vec<(RequestRecord, Option<StoredResult>)>,
    pub(crate) usage: BTreeMap<UsageKey, u64>,
}

/// Result of a request as it is stored.
#[derive(Clone, Debug)]
pub(crate) struct StoredResult {
    /// Number of the payload with the encoded result.
    pub(crate) number: u64,
    /// Size of that payload in bytes.
    pub(crate) size: usize,
    pub(crate) at: UnixMicros,
    pub(crate) result: ResultKind,
}

impl Database {
    /// Opens or creates the database at `path`. A new one needs
    /// [`create_tables`](Self::create_tables).
    ///
    /// # Errors
    /// Fails if the file cannot be read, is not a database of this server, or has another schema
    /// version.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let invalid = |message: String| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{}: {message}", path.display()))
        };
        // SQLite would interpret a relative name that starts with `file:` as a URI.
        let absolute = std::path::absolute(path)?;
        // Create the file with owner-only permissions; SQLite gives its WAL and shared-memory
        // files the permissions of the database.
        drop(super::payloads::private_file().open(path)?);
        let open = || -> rusqlite::Result<(Connection, bool, i32, i32)> {
            let connection = Connection::open(&absolute)?;
            connection.busy_timeout(BUSY)?;
            connection.set_prepared_statement_cache_capacity(32);
            let number = |name| connection.pragma_query_value(None, name, |row| row.get(0));
            let (application, version) = (number("application_id")?, number("user_version")?);
            let tables: i32 =
                connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
            Ok((connection, tables == 0, application, version))
        };
        let (connection, new, application, version) =
            open().map_err(|error| invalid(error.to_string()))?;
        match (new, application, version) {
            (true, ..) | (false, APPLICATION, VERSION) => {}
            (false, APPLICATION, other) => {
                return Err(invalid(format!(
                    "written by another version of this server (schema {other}, expected \
                     {VERSION}); use that version, or another data folder"
                )));
            }
            _ => return Err(invalid("not a database of this server".to_owned())),
        }
        // `pragma_update` accepts the row that some of these return.
        for (name, value) in [
            ("journal_mode", "wal"),
            ("synchronous", "full"),
            ("fullfsync", "on"),
            ("checkpoint_fullfsync", "on"),
            ("temp_store", "memory"),
            // Truncate the WAL to 16 MiB after a burst.
            ("journal_size_limit", "16777216"),
        ] {
            connection.pragma_update(None, name, value).map_err(to_io_error)?;
        }
        Ok(Self {
            connection,
            new,
            needs_repair: false,
            #[cfg(test)]
            max_pages: std::sync::Arc::new(u32::MAX.into()),
        })
    }

    /// Returns whether the database has no tables yet.
    pub(super) fn is_new(&self) -> bool {
        self.new
    }

    /// Creates the tables of a new database.
    pub(super) fn create_tables(&mut self) -> io::Result<()> {
        let create = |connection: &mut Connection| -> rusqlite::Result<()> {
            let transaction = connection.transaction()?;
            transaction.execute_batch(SCHEMA)?;
            transaction.pragma_update(None, "application_id", APPLICATION)?;
            transaction.pragma_update(None, "user_version", VERSION)?;
            transaction.commit()
        };
        create(&mut self.connection).map_err(to_io_error)?;
        self.new = false;
        Ok(())
    }

    /// Returns the first payload number that no row refers to.
    pub(super) fn next_payload_number(&self) -> io::Result<u64> {
        let next = self.connection.query_row("SELECT next FROM state", [], |row| read_u64(row, 0));
        next.map_err(to_io_error)
    }

    /// Returns the numbers of the payloads that rows need.
    pub(super) fn needed_payloads(&self) -> io::Result<HashSet<u64>> {
        let read = || -> rusqlite::Result<HashSet<u64>> {
            self.connection.prepare_cached(NEEDED)?.query_map([], |row| read_u64(row, 0))?.collect()
        };
        read().map_err(to_io_error)
    }

    /// Reads all rows.
    pub(super) fn read(&self) -> io::Result<StoredRows> {
        let rows = || -> rusqlite::Result<StoredRows> {
            Ok(StoredRows {
                sessions: self.query_all("SELECT fact FROM sessions", |row| read_json(row, 0))?,
                runs: self.query_all("SELECT fact, last_seq, used_at FROM runs", |row| {
                    let last_seq = row.get::<_, Option<i64>>(1)?.map(i64::cast_unsigned);
                    Ok((RunRecord { last_seq, ..read_json(row, 0)? }, row.get(2)?))
                })?,
                changes: self.query_all("SELECT run, seq, kind, body FROM changes", |row| {
                    let run: String = row.get(0)?;
                    let change =
                        ChangeRecord { kind: read_variant(row, 2)?, body: read_u64(row, 3)? };
                    Ok((run.into(), read_u64(row, 1)?, change))
                })?,
                samplers: self.query_all("SELECT fact FROM samplers", |row| read_json(row, 0))?,
                checkpoints: self
                    .query_all("SELECT fact FROM checkpoints", |row| read_json(row, 0))?,
                requests: self.query_all(
                    "SELECT fact, body, answer, answer_bytes, answered_at, outcome \
                     FROM requests ORDER BY body",
                    read_request,
                )?,
                usage: self
                    .query_all("SELECT hour, session, base_model, what, count FROM usage", |row| {
                        let session: String = row.get(1)?;
                        let (hour, base_model) = (row.get(0)?, row.get(2)?);
                        let meter = read_variant(row, 3)?;
                        Ok((
                            UsageKey { hour, session: session.into(), base_model, meter },
                            read_u64(row, 4)?,
                        ))
                    })?
                    .into_iter()
                    .collect(),
            })
        };
        rows().map_err(|error| match error {
            rusqlite::Error::FromSqlConversionFailure(..) => io::Error::new(
                io::ErrorKind::InvalidData,
                format!("cannot read a stored record: {error}"),
            ),
            error => to_io_error(error),
        })
    }

    fn query_all<T>(
        &self,
        sql: &str,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Vec<T>> {
        self.connection.prepare(sql)?.query_map([], read)?.collect()
    }

    /// Writes records in one transaction and sets `next`, the first payload number that no row
    /// refers to. After a failure, [`repair`](Self::repair) must run before the next write.
    pub(super) fn write<'a>(
        &mut self,
        records: impl Iterator<Item = &'a Record>,
        next: Option<u64>,
    ) -> io::Result<()> {
        #[cfg(test)]
        {
            let max_pages = self.max_pages.load(std::sync::atomic::Ordering::Relaxed);
            self.connection
                .pragma_update(None, "max_page_count", max_pages)
                .map_err(to_io_error)?;
        }
        let transaction = begin(&mut self.connection).map_err(to_io_error)?;
        put_all(&transaction, records, next).map_err(to_io_error)?;
        let committed = transaction.commit();
        self.needs_repair = committed.is_err();
        committed.map_err(to_io_error)
    }

    /// Overwrites a failed commit in the WAL with another commit. If only its flush failed, the WAL
    /// contains it completely, and SQLite would apply it after a crash although its client received
    /// an error.
    pub(super) fn repair(&mut self) -> io::Result<()> {
        if self.needs_repair {
            let sql = "UPDATE state SET voided = voided + 1";
            self.connection.execute(sql, []).map_err(to_io_error)?;
            self.needs_repair = false;
        }
        Ok(())
    }

    pub(super) fn needs_repair(&self) -> bool {
        self.needs_repair
    }
}

fn begin(connection: &mut Connection) -> rusqlite::Result<Transaction<'_>> {
    connection.transaction_with_behavior(TransactionBehavior::Immediate)
}

fn put_all<'a>(
    transaction: &Transaction<'_>,
    records: impl Iterator<Item = &'a Record>,
    next: Option<u64>,
) -> rusqlite::Result<()> {
    // Sum up first: many results of a group update the same counter.
    let mut usage: BTreeMap<&UsageKey, u64> = BTreeMap::new();
    for record in records {
        put(transaction, record)?;
        if let Record::Result(result) = record {
            for (key, count) in &result.usage {
                *usage.entry(key).or_default() += count;
            }
        }
    }
    for (UsageKey { hour, session, base_model, meter }, count) in usage {
        execute(
            transaction,
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?) \
             ON CONFLICT DO UPDATE SET count = count + excluded.count",
            params![hour, session.as_str(), base_model, variant_name(*meter), to_i64(count)],
        )?;
    }
    if let Some(next) = next {
        execute(transaction, "UPDATE state SET next = ?", [to_i64(next)])?;
    }
    Ok(())
}

fn put(transaction: &Transaction<'_>, record: &Record) -> rusqlite::Result<()> {
    let execute = |sql, params: &[&dyn rusqlite::ToSql]| execute(transaction, sql, params);
    match record {
        Record::Session(row) => {
            if row.end.is_some() {
                // Only the session itself can use its models and sampling sessions.
                let changes =
                    "DELETE FROM changes WHERE run IN (SELECT id FROM runs WHERE session = ?)";
                execute(changes, &[&row.id.as_str()])?;
                execute("DELETE FROM samplers WHERE session = ?", &[&row.id.as_str()])?;
            }
            let sql = "INSERT INTO sessions (id, fact) VALUES (?, ?) \
                       ON CONFLICT DO UPDATE SET fact = excluded.fact";
            execute(sql, &[&row.id.as_str(), &to_json(row)])
        }
        Record::SessionsRemoved { ids } => {
            // A sampling session may have been written after the session ended.
            for id in ids {
                execute("DELETE FROM samplers WHERE session = ?", &[&id.as_str()])?;
                execute("DELETE FROM sessions WHERE id = ?", &[&id.as_str()])?;
            }
            Ok(())
        }
        Record::Run(row) => {
            if let Some(snapshot) = &row.snapshot {
                let sql = "DELETE FROM changes WHERE run = ? AND seq <= ?";
                execute(sql, &[&row.id.as_str(), &to_i64(snapshot.seq)])?;
            }
            let sql = "INSERT INTO runs (id, used_at, fact) VALUES (?, ?, ?) \
                       ON CONFLICT DO UPDATE SET fact = excluded.fact";
            execute(sql, &[&row.id.as_str(), &row.created_at, &to_json(row)])
        }
        Record::Sampler(row) => {
            let sql = "INSERT INTO samplers (id, fact) VALUES (?, ?) \
                       ON CONFLICT DO UPDATE SET fact = excluded.fact";
            execute(sql, &[&row.id.as_str(), &to_json(row)])
        }
        Record::Checkpoint(row) => {
            execute(TOUCH_RUN, &[&row.path.run().as_str(), &row.created_at])?;
            let sql = "INSERT INTO checkpoints (path, fact) VALUES (?, ?) \
                       ON CONFLICT DO UPDATE SET fact = excluded.fact";
            execute(sql, &[&row.path.to_string(), &to_json(row)])
        }
        Record::CheckpointDeleted { path } => {
            execute("DELETE FROM checkpoints WHERE path = ?", &[&path.to_string()])
        }
        Record::Request(row) => {
            if let SequenceScope::Model(model) = &row.scope {
                execute(TOUCH_RUN, &[&model.as_str(), &row.at])?;
            }
            let sql = "INSERT INTO requests (id, body, fact) VALUES (?, ?, ?)";
            execute(sql, &[&row.id.as_str(), &to_i64(row.number), &to_json(&**row)])
        }
        Record::Result(result) => put_result(transaction, result),
        Record::RequestsRemoved { ids } => {
            let mut delete = transaction.prepare_cached("DELETE FROM requests WHERE id = ?")?;
            ids.iter().try_for_each(|id| delete.execute([id.as_str()]).map(drop))
        }
    }
}

/// Updates the time of the last use of a run.
const TOUCH_RUN: &str = "UPDATE runs SET used_at = max(used_at, ?2) WHERE id = ?1";

fn put_result(transaction: &Transaction<'_>, result: &ResultRecord) -> rusqlite::Result<()> {
    let row = &*result.request;
    execute(
        transaction,
        "UPDATE requests SET answer = ?, answer_bytes = ?, answered_at = ?, outcome = ? \
         WHERE id = ?",
        params![
            to_i64(result.number),
            to_i64(result.size as u64),
            result.at,
            to_json(&result.result),
            row.id.as_str()
        ],
    )?;
    let SequenceScope::Model(model) = &row.scope else { return Ok(()) };
    let seq = to_i64(row.seq);
    let last = "UPDATE runs SET last_seq = max(ifnull(last_seq, ?2), ?2) WHERE id = ?1";
    execute(transaction, last, params![model.as_str(), seq])?;
    if result.model_changed {
        // A model whose session has ended is never restored.
        let sql = "INSERT OR REPLACE INTO changes (run, seq, kind, body) SELECT ?, ?, ?, ? \
                   WHERE NOT EXISTS (SELECT 1 FROM sessions WHERE id = ? AND ended)";
        let (kind, body) = (variant_name(row.kind), to_i64(row.number));
        execute(transaction, sql, params![model.as_str(), seq, kind, body, row.session.as_str()])?;
    }
    Ok(())
}

/// Executes a statement, which is prepared once per connection.
fn execute(transaction: &Transaction<'_>, sql: &str, params: impl Params) -> rusqlite::Result<()> {
    let mut statement: CachedStatement<'_> = transaction.prepare_cached(sql)?;
    statement.execute(params).map(drop)
}

/// Reads a request and its result.
fn read_request(row: &Row<'_>) -> rusqlite::Result<(RequestRecord, Option<StoredResult>)> {
    let request = RequestRecord { number: read_u64(row, 1)?, ..read_json(row, 0)? };
    let result = match row.get::<_, Option<i64>>(2)? {
        None => None,
        Some(number) => Some(StoredResult {
            number: number.cast_unsigned(),
            size: usize::try_from(read_u64(row, 3)?).unwrap_or(usize::MAX),
            at: row.get(4)?,
            result: read_json(row, 5)?,
        }),
    };
    Ok((request, result))
}

/// Serializes a value to its stored form.
fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("records have string keys and finite numbers")
}

/// Returns the stored name of an enum variant without fields.
fn variant_name(value: impl Serialize) -> String {
    to_json(&value).trim_matches('"').to_owned()
}

/// Reads an enum variant without fields from its stored name.
fn read_variant<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    let name: String = row.get(column)?;
    serde_json::from_value(name.into()).map_err(|error| unreadable(column, error))
}

/// Reads a value that [`to_json`] has serialized.
fn read_json<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    let text = row.get_ref(column)?.as_str()?;
    serde_json::from_str(text).map_err(|error| unreadable(column, error))
}

fn unreadable(column: usize, error: serde_json::Error) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, error.into())
}

/// Reads an integer that [`to_i64`] has converted.
fn read_u64(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(column).map(i64::cast_unsigned)
}

/// Converts to a signed integer of SQLite with the same bits; [`read_u64`] converts back.
fn to_i64(number: u64) -> i64 {
    number.cast_signed()
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
