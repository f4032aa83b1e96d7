//! Writes the history of the dashboard.

use rusqlite::{OptionalExtension as _, Transaction, params};

use super::column::to_i64;
use super::write_records::execute;
use crate::clock::micros;
use crate::history::{
    CompletionHistory, HistoryCutoff, HistoryRecord, RequestHistory, SampleHistory, floats_to_blob,
    sequence_hash, tokens_to_blob, values_to_blob,
};

/// Maximum length of a stored error message in bytes.
const MAX_ERROR: usize = 2_000;

pub(super) fn write_history(
    transaction: &Transaction<'_>,
    record: &HistoryRecord,
) -> rusqlite::Result<()> {
    match record {
        HistoryRecord::Request(request) => write_request(transaction, request),
        HistoryRecord::Sample(sample) => write_sample(transaction, sample),
        HistoryRecord::Cutoff(cutoff) => remove_oldest(transaction, *cutoff),
    }
}

fn write_request(transaction: &Transaction<'_>, request: &RequestHistory) -> rusqlite::Result<()> {
    let operation = &request.operation;
    let mut names = String::from("[");
    for (name, _) in &operation.metrics {
        if names.len() > 1 {
            names.push(',');
        }
        names += &serde_json::Value::from(name.as_str()).to_string();
    }
    names.push(']');
    let series = find_series(transaction, request.run.as_str(), operation.kind, &names)?;
    let values = values_to_blob(operation.metrics.iter().map(|(_, value)| *value));
    let sql = "INSERT INTO metric_points \
               (series, seq, finished_at, queued, computed, tokens, metrics, error) \
               VALUES (?, ?, ?, ?, ?, ?, ?, ?)";
    let seq = to_i64(request.seq);
    let tokens = to_i64(operation.tokens);
    let at = request.finished_at;
    let queued = request.queued;
    let computed = micros(operation.computed);
    let error = request.error.as_deref().map(shortened);
    execute(transaction, sql, params![series, seq, at, queued, computed, tokens, values, error])?;
    // Set the advantage of the completions that do not have one yet: a completion keeps its first
    // advantage, even if a later batch contains the same sequence. Only samples of the owner of the run count.
    let sql = "UPDATE sample_completions SET advantage = ?2 \
               WHERE sequence_hash = ?1 AND advantage IS NULL AND EXISTS \
                 (SELECT 1 FROM sample_log WHERE id = sample \
                  AND owner = ifnull((SELECT owner FROM runs WHERE id = ?3), 'admin'))";
    let run = request.run.as_str();
    for (hash, advantage) in &operation.advantages {
        execute(transaction, sql, params![hash, f64::from(*advantage), run])?;
    }
    Ok(())
}

/// Returns the id of a series, which is created if it does not exist.
fn find_series(
    transaction: &Transaction<'_>,
    run: &str,
    kind: &str,
    names: &str,
) -> rusqlite::Result<i64> {
    let sql = "SELECT id FROM metric_series WHERE run = ? AND kind = ? AND names = ?";
    let mut find = transaction.prepare_cached(sql)?;
    let found = find.query_row([run, kind, names], |row| row.get(0)).optional()?;
    if let Some(id) = found {
        return Ok(id);
    }
    let sql = "INSERT INTO metric_series (run, kind, names) VALUES (?, ?, ?)";
    execute(transaction, sql, [run, kind, names])?;
    Ok(transaction.last_insert_rowid())
}

fn write_sample(transaction: &Transaction<'_>, sample: &SampleHistory) -> rusqlite::Result<()> {
    let prompt = sample.prompt.as_deref();
    let prompt_blob = prompt.map(tokens_to_blob);
    let hash = prompt.map(|prompt| sequence_hash(prompt.iter().copied()));
    let completions: Vec<StoredCompletion> =
        sample.completions.iter().map(StoredCompletion::new).collect();
    let bytes = prompt_blob.as_ref().map_or(0, Vec::len)
        + completions.iter().map(StoredCompletion::bytes).sum::<usize>();
    let sql = "INSERT INTO sample_log \
               (finished_at, queued, computed, base_model, folder, session, source, \
                prompt_tokens, prompt, prompt_hash, bytes, error, owner) \
               VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
    execute(
        transaction,
        sql,
        params![
            sample.finished_at,
            sample.queued,
            sample.computed,
            sample.weights.base_model,
            sample.weights.folder,
            sample.session.as_str(),
            sample.source.as_str(),
            to_i64(sample.prompt_tokens as u64),
            prompt_blob,
            hash,
            to_i64(bytes as u64),
            sample.error.as_deref().map(shortened),
            sample.owner.as_str(),
        ],
    )?;
    let id = transaction.last_insert_rowid();
    let sql = "INSERT INTO sample_completions \
               (sample, number, tokens, logprobs, top, stop, sequence_hash) \
               VALUES (?, ?, ?, ?, ?, ?, ?)";
    for (number, (stored, completion)) in completions.iter().zip(&sample.completions).enumerate() {
        let StoredCompletion { tokens, logprobs, top } = stored;
        let CompletionHistory { stop, sequence_hash, .. } = completion;
        let number = to_i64(number as u64);
        execute(transaction, sql, params![id, number, tokens, logprobs, top, stop, sequence_hash])?;
    }
    Ok(())
}

/// Blobs of a completion.
struct StoredCompletion {
    tokens: Vec<u8>,
    logprobs: Vec<u8>,
    top: Option<Vec<u8>>,
}

impl StoredCompletion {
    fn new(completion: &CompletionHistory) -> Self {
        let top = completion.top.as_ref().map(|(count, pairs)| {
            let count = u32::try_from(*count).unwrap_or(0).to_le_bytes();
            let pairs = pairs.iter().flat_map(|(token, logprob)| {
                token.to_le_bytes().into_iter().chain(logprob.to_le_bytes())
            });
            count.into_iter().chain(pairs).collect()
        });
        let logprobs = floats_to_blob(&completion.logprobs);
        Self { tokens: tokens_to_blob(&completion.tokens), logprobs, top }
    }

    fn bytes(&self) -> usize {
        self.tokens.len() + self.logprobs.len() + self.top.as_ref().map_or(0, Vec::len)
    }
}

fn remove_oldest(transaction: &Transaction<'_>, cutoff: HistoryCutoff) -> rusqlite::Result<()> {
    execute(transaction, "DELETE FROM metric_points WHERE id < ?", [cutoff.points])?;
    execute(transaction, "DELETE FROM sample_completions WHERE sample < ?", [cutoff.samples])?;
    execute(transaction, "DELETE FROM sample_log WHERE id < ?", [cutoff.samples])
}

/// Returns the first [`MAX_ERROR`] bytes of a message.
fn shortened(error: &str) -> &str {
    &error[..error.floor_char_boundary(MAX_ERROR)]
}
