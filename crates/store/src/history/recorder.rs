//! [`HistoryRecorder`]: decides which requests are recorded, and notifies subscribers of new rows.

use parking_lot::Mutex;
use tokio::sync::watch;

use super::allowance::Allowance;
use super::options::HistoryOptions;

/// Largest size of the tokens and log-probabilities of a request that are logged, in bytes. Larger
/// requests are logged without them.
const MAX_SAMPLE_BYTES: usize = 1 << 20;

/// Limits of the history, and the channel that notifies subscribers of new rows.
///
/// A worker attaches a [`HistoryRecord`](super::HistoryRecord) to the outcome of a request, and the
/// disk writer commits it in the same transaction.
pub struct HistoryRecorder {
    options: HistoryOptions,
    allowance: Mutex<Allowance>,
    /// Number of commits that contained history.
    changed: watch::Sender<u64>,
}

impl HistoryRecorder {
    /// Creates the recorder of a server.
    #[must_use]
    pub fn new(options: HistoryOptions) -> Self {
        let allowance = Mutex::new(Allowance::new(options.sample_bytes));
        Self { options, allowance, changed: watch::Sender::new(0) }
    }

    /// Returns the limits of the history.
    #[must_use]
    pub fn options(&self) -> &HistoryOptions {
        &self.options
    }

    /// Returns whether requests are recorded.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.options.requests > 0
    }

    /// Decides whether to record a sampling request of `bytes` bytes. Returns `None` if the request
    /// is not recorded; otherwise whether its tokens are recorded. Only a part of a flood of
    /// samples is recorded, so that it does not slow down the writer.
    pub fn admit_sample(&self, bytes: usize) -> Option<bool> {
        if !self.is_enabled() {
            return None;
        }
        let with_tokens = self.options.samples > 0 && bytes <= MAX_SAMPLE_BYTES;
        let bytes = if with_tokens { bytes } else { 0 };
        self.allowance.lock().take(bytes).then_some(with_tokens)
    }

    /// Notifies subscribers that history was committed.
    pub fn notify(&self) {
        self.changed.send_modify(|commits| *commits += 1);
    }

    /// Returns a receiver that is notified after commits that contain history.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }
}
