//! Locks of the code that is model-checked.
//!
//! `tests/model` compiles the same source files with a `sync` module of its own, on `loom`, which
//! explores all thread interleavings.

pub(crate) use parking_lot::{Mutex, MutexGuard};
