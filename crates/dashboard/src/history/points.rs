//! Points of the history: reads the stored rows of finished model requests.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use rusqlite::{Connection, Row, Rows};
use tinkex_store::history::values_from_blob;
use tinkex_wire::ModelId;

use crate::record::UnixMicros;

/// Columns of a point, in the order in which [`PointRow::read`] expects them.
pub(super) const POINT_COLUMNS: &str =
    "id, series, seq, finished_at, queued, computed, tokens, metrics, error";

/// Columns of a successful request that the steps of a run need, in the order of
/// [`PointRow::read_step`].
pub(super) const STEP_COLUMNS: &str = "id, finished_at, queued, computed, tokens, metrics";

/// Run, kind of request and metrics of a series of points.
pub(super) struct Series {
    pub(super) run: ModelId,
    pub(super) kind: String,
    pub(super) names: Vec<String>,
}

/// A finished request of a model. Durations are in microseconds.
#[derive(Clone, Debug, Default)]
pub(super) struct PointRow {
    pub(super) id: i64,
    pub(super) seq: u64,
    pub(super) finished_at: UnixMicros,
    pub(super) queued: i64,
    pub(super) computed: i64,
    pub(super) tokens: u64,
    pub(super) values: Vec<u8>,
    pub(super) error: Option<String>,
}

impl PointRow {
    /// Returns the values of the metrics, in the order of the names of the series.
    pub(super) fn metrics(&self) -> impl Iterator<Item = f64> + '_ {
        values_from_blob(&self.values)
    }

    /// Replaces this point by a row of [`POINT_COLUMNS`]. Reads columns by number and reuses the
    /// buffer of the values, because a run has hundreds of thousands of rows.
    fn read(&mut self, row: &Row<'_>) -> rusqlite::Result<()> {
        self.id = row.get(0)?;
        self.seq = row.get::<_, i64>(2)?.cast_unsigned();
        self.finished_at = row.get(3)?;
        self.queued = row.get(4)?;
        self.computed = row.get(5)?;
        self.tokens = row.get::<_, i64>(6)?.cast_unsigned();
        self.values.clear();
        self.values.extend_from_slice(row.get_ref(7)?.as_blob()?);
        self.error = row.get(8)?;
        Ok(())
    }

    /// Replaces this point by a row of [`STEP_COLUMNS`].
    fn read_step(&mut self, row: &Row<'_>) -> rusqlite::Result<()> {
        self.id = row.get(0)?;
        self.finished_at = row.get(1)?;
        self.queued = row.get(2)?;
        self.computed = row.get(3)?;
        self.tokens = row.get::<_, i64>(4)?.cast_unsigned();
        self.values.clear();
        self.values.extend_from_slice(row.get_ref(5)?.as_blob()?);
        Ok(())
    }
}

/// The series that were read so far, by their id.
#[derive(Default)]
pub(super) struct SeriesTable(HashMap<i64, Arc<Series>>);

impl SeriesTable {
    pub(super) fn get(
        &mut self,
        connection: &Connection,
        id: i64,
    ) -> rusqlite::Result<Arc<Series>> {
        match self.0.entry(id) {
            Entry::Occupied(entry) => Ok(Arc::clone(entry.get())),
            Entry::Vacant(entry) => {
                Ok(Arc::clone(entry.insert(Arc::new(read_series(connection, id)?))))
            }
        }
    }
}

fn read_series(connection: &Connection, id: i64) -> rusqlite::Result<Series> {
    let mut statement =
        connection.prepare_cached("SELECT run, kind, names FROM metric_series WHERE id = ?")?;
    statement.query_row([id], |row| {
        let names: String = row.get("names")?;
        Ok(Series {
            run: ModelId::from(row.get::<_, String>("run")?),
            kind: row.get("kind")?,
            names: serde_json::from_str(&names).unwrap_or_default(),
        })
    })
}

/// Reads the successful requests of a series one by one, from a query that returns
/// [`STEP_COLUMNS`].
pub(super) struct PointCursor<'a> {
    pub(super) id: i64,
    pub(super) series: Arc<Series>,
    rows: Rows<'a>,
    pub(super) point: PointRow,
}

impl<'a> PointCursor<'a> {
    /// Reads the first point; `None` if the query returns no point.
    pub(super) fn start(
        id: i64,
        series: Arc<Series>,
        rows: Rows<'a>,
    ) -> rusqlite::Result<Option<Self>> {
        let mut cursor = Self { id, series, rows, point: PointRow::default() };
        Ok(cursor.advance()?.then_some(cursor))
    }

    /// Reads the next point. Returns false after the last point.
    pub(super) fn advance(&mut self) -> rusqlite::Result<bool> {
        let Some(row) = self.rows.next()? else { return Ok(false) };
        self.point.read_step(row)?;
        Ok(true)
    }
}

/// Calls `add` with points, their series and its id.
pub(super) fn read_points(
    connection: &Connection,
    known: &mut SeriesTable,
    sql: &str,
    parameters: impl rusqlite::Params,
    mut add: impl FnMut(i64, &Series, &PointRow),
) -> rusqlite::Result<()> {
    let mut statement = connection.prepare_cached(sql)?;
    let mut rows = statement.query(parameters)?;
    let mut point = PointRow::default();
    // The passes and the steps of a run alternate, so two series need no lookup in the table.
    let mut recent: [Option<(i64, Arc<Series>)>; 2] = [None, None];
    while let Some(row) = rows.next()? {
        point.read(row)?;
        let id = row.get(1)?;
        if recent[0].as_ref().is_none_or(|(known, _)| *known != id) {
            recent.swap(0, 1);
        }
        if recent[0].as_ref().is_none_or(|(known, _)| *known != id) {
            recent[0] = Some((id, known.get(connection, id)?));
        }
        if let Some((_, series)) = &recent[0] {
            add(id, series, &point);
        }
    }
    Ok(())
}
