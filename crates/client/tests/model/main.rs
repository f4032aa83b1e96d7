//! Loom models of admission control, call order and the shared backoff.
//!
//! The files under test are compiled here a second time, with the locks and atomics of `loom`,
//! which explores the interleavings of threads. A lost wake-up shows as a deadlock, a lost permit
//! or reservation as a failed assertion.

#![allow(dead_code, reason = "the models use only part of the files")]

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicI64, AtomicU64, Ordering};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
}

mod backoff;
mod call_order;
mod dispatch;
mod limits;
mod training;
mod transport;

/// Runs `check` in every interleaving with at most three preemptions.
///
/// Concurrency bugs show up with few preemptions, and exploring all interleavings takes hours.
fn model(check: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}
