//! Reads all rows of the database at the start of the server.

use std::collections::BTreeMap;

use rusqlite::{Connection, Row};
use tinkex_wire::{ModelId, SessionId, TinkerPath};

use super::column::{read_json, read_optional_u64, read_u64, read_variant};
use crate::record::{
    AuditRecord, ChangeRecord, CheckpointRecord, ClockRecord, ModelRunRecord, RequestRecord,
    ResultKind, SamplerRecord, SessionRecord, UnixMicros, UsageKey,
};
use crate::user::{KeyRecord, UserId, UserRecord};
use crate::weights::WeightsLocation;

/// All rows of the database.
#[derive(Debug, Default)]
pub struct StoredRows {
    pub sessions: Vec<SessionRecord>,
    pub runs: Vec<StoredRun>,
    pub changes: Vec<StoredChange>,
    pub samplers: Vec<SamplerRecord>,
    pub checkpoints: Vec<CheckpointRecord>,
    /// Paths of checkpoints that were deleted recently, with the times of their deletions.
    pub deleted_checkpoints: Vec<(TinkerPath, UnixMicros)>,
    /// Requests in order of admission.
    pub requests: Vec<StoredRequest>,
    pub usage: BTreeMap<UsageKey, u64>,
    pub keys: Vec<KeyRecord>,
    pub users: Vec<UserRecord>,
    /// Entries of the audit log, oldest first.
    pub audit: Vec<AuditRecord>,
    /// Last time that the server stored.
    pub clock: Option<ClockRecord>,
}

/// Stored row of a run.
#[derive(Debug)]
pub struct StoredRun {
    pub row: ModelRunRecord,
    /// Time of the last request or checkpoint.
    pub last_used: UnixMicros,
}

/// A request, executed under sequence number `seq`, that modified a run after its snapshot.
#[derive(Debug)]
pub struct StoredChange {
    pub run: ModelId,
    pub seq: u64,
    pub change: ChangeRecord,
}

/// Stored row of a request, with its result if the request is finished.
#[derive(Debug)]
pub struct StoredRequest {
    pub row: RequestRecord,
    /// How often a server process has restored the request and started to execute it.
    pub starts: u32,
    pub result: Option<StoredResult>,
}

/// Stored columns of the result of a request.
#[derive(Clone, Debug)]
pub struct StoredResult {
    /// Number of the payload with the encoded result.
    pub number: u64,
    /// Size of that payload in bytes.
    pub size: usize,
    pub at: UnixMicros,
    pub result: ResultKind,
}

impl StoredRows {
    pub(super) fn read(connection: &Connection) -> rusqlite::Result<Self> {
        let usage = "SELECT hour, owner, session, base_model, meter, count FROM usage";
        Ok(Self {
            sessions: query_all(connection, "SELECT record FROM sessions", read_record)?,
            runs: query_all(connection, "SELECT record, last_seq, last_used FROM runs", read_run)?,
            changes: query_all(
                connection,
                "SELECT run, seq, kind, body_payload FROM changes",
                read_change,
            )?,
            samplers: query_all(connection, "SELECT record FROM samplers", read_record)?,
            checkpoints: query_all(connection, "SELECT record FROM checkpoints", read_record)?,
            deleted_checkpoints: query_all(
                connection,
                "SELECT path, deleted_at FROM deleted_checkpoints",
                read_deleted_checkpoint,
            )?
            .into_iter()
            .flatten()
            .collect(),
            requests: query_all(
                connection,
                "SELECT record, body_payload, starts, \
                        result_payload, result_bytes, finished_at, result_kind \
                 FROM requests ORDER BY body_payload",
                read_request,
            )?,
            usage: query_all(connection, usage, read_usage)?.into_iter().collect(),
            keys: query_all(connection, "SELECT record FROM keys", read_record)?,
            users: query_all(connection, "SELECT record FROM users", read_record)?,
            audit: query_all(
                connection,
                "SELECT number, record FROM audit_log ORDER BY number",
                |row| Ok(AuditRecord { number: read_u64(row, "number")?, ..read_record(row)? }),
            )?,
            clock: query_all(
                connection,
                "SELECT clock FROM writer_state WHERE clock IS NOT NULL",
                |row| read_json(row, "clock"),
            )?
            .pop(),
        })
    }

    /// Returns the names of the folders of weights that the rows refer to.
    pub(super) fn weights(&self) -> impl Iterator<Item = &str> {
        let checkpoints = self.checkpoints.iter().map(|row| &row.weights);
        let samplers = self.samplers.iter().filter_map(|row| row.needed_weights());
        let snapshots =
            self.runs.iter().filter_map(|run| Some(&run.row.snapshot.as_ref()?.weights));
        let unfinished = self.requests.iter().filter(|request| request.result.is_none());
        let loads = unfinished.filter_map(|request| request.row.source.as_ref());
        let all = checkpoints.chain(samplers).chain(snapshots).chain(loads);
        all.filter_map(WeightsLocation::local)
    }

    /// Returns the newest time at which anything happened.
    pub fn newest_time(&self) -> Option<UnixMicros> {
        let sessions = self.sessions.iter().flat_map(|row| [Some(row.created_at), row.ended_at]);
        let requests = self.requests.iter().flat_map(|request| {
            [Some(request.row.at), request.result.as_ref().map(|result| result.at)]
        });
        let runs = self.runs.iter().map(|run| run.last_used);
        let checkpoints = self.checkpoints.iter().map(|row| row.created_at);
        let deletions = self.deleted_checkpoints.iter().map(|(_, at)| *at);
        let others = runs.chain(checkpoints).chain(deletions);
        sessions.chain(requests).flatten().chain(others).max()
    }
}

fn query_all<T>(
    connection: &Connection,
    sql: &str,
    read_row: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
) -> rusqlite::Result<Vec<T>> {
    connection.prepare(sql)?.query_map([], read_row)?.collect()
}

/// Reads a record that is stored completely in the column `record`.
fn read_record<T: serde::de::DeserializeOwned>(row: &Row<'_>) -> rusqlite::Result<T> {
    read_json(row, "record")
}

fn read_run(row: &Row<'_>) -> rusqlite::Result<StoredRun> {
    let last_seq = read_optional_u64(row, "last_seq")?;
    Ok(StoredRun {
        row: ModelRunRecord { last_seq, ..read_record(row)? },
        last_used: row.get("last_used")?,
    })
}

fn read_change(row: &Row<'_>) -> rusqlite::Result<StoredChange> {
    let run: String = row.get("run")?;
    let change =
        ChangeRecord { kind: read_variant(row, "kind")?, body: read_u64(row, "body_payload")? };
    Ok(StoredChange { run: ModelId::from(run), seq: read_u64(row, "seq")?, change })
}

/// Returns `None` for a path that cannot be parsed: the row only serves repeated deletions.
fn read_deleted_checkpoint(row: &Row<'_>) -> rusqlite::Result<Option<(TinkerPath, UnixMicros)>> {
    let path: String = row.get("path")?;
    let deleted_at = row.get("deleted_at")?;
    Ok(path.parse().ok().map(|path| (path, deleted_at)))
}

fn read_request(row: &Row<'_>) -> rusqlite::Result<StoredRequest> {
    let request = RequestRecord { number: read_u64(row, "body_payload")?, ..read_record(row)? };
    let result = match read_optional_u64(row, "result_payload")? {
        None => None,
        Some(number) => Some(StoredResult {
            number,
            size: usize::try_from(read_u64(row, "result_bytes")?).unwrap_or(usize::MAX),
            at: row.get("finished_at")?,
            result: read_json(row, "result_kind")?,
        }),
    };
    Ok(StoredRequest { row: request, starts: row.get("starts")?, result })
}

fn read_usage(row: &Row<'_>) -> rusqlite::Result<(UsageKey, u64)> {
    let session: String = row.get("session")?;
    let key = UsageKey {
        hour: row.get("hour")?,
        owner: UserId::from(row.get::<_, String>("owner")?),
        session: SessionId::from(session),
        base_model: row.get("base_model")?,
        meter: read_variant(row, "meter")?,
    };
    Ok((key, read_u64(row, "count")?))
}
