//! Model check of the thread pool: explores the interleavings of its threads.
//!
//! `thread_pool.rs` is compiled here a second time against the `loom` locks and atomics of the
//! `sync` module below. Spinning is modelled as a single poll.

#![expect(unsafe_code, reason = "thread_pool.rs contains unsafe code")]

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
        static IN_REGION: Cell<bool> = Cell::new(false);
    }

    pub(super) fn in_region() -> bool {
        IN_REGION.with(Cell::get)
    }

    pub(super) fn set_in_region(inside: bool) {
        IN_REGION.with(|own| own.set(inside));
    }

    pub(super) fn spin_until(done: impl Fn() -> bool) -> bool {
        done()
    }
}

use std::sync::atomic::{AtomicUsize, Ordering};

use thread_pool::ThreadPool;

/// Runs `model` in every interleaving with at most two preemptions. Without the bound the search
/// takes hours.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

/// Runs `count` tasks and checks that each ran once and that its write is visible to the caller.
fn run_tasks(pool: &ThreadPool, count: usize) {
    // `loom` reports a data race unless the pool orders the tasks' writes before the caller's
    // reads.
    let runs: Vec<loom::cell::UnsafeCell<usize>> =
        (0..count).map(|_| loom::cell::UnsafeCell::new(0)).collect();
    let shared = Cells(&runs);
    // SAFETY: each index is given to one task only.
    pool.for_each(count, |index| shared.get(index).with_mut(|cell| unsafe { *cell += 1 }));
    for cell in &runs {
        // SAFETY: all tasks have finished; `loom` fails the test otherwise.
        assert_eq!(cell.with(|cell| unsafe { *cell }), 1);
    }
}

/// Cells that tasks on several threads access, each its own.
#[derive(Clone, Copy)]
struct Cells<'a>(&'a [loom::cell::UnsafeCell<usize>]);

impl Cells<'_> {
    fn get(&self, index: usize) -> &loom::cell::UnsafeCell<usize> {
        &self.0[index]
    }
}

// SAFETY: each cell is accessed by one thread at a time. `loom` fails the test if that is violated.
unsafe impl Sync for Cells<'_> {}

#[test]
fn every_task_runs_once_and_before_the_call_returns() {
    explore(|| {
        let pool = ThreadPool::new(1).unwrap();
        run_tasks(&pool, 2);
    });
}

#[test]
fn a_worker_joins_a_second_region() {
    explore(|| {
        let pool = ThreadPool::new(1).unwrap();
        run_tasks(&pool, 1);
        run_tasks(&pool, 1);
    });
}

#[test]
fn an_unused_pool_shuts_down() {
    explore(|| drop(ThreadPool::new(2).unwrap()));
}

#[test]
fn concurrent_callers_are_serialized() {
    explore(|| {
        let pool = sync::Arc::new(ThreadPool::new(0).unwrap());
        let other = sync::Arc::clone(&pool);
        let thread = loom::thread::spawn(move || run_tasks(&other, 1));
        run_tasks(&pool, 1);
        thread.join().unwrap();
    });
}

#[test]
fn models_run_in_more_than_ten_interleavings() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    explore(|| {
        RUNS.fetch_add(1, Ordering::Relaxed);
        run_tasks(&ThreadPool::new(1).unwrap(), 1);
    });
    assert!(RUNS.load(Ordering::Relaxed) > 10);
}
