//! [`Documents`]: reads the documents of the page by name, from a server or from run folders.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use tinkex_store::executor::Executor;
use tokio::sync::watch;

use crate::access::StreamPermit;
use crate::document::{
    ChangesDocument, InfoDocument, MetricsDocument, RequestsDocument, RunDetails, RunListDocument,
    SampleListDocument, ServerDocument,
};
use crate::error::ServerError;
use crate::events::{self, ChangeEvents};
use crate::folders::FolderSource;
use crate::history::MetricsQuery;
use crate::live::LiveSource;
use crate::query::QueryParams;

/// Result of reading a document.
pub(crate) type DocumentResult<T> = Result<T, ServerError>;

/// Source of the documents: a server or run folders. All methods may block.
pub(crate) trait DashboardSource: Send + Sync {
    /// Describes the source: its kind, and the views that it has documents for.
    fn info(&self) -> DocumentResult<InfoDocument>;

    /// Lists all runs.
    fn runs(&self) -> DocumentResult<RunListDocument>;

    /// Describes a run with its settings and checkpoints.
    fn run(&self, id: &str) -> DocumentResult<RunDetails>;

    /// Returns the metrics of a run.
    fn metrics(&self, id: &str, query: &MetricsQuery) -> DocumentResult<MetricsDocument>;

    /// Returns the newest requests of a run with their times.
    fn requests(&self, id: &str) -> DocumentResult<RequestsDocument>;

    /// Returns samples, newest first.
    fn samples(&self, query: &QueryParams) -> DocumentResult<SampleListDocument>;

    /// Returns figures of the server.
    fn server(&self) -> DocumentResult<ServerDocument>;

    /// Returns the changes since the cursor, and advances the cursor; `None` if nothing has
    /// changed.
    fn changes(&self, cursor: &mut ChangeCursor) -> DocumentResult<Option<ChangesDocument>>;

    /// Returns a receiver that is notified of changes; `None` if the source does not notify of
    /// changes.
    fn subscribe(&self) -> Option<watch::Receiver<u64>>;
}

/// Position of a page in the stream of changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangeCursor {
    /// Id of the last finished request. For run folders, the number of reads so far.
    pub(crate) point: i64,
    /// Id of the last sample.
    pub(crate) sample: i64,
    /// Status of every run when it was last sent.
    pub(crate) statuses: HashMap<String, String>,
}

impl ChangeCursor {
    /// Returns the cursor as the id of an event; [`parse`](Self::parse) converts back.
    pub(crate) fn event_id(&self) -> String {
        format!("{}-{}", self.point, self.sample)
    }

    /// Removes the runs that do not exist any more, and returns their ids.
    pub(crate) fn remove_deleted(&mut self, exists: impl Fn(&str) -> bool) -> Vec<String> {
        self.statuses.extract_if(|id, _| !exists(id)).map(|(id, _)| id).collect()
    }

    /// Reads the id of an event; `None` if it has another form.
    pub(crate) fn parse(id: &str) -> Option<Self> {
        let (point, sample) = id.split_once('-')?;
        Some(Self { point: point.parse().ok()?, sample: sample.parse().ok()?, ..Self::default() })
    }
}

/// The documents that the page reads. Cheap to clone.
#[derive(Clone)]
pub struct Documents(Arc<dyn DashboardSource>);

impl Documents {
    /// Returns the documents of a running server.
    #[must_use]
    pub fn of_server(server: LiveSource) -> Self {
        Self(Arc::new(server))
    }

    /// Returns the documents of run folders. Each of `folders` is a run folder, or contains run
    /// folders.
    #[must_use]
    pub fn of_folders(folders: Vec<PathBuf>) -> Self {
        Self(Arc::new(FolderSource::new(folders)))
    }

    /// Returns a document as JSON; `None` if no document has the name. Blocks: call it on the
    /// blocking pool.
    ///
    /// # Errors
    /// Fails if the run does not exist, a parameter is invalid, or the history cannot be read.
    pub fn read(&self, name: &str, query: &QueryParams) -> Result<Option<Bytes>, ServerError> {
        let id = query.text("id").unwrap_or_default();
        let source = &self.0;
        let json = match name {
            "info" => encode(&source.info()?),
            "runs" => encode(&source.runs()?),
            "run" => encode(&source.run(id)?),
            "metrics" => encode(&source.metrics(id, &query.metrics()?)?),
            "requests" => encode(&source.requests(id)?),
            "samples" => encode(&source.samples(query)?),
            "server" => encode(&source.server()?),
            _ => return Ok(None),
        };
        json.map(Some)
    }

    /// Starts a stream of changes, which ends when `permit` becomes invalid. The stream begins after
    /// the event with the id `last_event`; it begins now if `last_event` is `None`.
    #[must_use]
    pub fn changes(
        &self,
        executor: &Executor,
        last_event: Option<&str>,
        permit: StreamPermit,
    ) -> ChangeEvents {
        let cursor = last_event.and_then(ChangeCursor::parse);
        events::start(Arc::clone(&self.0), executor, cursor, permit)
    }
}

fn encode(document: &impl Serialize) -> Result<Bytes, ServerError> {
    let json = serde_json::to_vec(document);
    let failed = |error| ServerError::Internal(format!("cannot encode the document: {error}"));
    json.map(Bytes::from).map_err(failed)
}

impl std::fmt::Debug for Documents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Documents(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_id_is_read_back() {
        let cursor = ChangeCursor { point: 12, sample: 3, ..ChangeCursor::default() };
        assert_eq!(ChangeCursor::parse(&cursor.event_id()), Some(cursor));
        for invalid in ["", "1", "a-b", "-", "1-", "99999999999999999999-1"] {
            assert_eq!(ChangeCursor::parse(invalid), None, "{invalid}");
        }
    }
}
