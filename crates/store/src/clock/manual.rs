//! [`ManualClocks`]: clocks whose values a test sets.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use super::SystemClocks;
use crate::record::UnixMicros;

/// Clocks that stand still until a test sets them.
pub struct ManualClocks {
    pub wall: AtomicI64,
    pub since_boot: AtomicI64,
    pub boot_id: &'static str,
}

impl ManualClocks {
    #[must_use]
    pub fn new(wall: UnixMicros, boot_id: &'static str, since_boot: i64) -> Arc<Self> {
        Arc::new(Self { wall: wall.into(), since_boot: since_boot.into(), boot_id })
    }
}

impl SystemClocks for ManualClocks {
    fn wall(&self) -> UnixMicros {
        self.wall.load(Ordering::Relaxed)
    }

    fn since_boot(&self) -> Option<UnixMicros> {
        Some(self.since_boot.load(Ordering::Relaxed))
    }

    fn boot_id(&self) -> Option<String> {
        Some(self.boot_id.to_owned())
    }
}
