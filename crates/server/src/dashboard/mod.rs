//! The dashboard: what the web page at `/` shows, without HTTP.
//!
//! [`DashboardSource`] has the documents of the page. [`LiveSource`] reads them from a running
//! server, and [`FolderSource`] from the run folders of `tinkex train`. [`DashboardAccess`] decides
//! who may read them.

mod access;
mod asset;
mod folders;
mod live;
mod query;
mod samples;

use serde_json::Value;
use tokio::sync::watch;

pub(crate) use self::access::{CODE_LIFETIME, DashboardAccess, SESSION_LIFETIME};
pub(crate) use self::asset::Asset;
pub(crate) use self::folders::FolderSource;
pub(crate) use self::live::LiveSource;
pub(crate) use self::query::QueryParams;
use crate::error::ServerError;
use crate::history::MetricsQuery;

/// Result of a document of the dashboard.
pub(crate) type DocumentResult = Result<Value, ServerError>;

/// The documents of the dashboard. All methods may block.
pub(crate) trait DashboardSource: Send + Sync {
    /// Describes the source: its kind, and which views it has.
    fn info(&self) -> DocumentResult;

    /// Lists all runs.
    fn runs(&self) -> DocumentResult;

    /// Describes a run with its settings and checkpoints.
    fn run(&self, id: &str) -> DocumentResult;

    /// Returns the metrics of a run.
    fn metrics(&self, id: &str, query: &MetricsQuery) -> DocumentResult;

    /// Returns the newest requests of a run with their times.
    fn requests(&self, id: &str) -> DocumentResult;

    /// Returns samples, newest first.
    fn samples(&self, query: &QueryParams) -> DocumentResult;

    /// Returns figures of the server.
    fn server(&self) -> DocumentResult;

    /// Returns what has changed since the cursor, and advances it; `None` if nothing has.
    fn changes(&self, cursor: &mut ChangeCursor) -> Result<Option<Value>, ServerError>;

    /// Returns a receiver that is notified of changes; `None` if they have to be looked for.
    fn subscribe(&self) -> Option<watch::Receiver<u64>>;
}

/// Position of a page in the stream of changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangeCursor {
    /// Id of the last finished request, or the size of the metrics files.
    pub(crate) point: i64,
    /// Id of the last sample.
    pub(crate) sample: i64,
    /// Status of every run when it was last sent.
    pub(crate) statuses: std::collections::HashMap<String, String>,
}

impl ChangeCursor {
    /// Returns the id of an event, from which [`parse`](Self::parse) continues.
    pub(crate) fn event_id(&self) -> String {
        format!("{}-{}", self.point, self.sample)
    }

    /// Reads the id of an event; `None` if it has another form.
    pub(crate) fn parse(id: &str) -> Option<Self> {
        let (point, sample) = id.split_once('-')?;
        let (point, sample) = (point.parse().ok()?, sample.parse().ok()?);
        Some(Self { point, sample, ..Self::default() })
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
