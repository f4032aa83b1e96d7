//! [`StopFlag`]: stops the thread that writes an export.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Two flags shared with the thread that writes an export: whether it has to stop, and whether it
/// has started.
#[derive(Clone, Debug, Default)]
pub(super) struct StopFlag(Arc<(AtomicBool, AtomicBool)>);

impl StopFlag {
    pub(super) fn set(&self) {
        self.0.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.0.load(Ordering::Relaxed)
    }

    pub(super) fn start_writing(&self) {
        self.0.1.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_writing(&self) -> bool {
        self.0.1.load(Ordering::Relaxed)
    }
}

/// Stops the thread that writes when the future of the export is dropped.
pub(super) struct StopOnDrop(pub(super) StopFlag);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.set();
    }
}
