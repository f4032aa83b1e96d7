//! Synchronization primitives of [`ThreadPool`](super::thread_pool::ThreadPool).
//!
//! This module re-exports the standard ones. `tests/model` compiles `thread_pool.rs` against its
//! own `sync` module, whose `loom` primitives explore every interleaving of the threads.

use std::cell::Cell;
use std::time::{Duration, Instant};

pub(super) use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence,
};
pub(super) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
pub(super) use std::thread::{Builder, JoinHandle};

/// Time that an idle thread spins before it sleeps: longer than the gap between two matrix products
/// of one decode step, and short enough to leave the core to other processes.
const SPIN_TIME: Duration = Duration::from_micros(200);
/// Number of polls of the condition between two reads of the clock.
const POLLS_PER_CLOCK_READ: u32 = 64;

thread_local! {
    static IN_REGION: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the current thread is executing a parallel region.
pub(super) fn in_region() -> bool {
    IN_REGION.get()
}

pub(super) fn set_in_region(inside: bool) {
    IN_REGION.set(inside);
}

/// Spins until `done` returns true or [`SPIN_TIME`] has passed. Returns whether `done` was true.
///
/// Other threads that are ready to run on this core run first: a spinning thread does nothing, and
/// a server has responses to send on the cores that the engine uses.
pub(super) fn spin_until(done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..POLLS_PER_CLOCK_READ {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN_TIME {
            return false;
        }
        std::thread::yield_now();
    }
}
