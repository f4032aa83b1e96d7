//! The locks and atomics of everything that is model-checked.
//!
//! Here they are the standard ones. `tests/model` compiles the same files against a `sync` of its
//! own, which tries every order in which threads can meet.

pub(crate) use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard};
