//! The locks, atomics and threads of [`ThreadPool`](super::thread_pool::ThreadPool).
//!
//! Here they are the standard ones. `tests/model` compiles the crew against a `sync` of its own, which
//! tries every order in which threads can meet.

use std::cell::Cell;
use std::time::{Duration, Instant};

pub(super) use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence,
};
pub(super) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
pub(super) use std::thread::{Builder, JoinHandle};

/// How long a thread with nothing to do stays awake: longer than what lies between two products,
/// shorter than anybody else would mind.
const AWAKE: Duration = Duration::from_micros(200);
/// How often it looks before it asks for the time.
const LOOKS: u32 = 64;

thread_local! {
    static WORKING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is at some crew's work.
pub(super) fn is_working() -> bool {
    WORKING.get()
}

pub(super) fn set_working(working: bool) {
    WORKING.set(working);
}

/// Waits without sleeping for as long as that is worth it; says whether it is `done`.
pub(super) fn awake_until(done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..LOOKS {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > AWAKE {
            return false;
        }
    }
}
