//! The crew in every order in which its threads can meet.
//!
//! The file under test is compiled here once more, with locks and atomics that `loom` can stop between
//! any two steps. What a thread does while it stays awake, `loom` sees as one more look.

#![expect(unsafe_code, reason = "the crew's own")]

#[path = "../../src/kernel/thread_pool.rs"]
mod thread_pool;

mod sync {
    use std::cell::Cell;

    pub(super) use loom::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(super) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(super) use loom::thread::{Builder, JoinHandle};

    loom::thread_local! {
        static WORKING: Cell<bool> = Cell::new(false);
    }

    pub(super) fn is_working() -> bool {
        WORKING.with(Cell::get)
    }

    pub(super) fn set_working(working: bool) {
        WORKING.with(|own| own.set(working));
    }

    pub(super) fn awake_until(done: impl Fn() -> bool) -> bool {
        done()
    }
}

use std::sync::atomic::{AtomicUsize, Ordering};

use thread_pool::ThreadPool;

/// Runs `model` in all orders with at most two interruptions of a thread that could have gone on: all
/// of them would take hours.
fn every_order(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

/// `count` shares of work, of which each is taken once and done before the caller goes on.
fn round(crew: &ThreadPool, count: usize) {
    // Seen by the caller only if the crew orders it.
    let done: Vec<loom::cell::UnsafeCell<usize>> =
        (0..count).map(|_| loom::cell::UnsafeCell::new(0)).collect();
    let shared = Cells(&done);
    // SAFETY: each number is given out once.
    crew.each(count, |index| shared.get(index).with_mut(|cell| unsafe { *cell += 1 }));
    for cell in &done {
        // SAFETY: the crew is done; `loom` fails the test if it is not.
        assert_eq!(cell.with(|cell| unsafe { *cell }), 1);
    }
}

#[derive(Clone, Copy)]
struct Cells<'a>(&'a [loom::cell::UnsafeCell<usize>]);

impl Cells<'_> {
    fn get(&self, index: usize) -> &loom::cell::UnsafeCell<usize> {
        &self.0[index]
    }
}

// SAFETY: used by index, each by one thread; `loom` watches.
unsafe impl Sync for Cells<'_> {}

#[test]
fn work_is_done_once_and_before_the_caller_goes_on() {
    every_order(|| {
        let crew = ThreadPool::new(1).unwrap();
        round(&crew, 2);
    });
}

#[test]
fn a_thread_comes_back_for_more() {
    every_order(|| {
        let crew = ThreadPool::new(1).unwrap();
        round(&crew, 1);
        round(&crew, 1);
    });
}

#[test]
fn a_crew_that_had_nothing_to_do_ends() {
    every_order(|| drop(ThreadPool::new(2).unwrap()));
}

#[test]
fn two_callers_take_turns() {
    every_order(|| {
        let crew = sync::Arc::new(ThreadPool::new(0).unwrap());
        let other = sync::Arc::clone(&crew);
        let thread = loom::thread::spawn(move || round(&other, 1));
        round(&crew, 1);
        thread.join().unwrap();
    });
}

#[test]
fn models_are_run_in_more_than_one_order() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    every_order(|| {
        RUNS.fetch_add(1, Ordering::Relaxed);
        round(&ThreadPool::new(1).unwrap(), 1);
    });
    assert!(RUNS.load(Ordering::Relaxed) > 10);
}
