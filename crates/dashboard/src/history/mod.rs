//! Reads the history of finished requests: metrics of training requests, and a log of samples.
//!
//! `tinkex-store` writes the rows; no request of the API reads them. [`HistoryReader`] has its own
//! database connection, which only the dashboard uses.

mod columns;
mod downsample;
mod points;
mod reader;
mod steps;

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use tinkex_store::clock::micros;
use tinkex_store::history::{HistoryCutoff, HistoryOptions, HistoryRecorder};
use tinkex_store::record::UnixMicros;
use tokio::sync::watch;

pub(crate) use self::columns::RunColumns;
pub(crate) use self::downsample::{MetricCurve, MetricsQuery};
pub(crate) use self::reader::{
    HistoryReader, LoggedCompletion, LoggedRequest, LoggedSample, SampleFilter,
};
pub(crate) use self::steps::{RunSummary, StepTracker};

/// The history in the database of a server, opened on first use.
pub struct History {
    recorder: Arc<HistoryRecorder>,
    database: PathBuf,
    /// `None` until the first use.
    reader: Mutex<Option<HistoryReader>>,
}

impl History {
    /// Creates the history that `recorder` records in a database file.
    #[must_use]
    pub fn new(recorder: Arc<HistoryRecorder>, database: PathBuf) -> Self {
        Self { recorder, database, reader: Mutex::default() }
    }

    pub(crate) fn options(&self) -> &HistoryOptions {
        self.recorder.options()
    }

    /// Returns a receiver that is notified after commits that contain history.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.recorder.subscribe()
    }

    /// Runs `read` with the reader. Blocks: call it on the blocking pool.
    ///
    /// # Errors
    /// Fails if the database cannot be read.
    pub(crate) fn read<T>(
        &self,
        read: impl FnOnce(&mut HistoryReader) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<T> {
        let mut reader = self.reader.lock();
        let opened = match reader.take() {
            Some(opened) => opened,
            None => HistoryReader::open(&self.database)?,
        };
        read(reader.insert(opened))
    }

    /// Closes the connection. Close it before the writer's connection: the last connection of a
    /// database copies all commits to the database file.
    pub fn close(&self) {
        *self.reader.lock() = None;
    }

    /// Returns the oldest rows to keep, so that the history is within its limits at the time `now`;
    /// `None` if all rows are within the limits. Blocks.
    pub fn cutoff(&self, now: UnixMicros) -> Option<HistoryCutoff> {
        let oldest = now.saturating_sub(micros(self.options().max_age));
        let read = self.read(|reader| reader.cutoff(self.options(), oldest));
        read.unwrap_or_else(|error| {
            tracing::warn!(target: tinkex_store::log::STORAGE, %error, "cannot read the history");
            None
        })
    }
}

impl std::fmt::Debug for History {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("History").field("database", &self.database).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
