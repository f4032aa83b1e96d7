//! [`HistoryReader`]: a connection to the database that reads the history.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, OptionalExtension as _, Row, params};
use tinkex_store::history::{
    HistoryCutoff, HistoryOptions, floats_from_blob, tokens_from_blob, top_from_blob,
};
use tinkex_wire::ModelId;

use super::points::{POINT_COLUMNS, PointCursor, STEP_COLUMNS, SeriesTable, read_points};
use super::{RunColumns, RunSummary, StepTracker};
use crate::record::UnixMicros;

/// Time to wait for a lock of the database.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of runs whose columns stay in memory.
const CACHED_RUNS: usize = 8;

/// Read-only connection to the database, and a cache of the rows that it has read. Every method
/// first reads the rows that were committed since the last call.
pub(crate) struct HistoryReader {
    connection: Connection,
    series: SeriesTable,
    summaries: HashMap<ModelId, RunSummary>,
    /// Id of the last point in `summaries`.
    last_point: i64,
    /// Columns of the runs that were shown last, the newest at the end.
    columns: Vec<CachedColumns>,
}

struct CachedColumns {
    run: ModelId,
    tracker: StepTracker,
    last_point: i64,
    columns: RunColumns,
}

/// A finished request in the timeline of a run. Durations are in microseconds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LoggedRequest {
    pub(crate) kind: String,
    pub(crate) seq: u64,
    pub(crate) finished_at: UnixMicros,
    pub(crate) queued: i64,
    pub(crate) computed: i64,
    pub(crate) tokens: u64,
    pub(crate) error: Option<String>,
}

/// A request that failed.
#[derive(Clone, Debug)]
pub(crate) struct FailedRequest {
    /// Run of a training request.
    pub(crate) run: Option<ModelId>,
    pub(crate) kind: String,
    pub(crate) at: UnixMicros,
    pub(crate) error: String,
}

/// Selects the samples to return.
#[derive(Clone, Debug, Default)]
pub(crate) struct SampleFilter {
    /// Prefix of the names of the adapter folders of a run.
    pub(crate) folder_prefix: Option<String>,
    /// Folder of an adapter.
    pub(crate) folder: Option<String>,
    /// Name of a base model: returns only samples from the base model itself, without an adapter.
    pub(crate) base_model: Option<String>,
    /// Id of one sample.
    pub(crate) id: Option<i64>,
    /// Hash of a prompt.
    pub(crate) prompt_hash: Option<i64>,
    /// User who sampled; `None` for all users.
    pub(crate) owner: Option<String>,
    /// Returns only samples with smaller ids.
    pub(crate) before: Option<i64>,
    pub(crate) limit: u32,
}

/// A sampling request in the log.
#[derive(Clone, Debug)]
pub(crate) struct LoggedSample {
    pub(crate) id: i64,
    pub(crate) finished_at: UnixMicros,
    pub(crate) queued: i64,
    pub(crate) computed: i64,
    pub(crate) base_model: String,
    pub(crate) folder: Option<String>,
    pub(crate) session: String,
    pub(crate) source: String,
    pub(crate) prompt_tokens: u64,
    /// `None` if the tokens are not recorded.
    pub(crate) prompt: Option<Vec<u32>>,
    /// Equal for equal prompts.
    pub(crate) prompt_hash: Option<i64>,
    pub(crate) completions: Vec<LoggedCompletion>,
    pub(crate) error: Option<String>,
}

/// A completion in the log.
#[derive(Clone, Debug)]
pub(crate) struct LoggedCompletion {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<f32>,
    /// Most probable tokens of each position; empty if they were not requested.
    pub(crate) top: Vec<Vec<(u32, f32)>>,
    pub(crate) stop: String,
    pub(crate) advantage: Option<f64>,
}

impl HistoryReader {
    pub(super) fn open(database: &Path) -> rusqlite::Result<Self> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(database, flags)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        Ok(Self {
            connection,
            series: SeriesTable::default(),
            summaries: HashMap::new(),
            last_point: 0,
            columns: Vec::new(),
        })
    }

    /// Returns the summaries of all runs that have finished requests.
    pub(crate) fn summaries(&mut self) -> rusqlite::Result<&HashMap<ModelId, RunSummary>> {
        let sql = format!("SELECT {POINT_COLUMNS} FROM metric_points WHERE id > ? ORDER BY id");
        let summaries = &mut self.summaries;
        let last = &mut self.last_point;
        // The summary of the current run is not in the map, which saves a lookup: most points
        // follow a point of the same run.
        let mut current: Option<(ModelId, RunSummary)> = None;
        let parameters = [*last];
        let read = read_points(
            &self.connection,
            &mut self.series,
            &sql,
            parameters,
            |id, series, point| {
                *last = point.id;
                if current.as_ref().is_none_or(|(run, _)| *run != series.run) {
                    summaries.extend(current.take());
                    let summary = summaries.remove(&series.run).unwrap_or_default();
                    current = Some((series.run.clone(), summary));
                }
                if let Some((_, summary)) = &mut current {
                    summary.add(id, series, point);
                }
            },
        );
        summaries.extend(current);
        read?;
        Ok(&self.summaries)
    }

    /// Returns the metrics of a run.
    pub(crate) fn columns(&mut self, run: &ModelId) -> rusqlite::Result<&RunColumns> {
        let position = self.columns.iter().position(|cached| cached.run == *run);
        let mut cached = match position {
            Some(position) => self.columns.remove(position),
            None => CachedColumns {
                run: run.clone(),
                tracker: StepTracker::default(),
                last_point: 0,
                columns: RunColumns::default(),
            },
        };
        self.read_columns(&mut cached)?;
        if self.columns.len() == CACHED_RUNS {
            self.columns.remove(0);
        }
        self.columns.push(cached);
        Ok(&self.columns[self.columns.len() - 1].columns)
    }

    /// Returns the ids of the series of a run.
    fn series_of(&self, run: &ModelId) -> rusqlite::Result<Vec<i64>> {
        let sql = "SELECT id FROM metric_series WHERE run = ?";
        let mut statement = self.connection.prepare_cached(sql)?;
        statement.query_map([run.as_str()], |row| row.get(0))?.collect()
    }

    /// Reads the points that were committed since the last call.
    fn read_columns(&mut self, cached: &mut CachedColumns) -> rusqlite::Result<()> {
        // Read all series from one snapshot: if the cursor of the steps saw a later commit than the
        // cursor of the passes, the reader would permanently skip the passes in between.
        let _snapshot = self.connection.unchecked_transaction()?;
        let ids = self.series_of(&cached.run)?;
        // Use one cursor per series, for the reason given in `requests`.
        let sql = format!(
            "SELECT {STEP_COLUMNS} FROM metric_points \
             WHERE series = ? AND id > ? AND error IS NULL ORDER BY id"
        );
        let mut statements = Vec::with_capacity(ids.len());
        for _ in &ids {
            statements.push(self.connection.prepare(&sql)?);
        }
        let mut cursors = Vec::with_capacity(ids.len());
        for (id, statement) in ids.into_iter().zip(&mut statements) {
            let series = self.series.get(&self.connection, id)?;
            let rows = statement.query(params![id, cached.last_point])?;
            cursors.extend(PointCursor::start(id, series, rows)?);
        }
        while !cursors.is_empty() {
            let mut first = 0;
            for (index, cursor) in cursors.iter().enumerate().skip(1) {
                if cursor.point.id < cursors[first].point.id {
                    first = index;
                }
            }
            let PointCursor { id, series, point, .. } = &cursors[first];
            cached.last_point = point.id;
            if cached.tracker.add(*id, series, point) {
                cached.columns.push_point(&cached.tracker);
            }
            if !cursors[first].advance()? {
                cursors.swap_remove(first);
            }
        }
        Ok(())
    }

    /// Returns the newest finished requests of a run, at most `limit`, oldest first.
    pub(crate) fn requests(
        &mut self,
        run: &ModelId,
        limit: u32,
    ) -> rusqlite::Result<Vec<LoggedRequest>> {
        // Query each series separately: the index has the points of one series in order. One query
        // for all series would sort all points of the run.
        let sql = format!(
            "SELECT {POINT_COLUMNS} FROM metric_points WHERE series = ? ORDER BY id DESC LIMIT ?"
        );
        let mut requests = Vec::new();
        for id in self.series_of(run)? {
            let parameters = params![id, limit];
            read_points(
                &self.connection,
                &mut self.series,
                &sql,
                parameters,
                |_, series, point| {
                    let request = LoggedRequest {
                        kind: series.kind.clone(),
                        seq: point.seq,
                        finished_at: point.finished_at,
                        queued: point.queued,
                        computed: point.computed,
                        tokens: point.tokens,
                        error: point.error.clone(),
                    };
                    requests.push((point.id, request));
                },
            )?;
        }
        requests.sort_by_key(|(id, _)| std::cmp::Reverse(*id));
        requests.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
        Ok(requests.into_iter().rev().map(|(_, request)| request).collect())
    }

    /// Returns the requests that failed last, newest first.
    pub(crate) fn failures(&mut self, limit: u32) -> rusqlite::Result<Vec<FailedRequest>> {
        let sql = format!(
            "SELECT {POINT_COLUMNS} FROM metric_points \
             WHERE error IS NOT NULL ORDER BY id DESC LIMIT ?"
        );
        let mut failures = Vec::new();
        read_points(&self.connection, &mut self.series, &sql, [limit], |_, series, point| {
            failures.push(FailedRequest {
                run: Some(series.run.clone()),
                kind: series.kind.clone(),
                at: point.finished_at,
                error: point.error.clone().unwrap_or_default(),
            });
        })?;
        let sql = "SELECT finished_at, error FROM sample_log WHERE error IS NOT NULL \
                   ORDER BY id DESC LIMIT ?";
        let mut statement = self.connection.prepare_cached(sql)?;
        let read = |row: &Row<'_>| {
            Ok(FailedRequest {
                run: None,
                kind: "sample".to_owned(),
                at: row.get(0)?,
                error: row.get(1)?,
            })
        };
        for failure in statement.query_map([limit], read)? {
            failures.push(failure?);
        }
        failures.sort_by_key(|failure| std::cmp::Reverse(failure.at));
        failures.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
        Ok(failures)
    }

    /// Returns the largest ids of a finished request and of a sampling request; 0 if the table is
    /// empty.
    pub(crate) fn last_ids(&self) -> rusqlite::Result<(i64, i64)> {
        let sql = "SELECT ifnull(max(id), 0) FROM metric_points";
        let point = self.connection.query_row(sql, [], |row| row.get(0))?;
        Ok((point, self.last_sample(None)?))
    }

    /// Returns the largest id of a sampling request of a user, or of all users, in the log; 0 if
    /// there is none.
    pub(crate) fn last_sample(&self, owner: Option<&str>) -> rusqlite::Result<i64> {
        let all = "SELECT ifnull(max(id), 0) FROM sample_log";
        match owner {
            None => self.connection.query_row(all, [], |row| row.get(0)),
            Some(owner) => {
                let sql = format!("{all} WHERE owner = ?");
                self.connection.query_row(&sql, [owner], |row| row.get(0))
            }
        }
    }

    /// Returns the number of sampling requests of a user, or of all users, with tokens in the log.
    pub(crate) fn sample_count(&self, owner: Option<&str>) -> rusqlite::Result<u64> {
        let sql = "SELECT count(*) FROM sample_log \
                   WHERE prompt IS NOT NULL AND (?1 IS NULL OR owner = ?1)";
        self.connection.query_row(sql, [owner], |row| row.get::<_, i64>(0)).map(i64::cast_unsigned)
    }

    /// Returns sampling requests, newest first.
    pub(crate) fn samples(&self, filter: &SampleFilter) -> rusqlite::Result<Vec<LoggedSample>> {
        let sql = "SELECT * FROM sample_log \
                   WHERE id < ?1 AND (?2 IS NULL OR id = ?2) AND (?3 IS NULL OR folder = ?3) \
                     AND (?4 IS NULL OR folder IS NULL AND base_model = ?4) \
                     AND (?5 IS NULL OR substr(folder, 1, length(?5)) = ?5) \
                     AND (?6 IS NULL OR prompt_hash = ?6) \
                     AND (?7 IS NULL OR owner = ?7) \
                   ORDER BY id DESC LIMIT ?8";
        let mut statement = self.connection.prepare_cached(sql)?;
        let before = filter.before.unwrap_or(i64::MAX);
        let SampleFilter {
            folder_prefix, folder, base_model, id, prompt_hash, owner, limit, ..
        } = filter;
        let parameters =
            params![before, id, folder, base_model, folder_prefix, prompt_hash, owner, limit];
        let samples = statement.query_map(parameters, read_sample)?;
        let mut samples: Vec<LoggedSample> = samples.collect::<rusqlite::Result<_>>()?;
        let sql = "SELECT * FROM sample_completions WHERE sample = ? ORDER BY number";
        let mut statement = self.connection.prepare_cached(sql)?;
        for sample in &mut samples {
            let completions = statement.query_map([sample.id], read_completion)?;
            sample.completions = completions.collect::<rusqlite::Result<_>>()?;
        }
        Ok(samples)
    }

    /// Returns the requests of a time range in the log of samples, for the timeline of a run.
    pub(crate) fn sample_times(
        &self,
        folder_prefix: &str,
        owner: Option<&str>,
        since: UnixMicros,
        limit: u32,
    ) -> rusqlite::Result<Vec<LoggedRequest>> {
        let sql = "SELECT finished_at, queued, computed, prompt_tokens, error FROM sample_log \
                   WHERE substr(folder, 1, length(?1)) = ?1 AND finished_at >= ?2 \
                     AND (?4 IS NULL OR owner = ?4) \
                   ORDER BY id DESC LIMIT ?3";
        let mut statement = self.connection.prepare_cached(sql)?;
        let read = |row: &Row<'_>| {
            Ok(LoggedRequest {
                kind: "sample".to_owned(),
                seq: 0,
                finished_at: row.get(0)?,
                queued: row.get(1)?,
                computed: row.get(2)?,
                tokens: row.get::<_, i64>(3)?.cast_unsigned(),
                error: row.get(4)?,
            })
        };
        statement.query_map(params![folder_prefix, since, limit, owner], read)?.collect()
    }

    /// Returns the oldest rows to keep, or `None` if all rows are within the limits. The newest row
    /// of each table is always kept, so that new rows get larger ids than all removed rows.
    pub(super) fn cutoff(
        &mut self,
        options: &HistoryOptions,
        oldest: UnixMicros,
    ) -> rusqlite::Result<Option<HistoryCutoff>> {
        let points = self.first_kept("metric_points", options.requests, oldest)?;
        let mut samples = self.first_kept("sample_log", options.samples.max(1_000), oldest)?;
        let sql = "SELECT id, bytes FROM sample_log WHERE id >= ? ORDER BY id DESC";
        let mut statement = self.connection.prepare_cached(sql)?;
        let mut rows = statement.query([samples])?;
        let mut total = 0_i64;
        let mut kept = None;
        while let Some(row) = rows.next()? {
            total = total.saturating_add(row.get(1)?);
            if kept.is_some() && total.cast_unsigned() > options.sample_bytes {
                break;
            }
            kept = Some(row.get(0)?);
        }
        drop(rows);
        samples = kept.unwrap_or(samples);
        let older = |table: &str, id: i64| {
            let sql = format!("SELECT 1 FROM {table} WHERE id < ? LIMIT 1");
            self.connection.query_row(&sql, [id], |_| Ok(())).optional()
        };
        let found = older("metric_points", points)?.or(older("sample_log", samples)?);
        Ok(found.map(|()| HistoryCutoff { points, samples }))
    }

    /// Returns the id of the first row to keep: the oldest of the newest `count` rows whose time is
    /// not before `oldest`, or the newest row.
    fn first_kept(&self, table: &str, count: u64, oldest: UnixMicros) -> rusqlite::Result<i64> {
        let newest = format!("SELECT ifnull(max(id), 0) FROM {table}");
        let newest: i64 = self.connection.query_row(&newest, [], |row| row.get(0))?;
        // Ids have no gaps, because only the oldest rows are removed.
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        let by_count = newest.saturating_sub(count).saturating_add(1).max(1);
        let by_age = format!("SELECT min(id) FROM {table} WHERE id >= ? AND finished_at >= ?");
        let parameters = params![by_count, oldest];
        let by_age: Option<i64> =
            self.connection.query_row(&by_age, parameters, |row| row.get(0))?;
        Ok(by_age.unwrap_or(newest).max(by_count).min(newest.max(1)))
    }
}

fn read_sample(row: &Row<'_>) -> rusqlite::Result<LoggedSample> {
    let prompt: Option<Vec<u8>> = row.get("prompt")?;
    Ok(LoggedSample {
        id: row.get("id")?,
        finished_at: row.get("finished_at")?,
        queued: row.get("queued")?,
        computed: row.get("computed")?,
        base_model: row.get("base_model")?,
        folder: row.get("folder")?,
        session: row.get("session")?,
        source: row.get("source")?,
        prompt_tokens: row.get::<_, i64>("prompt_tokens")?.cast_unsigned(),
        prompt: prompt.map(|blob| tokens_from_blob(&blob)),
        prompt_hash: row.get("prompt_hash")?,
        completions: Vec::new(),
        error: row.get("error")?,
    })
}

fn read_completion(row: &Row<'_>) -> rusqlite::Result<LoggedCompletion> {
    let tokens: Vec<u8> = row.get("tokens")?;
    let logprobs: Vec<u8> = row.get("logprobs")?;
    let top: Option<Vec<u8>> = row.get("top")?;
    Ok(LoggedCompletion {
        tokens: tokens_from_blob(&tokens),
        logprobs: floats_from_blob(&logprobs),
        top: top.map(|blob| top_from_blob(&blob)).unwrap_or_default(),
        stop: row.get("stop")?,
        advantage: row.get("advantage")?,
    })
}
