//! Loom models of admission control, call order and the shared backoff.
//!
//! The files under test are compiled here a second time, with the locks and atomics of `loom`,
//! which explores the interleavings of threads. A lost wake-up shows as a deadlock, a lost permit
//! or reservation as a failed assertion.

#![allow(dead_code, reason = "the models use only part of the files")]
#![allow(unreachable_pub, reason = "the files belong to a library")]

mod sync {
    pub(crate) use loom::sync::MutexGuard;
    pub(crate) use loom::sync::atomic::{AtomicI64, AtomicU64, Ordering};

    /// Lock with the interface of `parking_lot`.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("no model panics while it holds the lock")
        }
    }
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
