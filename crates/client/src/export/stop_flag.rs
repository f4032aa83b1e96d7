//! [`StopFlag`]: stops the thread that writes an export.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Flags shared with the thread that writes an export.
#[derive(Clone, Debug, Default)]
pub(super) struct StopFlag(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    /// Whether the thread must stop.
    stop: AtomicBool,
    /// Whether the thread has been started.
    writing: AtomicBool,
}

impl StopFlag {
    pub(super) fn set(&self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.stop.load(Ordering::Relaxed)
    }

    pub(super) fn start_writing(&self) {
        self.0.writing.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_writing(&self) -> bool {
        self.0.writing.load(Ordering::Relaxed)
    }
}

/// Stops the thread that writes when the future of the export is dropped.
pub(super) struct StopOnDrop(pub(super) StopFlag);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.set();
    }
}
