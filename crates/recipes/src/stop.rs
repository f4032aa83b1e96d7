//! [`StopHandle`]: stops a run after its current steps, with a checkpoint.

use std::sync::Arc;

use tokio::sync::watch;

/// Handle that stops a run after its current steps, with a checkpoint. Clones stop the same run.
#[derive(Clone, Debug)]
pub struct StopHandle(Arc<watch::Sender<bool>>);

impl StopHandle {
    pub(super) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Requests that the run stops. The run finishes the steps that it has data for, saves a
    /// checkpoint, stores its progress and ends its stream.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }

    /// Returns whether the run was stopped.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until the run is stopped.
    pub(super) async fn stopped(&self) {
        // `self` holds the sender, so the channel cannot close.
        let _ = self.0.subscribe().wait_for(|stopped| *stopped).await;
    }
}
