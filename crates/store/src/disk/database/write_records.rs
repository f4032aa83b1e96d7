//! Translates records to SQL statements within a transaction.

use std::collections::BTreeMap;

use rusqlite::{CachedStatement, Params, Transaction, params};
use tinkex_wire::TinkerPath;

use super::column::{to_i64, to_json, variant_name};
use super::write_history::write_history;
use crate::history::folder_prefix;
use crate::record::{
    AUDIT_ENTRIES, AuditRecord, CheckpointRecord, DELETION_RETENTION, MERGED_SESSION,
    MetadataRecord, ModelRunRecord, Record, RequestRecord, ResultRecord, SamplerRecord,
    SequenceScope, SessionRecord, UnixMicros, UsageKey,
};

/// Writes records, and the usage that they contain.
pub(super) fn write_records<'a>(
    transaction: &Transaction<'_>,
    records: impl Iterator<Item = &'a Record>,
) -> rusqlite::Result<()> {
    // Sum the usage first: many results of a group update the same counter.
    let mut usage: BTreeMap<&UsageKey, u64> = BTreeMap::new();
    for record in records {
        write_record(transaction, record)?;
        let amounts = match record {
            Record::Result(result) => &result.usage[..],
            Record::Usage(amounts) => amounts,
            _ => &[],
        };
        for (key, count) in amounts {
            *usage.entry(key).or_default() += count;
        }
    }
    for (key, count) in usage {
        add_usage(transaction, key, count)?;
    }
    Ok(())
}

fn write_record(transaction: &Transaction<'_>, record: &Record) -> rusqlite::Result<()> {
    match record {
        Record::Session(row) => write_session(transaction, row),
        Record::Metadata(row) => write_metadata(transaction, row),
        Record::MetadataCopied { from, to } => {
            let sql = "INSERT OR REPLACE INTO user_metadata (object, metadata) \
                       SELECT ?2, metadata FROM user_metadata WHERE object = ?1";
            execute(transaction, sql, [from.to_string(), to.to_string()])
        }
        Record::SessionsRemoved { ids } => {
            for id in ids {
                // A sampling session may have been written after the session ended.
                delete_samplers(transaction, id.as_str())?;
                delete_metadata(transaction, id.as_str())?;
                execute(transaction, "DELETE FROM sessions WHERE id = ?", [id.as_str()])?;
            }
            Ok(())
        }
        Record::Run(row) => write_run(transaction, row),
        Record::RunDeleted { id } => delete_run(transaction, id.as_str()),
        Record::Sampler(row) => write_sampler(transaction, row),
        Record::Checkpoint(row) => write_checkpoint(transaction, row),
        Record::CheckpointDeleted { path, at } => delete_checkpoint(transaction, path, *at),
        Record::Request(row) => write_request(transaction, row),
        Record::RequestsStarted { ids } => {
            let sql = "UPDATE requests SET starts = starts + 1 WHERE id = ?";
            let mut update = transaction.prepare_cached(sql)?;
            ids.iter().try_for_each(|id| update.execute([id.as_str()]).map(drop))
        }
        Record::Result(result) => write_result(transaction, result),
        // `write_records` adds the usage to the counters.
        Record::Usage(_) => Ok(()),
        Record::UsageMerged { before } => merge_usage(transaction, *before),
        Record::RequestsRemoved { ids } => {
            let mut delete = transaction.prepare_cached("DELETE FROM requests WHERE id = ?")?;
            ids.iter().try_for_each(|id| delete.execute([id.as_str()]).map(drop))
        }
        Record::History(history) => write_history(transaction, history),
        Record::Clock(clock) => {
            execute(transaction, "UPDATE writer_state SET clock = ?", [to_json(clock)])
        }
        Record::Key(key) => {
            let sql = "INSERT OR REPLACE INTO keys (id, record) VALUES (?, ?)";
            execute(transaction, sql, params![&*key.id, to_json(key)])
        }
        Record::KeyRemoved { id } => execute(transaction, "DELETE FROM keys WHERE id = ?", [&**id]),
        Record::User(user) => {
            let sql = "INSERT OR REPLACE INTO users (id, record) VALUES (?, ?)";
            execute(transaction, sql, params![user.id.as_str(), to_json(user)])
        }
        Record::Audit(entry) => write_audit(transaction, entry),
    }
}

fn write_session(transaction: &Transaction<'_>, row: &SessionRecord) -> rusqlite::Result<()> {
    let id = row.id.as_str();
    if row.end.is_some() {
        // Only the session itself can use its models and sampling sessions.
        let delete_changes =
            "DELETE FROM changes WHERE run IN (SELECT id FROM runs WHERE session = ?)";
        execute(transaction, delete_changes, [id])?;
        delete_samplers(transaction, id)?;
    }
    let sql = "INSERT INTO sessions (id, record) VALUES (?, ?) \
               ON CONFLICT DO UPDATE SET record = excluded.record";
    execute(transaction, sql, params![id, to_json(row)])
}

/// Adds an entry to the audit log, and removes the entries beyond [`AUDIT_ENTRIES`].
fn write_audit(transaction: &Transaction<'_>, entry: &AuditRecord) -> rusqlite::Result<()> {
    let sql = "INSERT OR REPLACE INTO audit_log (number, record) VALUES (?, ?)";
    execute(transaction, sql, params![to_i64(entry.number), to_json(entry)])?;
    let oldest = entry.number.saturating_sub(AUDIT_ENTRIES as u64);
    execute(transaction, "DELETE FROM audit_log WHERE number <= ?", [to_i64(oldest)])
}

fn write_metadata(transaction: &Transaction<'_>, row: &MetadataRecord) -> rusqlite::Result<()> {
    let Some(json) = &row.json else { return delete_metadata(transaction, &row.object) };
    let sql = "INSERT OR REPLACE INTO user_metadata (object, metadata) VALUES (?, ?)";
    execute(transaction, sql, params![row.object, &**json])
}

fn delete_metadata(transaction: &Transaction<'_>, object: &str) -> rusqlite::Result<()> {
    execute(transaction, "DELETE FROM user_metadata WHERE object = ?", [object])
}

fn delete_samplers(transaction: &Transaction<'_>, session: &str) -> rusqlite::Result<()> {
    execute(transaction, "DELETE FROM samplers WHERE session = ?", [session])
}

fn write_run(transaction: &Transaction<'_>, row: &ModelRunRecord) -> rusqlite::Result<()> {
    let id = row.id.as_str();
    if let Some(snapshot) = &row.snapshot {
        // The snapshot contains these changes.
        let sql = "DELETE FROM changes WHERE run = ? AND seq <= ?";
        execute(transaction, sql, params![id, to_i64(snapshot.seq)])?;
    }
    // A conflict keeps `last_used` and `last_seq`, which requests and results update.
    let sql = "INSERT INTO runs (id, last_used, record) VALUES (?, ?, ?) \
               ON CONFLICT DO UPDATE SET record = excluded.record";
    execute(transaction, sql, params![id, row.created_at, to_json(row)])
}

/// Deletes a run, its checkpoints, its metrics, and the prompts and completions of its owner with its
/// weights. Samples of other users, with whom the run was shared, belong to these users.
fn delete_run(transaction: &Transaction<'_>, id: &str) -> rusqlite::Result<()> {
    let prefix = folder_prefix(id);
    let samples = "SELECT id FROM sample_log WHERE substr(folder, 1, length(?1)) = ?1 \
                   AND owner = (SELECT owner FROM runs WHERE id = ?2)";
    let completions = format!("DELETE FROM sample_completions WHERE sample IN ({samples})");
    execute(transaction, &completions, [&*prefix, id])?;
    let log = format!("DELETE FROM sample_log WHERE id IN ({samples})");
    execute(transaction, &log, [&*prefix, id])?;
    execute(transaction, "DELETE FROM changes WHERE run = ?", [id])?;
    // Compare the start of the path instead of using LIKE: ids may contain its wildcards.
    let sql = "DELETE FROM checkpoints WHERE substr(path, 1, length(?1)) = ?1";
    execute(transaction, sql, [format!("tinker://{id}/")])?;
    // All keys that start with `tinker://ID/`: `0` is the character after `/` in ASCII, so the range
    // uses the index.
    let sql = "DELETE FROM user_metadata WHERE object >= ? AND object < ?";
    execute(transaction, sql, [format!("tinker://{id}/"), format!("tinker://{id}0")])?;
    delete_metadata(transaction, id)?;
    let points = "DELETE FROM metric_points WHERE series IN \
                  (SELECT id FROM metric_series WHERE run = ?)";
    execute(transaction, points, [id])?;
    execute(transaction, "DELETE FROM metric_series WHERE run = ?", [id])?;
    execute(transaction, "DELETE FROM runs WHERE id = ?", [id])
}

fn write_sampler(transaction: &Transaction<'_>, row: &SamplerRecord) -> rusqlite::Result<()> {
    let sql = "INSERT INTO samplers (id, record) VALUES (?, ?) \
               ON CONFLICT DO UPDATE SET record = excluded.record";
    execute(transaction, sql, params![row.id.as_str(), to_json(row)])
}

fn write_checkpoint(transaction: &Transaction<'_>, row: &CheckpointRecord) -> rusqlite::Result<()> {
    touch_run(transaction, row.path.run().as_str(), row.created_at)?;
    let sql = "INSERT INTO checkpoints (path, record) VALUES (?, ?) \
               ON CONFLICT DO UPDATE SET record = excluded.record";
    execute(transaction, sql, params![row.path.to_string(), to_json(row)])
}

/// Deletes a checkpoint, stores the deletion, and removes stored deletions that are older than
/// [`DELETION_RETENTION`].
fn delete_checkpoint(
    transaction: &Transaction<'_>,
    path: &TinkerPath,
    at: UnixMicros,
) -> rusqlite::Result<()> {
    let path = path.to_string();
    execute(transaction, "DELETE FROM checkpoints WHERE path = ?", [&path])?;
    delete_metadata(transaction, &path)?;
    let forget = "DELETE FROM deleted_checkpoints WHERE deleted_at < ?";
    execute(transaction, forget, [at.saturating_sub(DELETION_RETENTION)])?;
    let sql = "INSERT OR REPLACE INTO deleted_checkpoints (path, deleted_at) VALUES (?, ?)";
    execute(transaction, sql, params![path, at])
}

fn write_request(transaction: &Transaction<'_>, row: &RequestRecord) -> rusqlite::Result<()> {
    if let SequenceScope::Model(model) = &row.scope {
        touch_run(transaction, model.as_str(), row.at)?;
    }
    let sql = "INSERT INTO requests (id, body_payload, record) VALUES (?, ?, ?)";
    execute(transaction, sql, params![row.id.as_str(), to_i64(row.number), to_json(row)])
}

/// Updates the time of the last use of a run.
fn touch_run(transaction: &Transaction<'_>, run: &str, at: UnixMicros) -> rusqlite::Result<()> {
    let sql = "UPDATE runs SET last_used = max(last_used, ?2) WHERE id = ?1";
    execute(transaction, sql, params![run, at])
}

fn write_result(transaction: &Transaction<'_>, result: &ResultRecord) -> rusqlite::Result<()> {
    let request = &*result.request;
    execute(
        transaction,
        "UPDATE requests \
         SET result_payload = ?, result_bytes = ?, finished_at = ?, result_kind = ? WHERE id = ?",
        params![
            to_i64(result.number),
            to_i64(result.size as u64),
            result.at,
            to_json(&result.result),
            request.id.as_str()
        ],
    )?;
    let SequenceScope::Model(model) = &request.scope else { return Ok(()) };
    let seq = to_i64(request.seq);
    let sql = "UPDATE runs SET last_seq = max(ifnull(last_seq, ?2), ?2) WHERE id = ?1";
    execute(transaction, sql, params![model.as_str(), seq])?;
    if result.model_changed {
        // A model whose session has ended is never restored.
        let sql = "INSERT OR REPLACE INTO changes (run, seq, kind, body_payload) \
                   SELECT ?, ?, ?, ? \
                   WHERE NOT EXISTS (SELECT 1 FROM sessions WHERE id = ? AND ended)";
        let kind = variant_name(result.change_kind());
        let body = to_i64(request.number);
        let session = request.session.as_str();
        execute(transaction, sql, params![model.as_str(), seq, kind, body, session])?;
    }
    Ok(())
}

fn add_usage(transaction: &Transaction<'_>, key: &UsageKey, count: u64) -> rusqlite::Result<()> {
    let UsageKey { hour, owner, session, base_model, meter } = key;
    let sql = "INSERT INTO usage (hour, owner, session, base_model, meter, count) \
               VALUES (?, ?, ?, ?, ?, ?) \
               ON CONFLICT DO UPDATE SET count = count + excluded.count";
    let meter = variant_name(*meter);
    let owner = owner.as_str();
    let session = session.as_str();
    execute(transaction, sql, params![hour, owner, session, base_model, meter, to_i64(count)])
}

fn merge_usage(transaction: &Transaction<'_>, before: i64) -> rusqlite::Result<()> {
    let sql = "INSERT INTO usage (hour, owner, session, base_model, meter, count) \
               SELECT hour / 24 * 24, owner, ?2, base_model, meter, sum(count) FROM usage \
               WHERE hour < ?1 AND session != ?2 GROUP BY 1, owner, base_model, meter \
               ON CONFLICT DO UPDATE SET count = count + excluded.count";
    execute(transaction, sql, params![before, MERGED_SESSION])?;
    let sql = "DELETE FROM usage WHERE hour < ? AND session != ?";
    execute(transaction, sql, params![before, MERGED_SESSION])
}

/// Executes a statement, which is prepared once per connection.
pub(super) fn execute(
    transaction: &Transaction<'_>,
    sql: &str,
    params: impl Params,
) -> rusqlite::Result<()> {
    let mut statement: CachedStatement<'_> = transaction.prepare_cached(sql)?;
    statement.execute(params).map(drop)
}
