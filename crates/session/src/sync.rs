//! Locks and atomics of the code that is model-checked.
//!
//! The model tests of the crate `tinkex` compile the same source files with another `sync` module,
//! on `loom`, which explores all thread interleavings.

pub(crate) use parking_lot::{Mutex, MutexGuard};
pub(crate) use std::sync::atomic::{AtomicI64, Ordering};
