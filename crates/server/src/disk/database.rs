//! The database: facts as rows, written in transactions by one thread.
//!
//! It is read when it is opened, and asked which payloads are needed. Nobody waits for it otherwise:
//! what the server knows is in memory.

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

use crate::fact::{
    Answer, Change, Checkpoint, Done, Fact, Line, Micros, Request, Run, Sampler, Session, Use,
};

const SCHEMA: &str = include_str!("schema.sql");
/// Which schema that is.
const VERSION: i32 = 1;
/// "TNKX": tells our databases from others.
const APPLICATION: i32 = 0x544E_4B58;
/// How long somebody else's transaction is waited for: people may look in with other tools.
const BUSY: Duration = Duration::from_secs(1);

/// Payloads that rows need. A request that was answered is not carried out again, but a loss is
/// learned again from its body.
const NEEDED: &str = "
    SELECT body FROM requests WHERE answer IS NULL OR kind = 'create_custom_loss'
    UNION SELECT answer FROM requests WHERE answer IS NOT NULL
    UNION SELECT body FROM changes";

/// The connection of the one who writes.
pub(super) struct Database {
    connection: Connection,
    new: bool,
    /// Whether a refused commit may stand in the WAL.
    pub(super) doubtful: bool,
    /// Pages that there is room for.
    #[cfg(test)]
    pub(super) room: std::sync::Arc<std::sync::atomic::AtomicU32>,
}

/// What the rows say.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) sessions: Vec<Session>,
    /// Each with the moment when it was last used.
    pub(crate) runs: Vec<(Run, Micros)>,
    pub(crate) changes: Vec<(ModelId, u64, Change)>,
    pub(crate) samplers: Vec<Sampler>,
    pub(crate) checkpoints: Vec<Checkpoint>,
    /// In the order in which they came.
    pub(crate) requests: Vec<(Request, Option<Answered>)>,
    pub(crate) usage: BTreeMap<Use, u64>,
}

/// That a request was answered.
#[derive(Clone, Debug)]
pub(crate) struct Answered {
    /// The number of the answer, and its bytes.
    pub(crate) number: u64,
    pub(crate) size: usize,
    pub(crate) at: Micros,
    pub(crate) answer: Answer,
}

impl Database {
    /// Opens the database at `path`. A new one has to be [begun](Self::begin).
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let wrong = |why: String| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()))
        };
        // SQLite takes a name that begins with `file:` for something else.
        let absolute = std::path::absolute(path)?;
        // SQLite would let everyone read it; the files that it makes beside it are like it.
        drop(super::payloads::own_file().open(path)?);
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
            open().map_err(|why| wrong(why.to_string()))?;
        match (new, application, version) {
            (true, ..) | (false, APPLICATION, VERSION) => {}
            (false, APPLICATION, newer) => {
                return Err(wrong(format!(
                    "was written by another version of this server (schema {newer}, this one knows \
                     {VERSION}); use that version, or another data folder"
                )));
            }
            _ => return Err(wrong("is not a database of this server".to_owned())),
        }
        // Some of these answer with what is in force.
        for (name, value) in [
            ("journal_mode", "wal"),
            ("synchronous", "full"),
            ("fullfsync", "on"),
            ("checkpoint_fullfsync", "on"),
            ("temp_store", "memory"),
            // What a burst made longer is cut off again.
            ("journal_size_limit", "16777216"),
        ] {
            connection.pragma_update(None, name, value).map_err(disk)?;
        }
        Ok(Self {
            connection,
            new,
            doubtful: false,
            #[cfg(test)]
            room: std::sync::Arc::new(u32::MAX.into()),
        })
    }

    /// Whether there is nothing in it, not even tables.
    pub(super) fn is_new(&self) -> bool {
        self.new
    }

    /// Makes the tables of a new one.
    pub(super) fn begin(&mut self) -> io::Result<()> {
        let make = |connection: &mut Connection| -> rusqlite::Result<()> {
            let transaction = connection.transaction()?;
            transaction.execute_batch(SCHEMA)?;
            transaction.pragma_update(None, "application_id", APPLICATION)?;
            transaction.pragma_update(None, "user_version", VERSION)?;
            transaction.commit()
        };
        make(&mut self.connection).map_err(disk)?;
        self.new = false;
        Ok(())
    }

    /// The number of the next payload.
    pub(super) fn next_number(&self) -> io::Result<u64> {
        let next = self.connection.query_row("SELECT next FROM state", [], |row| number(row, 0));
        next.map_err(disk)
    }

    /// The payloads that must be there.
    pub(super) fn needed(&self) -> io::Result<HashSet<u64>> {
        let read = || -> rusqlite::Result<HashSet<u64>> {
            self.connection.prepare_cached(NEEDED)?.query_map([], |row| number(row, 0))?.collect()
        };
        read().map_err(disk)
    }

    /// Reads all rows.
    pub(super) fn read(&self) -> io::Result<Found> {
        let found = || -> rusqlite::Result<Found> {
            Ok(Found {
                sessions: self.all("SELECT fact FROM sessions", |row| json(row, 0))?,
                runs: self.all("SELECT fact, last_seq, used_at FROM runs", |row| {
                    let last_seq = row.get::<_, Option<i64>>(1)?.map(i64::cast_unsigned);
                    Ok((Run { last_seq, ..json(row, 0)? }, row.get(2)?))
                })?,
                changes: self.all("SELECT run, seq, kind, body FROM changes", |row| {
                    let run: String = row.get(0)?;
                    let change = Change { kind: word(row, 2)?, body: number(row, 3)? };
                    Ok((run.into(), number(row, 1)?, change))
                })?,
                samplers: self.all("SELECT fact FROM samplers", |row| json(row, 0))?,
                checkpoints: self.all("SELECT fact FROM checkpoints", |row| json(row, 0))?,
                requests: self.all(
                    "SELECT fact, body, answer, answer_bytes, answered_at, outcome \
                     FROM requests ORDER BY body",
                    request,
                )?,
                usage: self
                    .all("SELECT hour, session, base_model, what, count FROM usage", |row| {
                        let session: String = row.get(1)?;
                        let (hour, base_model) = (row.get(0)?, row.get(2)?);
                        let what = word(row, 3)?;
                        Ok((
                            Use { hour, session: session.into(), base_model, what },
                            number(row, 4)?,
                        ))
                    })?
                    .into_iter()
                    .collect(),
            })
        };
        found().map_err(|why| match why {
            rusqlite::Error::FromSqlConversionFailure(..) => {
                io::Error::new(io::ErrorKind::InvalidData, format!("a fact cannot be read: {why}"))
            }
            why => disk(why),
        })
    }

    fn all<T>(
        &self,
        sql: &str,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Vec<T>> {
        self.connection.prepare(sql)?.query_map([], read)?.collect()
    }

    /// Makes facts rows, all or none; after a failure it has to be [mended](Self::mend). From number `next` on payloads belong to nothing.
    pub(super) fn write<'a>(
        &mut self,
        facts: impl Iterator<Item = &'a Fact>,
        next: Option<u64>,
    ) -> io::Result<()> {
        #[cfg(test)]
        {
            let room = self.room.load(std::sync::atomic::Ordering::Relaxed);
            self.connection.pragma_update(None, "max_page_count", room).map_err(disk)?;
        }
        let transaction = begin(&mut self.connection).map_err(disk)?;
        put_all(&transaction, facts, next).map_err(disk)?;
        let committed = transaction.commit();
        self.doubtful = committed.is_err();
        committed.map_err(disk)
    }

    /// Takes the place of a commit that failed. It may stand whole in the WAL if only its flush
    /// failed, and a crash would bring it back though its caller was refused.
    pub(super) fn mend(&mut self) -> io::Result<()> {
        if self.doubtful {
            let sql = "UPDATE state SET voided = voided + 1";
            self.connection.execute(sql, []).map_err(disk)?;
            self.doubtful = false;
        }
        Ok(())
    }

    pub(super) fn is_doubtful(&self) -> bool {
        self.doubtful
    }
}

fn begin(connection: &mut Connection) -> rusqlite::Result<Transaction<'_>> {
    connection.transaction_with_behavior(TransactionBehavior::Immediate)
}

fn put_all<'a>(
    transaction: &Transaction<'_>,
    facts: impl Iterator<Item = &'a Fact>,
    next: Option<u64>,
) -> rusqlite::Result<()> {
    // Many requests of a batch use the same.
    let mut used: BTreeMap<&Use, u64> = BTreeMap::new();
    for fact in facts {
        put(transaction, fact)?;
        if let Fact::Done(done) = fact {
            for (key, count) in &done.used {
                *used.entry(key).or_default() += count;
            }
        }
    }
    for (Use { hour, session, base_model, what }, count) in used {
        run(
            transaction,
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?) \
             ON CONFLICT DO UPDATE SET count = count + excluded.count",
            params![hour, session.as_str(), base_model, word_of(*what), signed(count)],
        )?;
    }
    if let Some(next) = next {
        run(transaction, "UPDATE state SET next = ?", [signed(next)])?;
    }
    Ok(())
}

fn put(transaction: &Transaction<'_>, fact: &Fact) -> rusqlite::Result<()> {
    let run = |sql, params: &[&dyn rusqlite::ToSql]| run(transaction, sql, params);
    match fact {
        Fact::Session(row) => {
            if row.end.is_some() {
                // What only this session could use.
                let own =
                    "DELETE FROM changes WHERE run IN (SELECT id FROM runs WHERE session = ?)";
                run(own, &[&row.id.as_str()])?;
                run("DELETE FROM samplers WHERE session = ?", &[&row.id.as_str()])?;
            }
            let sql = "INSERT INTO sessions (id, fact) VALUES (?, ?) \
                       ON CONFLICT DO UPDATE SET fact = excluded.fact";
            run(sql, &[&row.id.as_str(), &text(row)])
        }
        Fact::Left { ids } => {
            // A sampling session may have been written after the end.
            for id in ids {
                run("DELETE FROM samplers WHERE session = ?", &[&id.as_str()])?;
                run("DELETE FROM sessions WHERE id = ?", &[&id.as_str()])?;
            }
            Ok(())
        }
        Fact::Run(row) => {
            if let Some(snapshot) = &row.snapshot {
                let before = "DELETE FROM changes WHERE run = ? AND seq <= ?";
                run(before, &[&row.id.as_str(), &signed(snapshot.seq)])?;
            }
            let sql = "INSERT INTO runs (id, used_at, fact) VALUES (?, ?, ?) \
                       ON CONFLICT DO UPDATE SET fact = excluded.fact";
            run(sql, &[&row.id.as_str(), &row.created_at, &text(row)])
        }
        Fact::Sampler(row) => {
            let sql = "INSERT INTO samplers (id, fact) VALUES (?, ?) \
                       ON CONFLICT DO UPDATE SET fact = excluded.fact";
            run(sql, &[&row.id.as_str(), &text(row)])
        }
        Fact::Checkpoint(row) => {
            run(RUN_USED, &[&row.path.run().as_str(), &row.created_at])?;
            let sql = "INSERT INTO checkpoints (path, fact) VALUES (?, ?) \
                       ON CONFLICT DO UPDATE SET fact = excluded.fact";
            run(sql, &[&row.path.to_string(), &text(row)])
        }
        Fact::Gone { path } => run("DELETE FROM checkpoints WHERE path = ?", &[&path.to_string()]),
        Fact::Request(row) => {
            if let Line::Model(model) = &row.line {
                run(RUN_USED, &[&model.as_str(), &row.at])?;
            }
            let sql = "INSERT INTO requests (id, body, fact) VALUES (?, ?, ?)";
            run(sql, &[&row.id.as_str(), &signed(row.number), &text(&**row)])
        }
        Fact::Done(done) => put_done(transaction, done),
        Fact::Forget { ids } => {
            let mut delete = transaction.prepare_cached("DELETE FROM requests WHERE id = ?")?;
            ids.iter().try_for_each(|id| delete.execute([id.as_str()]).map(drop))
        }
    }
}

const RUN_USED: &str = "UPDATE runs SET used_at = max(used_at, ?2) WHERE id = ?1";

fn put_done(transaction: &Transaction<'_>, done: &Done) -> rusqlite::Result<()> {
    let row = &*done.request;
    run(
        transaction,
        "UPDATE requests SET answer = ?, answer_bytes = ?, answered_at = ?, outcome = ? WHERE id = ?",
        params![
            signed(done.number),
            signed(done.size as u64),
            done.at,
            text(&done.answer),
            row.id.as_str()
        ],
    )?;
    let Line::Model(model) = &row.line else { return Ok(()) };
    let seq = signed(row.seq);
    let last = "UPDATE runs SET last_seq = max(ifnull(last_seq, ?2), ?2) WHERE id = ?1";
    run(transaction, last, params![model.as_str(), seq])?;
    if done.changed {
        // Nothing brings a model back whose session is over.
        let sql = "INSERT OR REPLACE INTO changes (run, seq, kind, body) SELECT ?, ?, ?, ? \
                   WHERE NOT EXISTS (SELECT 1 FROM sessions WHERE id = ? AND ended)";
        let (kind, body) = (word_of(row.kind), signed(row.number));
        run(transaction, sql, params![model.as_str(), seq, kind, body, row.session.as_str()])?;
    }
    Ok(())
}

fn run(transaction: &Transaction<'_>, sql: &str, params: impl Params) -> rusqlite::Result<()> {
    let mut statement: CachedStatement<'_> = transaction.prepare_cached(sql)?;
    statement.execute(params).map(drop)
}

fn request(row: &Row<'_>) -> rusqlite::Result<(Request, Option<Answered>)> {
    let request = Request { number: number(row, 1)?, ..json(row, 0)? };
    let answered = match row.get::<_, Option<i64>>(2)? {
        None => None,
        Some(answer) => Some(Answered {
            number: answer.cast_unsigned(),
            size: usize::try_from(number(row, 3)?).unwrap_or(usize::MAX),
            at: row.get(4)?,
            answer: json(row, 5)?,
        }),
    };
    Ok((request, answered))
}

/// A fact as it is written.
fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("our own texts and numbers are always JSON")
}

/// The word for a kind of something, as facts have it.
fn word_of(value: impl Serialize) -> String {
    text(&value).trim_matches('"').to_owned()
}

fn word<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    let word: String = row.get(column)?;
    serde_json::from_value(word.into()).map_err(|why| unreadable(column, why))
}

fn json<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    let text = row.get_ref(column)?.as_str()?;
    serde_json::from_str(text).map_err(|why| unreadable(column, why))
}

fn unreadable(column: usize, why: serde_json::Error) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, why.into())
}

fn number(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(column).map(i64::cast_unsigned)
}

/// SQLite has signed numbers only; ours are counted up from 1, or are numbers of a model's requests.
fn signed(number: u64) -> i64 {
    number.cast_signed()
}

/// What SQLite said, as what a disk says.
#[expect(clippy::needless_pass_by_value, reason = "as `map_err` gives it")]
fn disk(why: rusqlite::Error) -> io::Error {
    let kind = match why.sqlite_error_code() {
        Some(rusqlite::ErrorCode::DiskFull) => io::ErrorKind::StorageFull,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, format!("the database: {why}"))
}
