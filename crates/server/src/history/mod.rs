//! History of finished requests for the dashboard: metrics of training requests, and a log of
//! samples.
//!
//! The worker attaches a [`HistoryRecord`] to the outcome of a request, and the disk writer commits
//! it in the same transaction. Requests never read the history: [`HistoryReader`] has a connection
//! of its own, which only the dashboard uses.

mod allowance;
mod blob;
mod columns;
mod downsample;
mod options;
mod points;
mod reader;
mod record;
mod steps;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tinkex_wire::ModelId;
use tokio::sync::watch;

use self::allowance::Allowance;
pub(crate) use self::blob::{floats_to_blob, sequence_hash, tokens_to_blob, values_to_blob};
pub(crate) use self::columns::RunColumns;
pub(crate) use self::downsample::MetricsQuery;
pub use self::options::HistoryOptions;
pub(crate) use self::reader::{
    HistoryReader, LoggedCompletion, LoggedRequest, LoggedSample, SampleFilter,
};
pub(crate) use self::record::{
    CompletionHistory, HistoryCutoff, HistoryRecord, OperationHistory, RequestHistory,
    SampleHistory, SampleSource,
};
pub(crate) use self::steps::{RunSummary, StepTracker};
use crate::backend::Backend;

/// Largest size of the tokens and log-probabilities of a request that are logged, in bytes. Larger
/// requests are logged without them.
const MAX_SAMPLE_BYTES: usize = 1 << 20;

/// The history of a server: its limits, its reader and the notification of new rows.
pub(crate) struct History {
    options: HistoryOptions,
    database: PathBuf,
    allowance: Mutex<Allowance>,
    /// Opened on first use.
    reader: Mutex<Option<HistoryReader>>,
    /// Number of commits that contained history.
    changed: watch::Sender<u64>,
}

impl History {
    pub(crate) fn new(options: HistoryOptions, database: PathBuf) -> Self {
        let allowance = Mutex::new(Allowance::new(options.sample_bytes));
        let changed = watch::Sender::new(0);
        Self { options, database, allowance, reader: Mutex::default(), changed }
    }

    pub(crate) fn options(&self) -> &HistoryOptions {
        &self.options
    }

    /// Returns whether requests are recorded.
    pub(crate) fn is_enabled(&self) -> bool {
        self.options.requests > 0
    }

    /// Returns what to record of a sampling request of `bytes` bytes: `None` for nothing, and
    /// whether its tokens are recorded otherwise. A flood of samples is recorded in part, so that
    /// the writer is not slowed down.
    pub(crate) fn admit_sample(&self, bytes: usize) -> Option<bool> {
        if !self.is_enabled() {
            return None;
        }
        let with_tokens = self.options.samples > 0 && bytes <= MAX_SAMPLE_BYTES;
        let mut allowance = self.allowance.lock().unwrap_or_else(PoisonError::into_inner);
        allowance.take(if with_tokens { bytes } else { 0 }).then_some(with_tokens)
    }

    /// Tells the dashboard that history was committed.
    pub(crate) fn notify(&self) {
        self.changed.send_modify(|commits| *commits += 1);
    }

    /// Returns a receiver that is notified after commits that contain history.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Runs `read` with the reader. Blocks: call it on the blocking pool.
    ///
    /// # Errors
    /// Fails if the database cannot be read.
    pub(crate) fn read<T>(
        &self,
        read: impl FnOnce(&mut HistoryReader) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<T> {
        let mut reader: MutexGuard<'_, Option<HistoryReader>> =
            self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = match reader.take() {
            Some(opened) => opened,
            None => HistoryReader::open(&self.database)?,
        };
        read(reader.insert(opened))
    }

    /// Closes the connection of the reader: the writer's last connection copies all commits to the
    /// database file when it is closed.
    pub(crate) fn close(&self) {
        *self.reader.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Returns the rows to remove, so that the history keeps its limits at the time `now`; `None`
    /// if there are none. Blocks.
    pub(crate) fn cutoff(&self, now: crate::record::UnixMicros) -> Option<HistoryCutoff> {
        let oldest = now.saturating_sub(crate::clock::micros(self.options.max_age));
        let read = self.read(|reader| reader.cutoff(&self.options, oldest));
        read.unwrap_or_else(|error| {
            tracing::warn!(target: crate::log::STORAGE, %error, "cannot read the history");
            None
        })
    }
}

/// Returns the prefix of the names of the adapter folders of a run.
pub(crate) fn folder_prefix(run: &str) -> String {
    let name = run.replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_");
    format!("{name}-")
}

/// Returns the name under which samples from the weights `folder` of a run are logged. Folders of
/// this server start with the name of their run; weights on an upstream get it as a prefix.
pub(crate) fn logged_folder(run: Option<&ModelId>, folder: &str) -> String {
    match (Backend::of_weights(folder), run) {
        (Backend::Upstream(_), Some(run)) => format!("{}{folder}", folder_prefix(run.as_str())),
        _ => folder.to_owned(),
    }
}

/// Returns a record that commits `history`.
pub(crate) fn record(history: HistoryRecord) -> crate::record::Record {
    crate::record::Record::History(Arc::new(history))
}

#[cfg(test)]
mod tests;
