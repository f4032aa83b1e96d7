//! Every order in which threads can meet in the gate, the turnstile and the shared pause.
//!
//! The files under test are compiled here once more, with locks and atomics that `loom` can stop
//! and reorder. A wake-up that is lost shows as a deadlock; a permit or a turn that is lost shows as
//! an assertion.

#![allow(dead_code, reason = "the files hold more than is modelled")]

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicI64, AtomicU64, Ordering};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
}

mod backoff;
mod dispatch;
mod limits;
mod training;
mod transport;
mod turns;

/// Runs `check` in every order with at most this many switches between threads that could have gone
/// on: what goes wrong, goes wrong with few of them, and all orders would take hours.
fn model(check: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}
