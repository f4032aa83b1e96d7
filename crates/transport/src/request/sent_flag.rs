//! [`SentFlag`]: records whether the server may have read a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Flag that is set if the server may have read a request. Clones share the flag, so that the
/// caller can read it after the future of the request was dropped.
#[derive(Clone, Debug, Default)]
pub struct SentFlag(Arc<AtomicBool>);

impl SentFlag {
    /// Returns whether the server may have read the request.
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Records that the request is about to be sent. Returns the previous value.
    pub fn set(&self) -> bool {
        self.0.swap(true, Ordering::AcqRel)
    }

    /// Records that the request was not sent after all, or that the server refused the request
    /// without reading it.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Release);
    }
}
