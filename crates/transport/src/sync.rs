//! Atomics of the code that is checked with `loom`.
//!
//! The model tests of the crate `tinkex` compile the same source files with another `sync` module,
//! whose atomics come from `loom`. `loom` explores all thread interleavings.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
