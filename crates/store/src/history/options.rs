//! [`HistoryOptions`]: limits on the history that the server records for the dashboard.

use std::time::Duration;

/// Limits on the history that the server records for the dashboard. The oldest rows are removed
/// first.
///
/// ```
/// use tinkex_store::history::HistoryOptions;
///
/// assert_eq!(HistoryOptions::off().requests, 0);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HistoryOptions {
    /// Maximum number of finished training requests whose metrics are kept (default 1,000,000).
    /// Zero records nothing.
    pub requests: u64,
    /// Maximum number of sampling requests whose tokens are kept (default 10,000). With zero, the
    /// history has their times but not their tokens.
    pub samples: u64,
    /// Maximum size of the tokens and log-probabilities of these samples, in bytes (default
    /// 256 MiB).
    pub sample_bytes: u64,
    /// Time for which rows are kept (default 90 days).
    pub max_age: Duration,
}

impl HistoryOptions {
    /// Returns options that record nothing.
    #[must_use]
    pub fn off() -> Self {
        Self { requests: 0, ..Self::default() }
    }
}

impl Default for HistoryOptions {
    fn default() -> Self {
        Self {
            requests: 1_000_000,
            samples: 10_000,
            sample_bytes: 256 << 20,
            max_age: Duration::from_secs(90 * 24 * 3_600),
        }
    }
}
