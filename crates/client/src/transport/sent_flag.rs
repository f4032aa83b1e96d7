//! [`SentFlag`]: whether the server may have received a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the server may have received a request. Clones share the flag, so that it can be read
/// after the future of the request was dropped.
#[derive(Clone, Debug, Default)]
pub(crate) struct SentFlag(Arc<AtomicBool>);

impl SentFlag {
    /// Returns whether the server may have received the request.
    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Records that the request is about to be sent. Returns the previous value.
    pub(crate) fn set(&self) -> bool {
        self.0.swap(true, Ordering::AcqRel)
    }

    /// Records that the request was not sent after all, or that the server did not read it.
    pub(crate) fn reset(&self) {
        self.0.store(false, Ordering::Release);
    }
}
