//! Tests of the thread pool with real threads. `tests/model` explores the interleavings of small
//! cases.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::thread_pool::ThreadPool;

#[test]
fn every_task_runs_once_and_before_the_call_returns() {
    for threads in [0, 1, 3] {
        let pool = ThreadPool::new(threads).unwrap();
        for round in 0..2_000 {
            let count = round % 17;
            let runs: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each(count, |index| {
                runs[index].fetch_add(1, Ordering::Relaxed);
            });
            assert!(runs.into_iter().all(|runs| runs.into_inner() == 1), "round {round}");
        }
    }
}

#[test]
fn sleeping_workers_are_woken() {
    let pool = ThreadPool::new(2).unwrap();
    for _ in 0..20 {
        while pool.sleeping_workers() < 2 {
            std::thread::yield_now();
        }
        // Three tasks that wait for each other need three threads.
        let barrier = std::sync::Barrier::new(3);
        pool.for_each(3, |_| {
            barrier.wait();
        });
    }
}

#[test]
fn a_sleeping_caller_is_woken() {
    let pool = ThreadPool::new(1).unwrap();
    let barrier = std::sync::Barrier::new(2);
    let caller = std::thread::current().id();
    pool.for_each(2, |_| {
        barrier.wait();
        if std::thread::current().id() != caller {
            while !pool.is_caller_waiting() {
                std::thread::yield_now();
            }
        }
    });
}

#[test]
fn concurrent_callers_are_serialized_and_nested_regions_run_on_one_thread() {
    let pool = ThreadPool::new(2).unwrap();
    let total = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    pool.for_each(5, |_| {
                        pool.for_each(3, |_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    });
                }
            });
        }
    });
    assert_eq!(total.into_inner(), 4 * 200 * 5 * 3);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_stays_usable() {
    let pool = ThreadPool::new(2).unwrap();
    for bad in 0..6 {
        let run = || pool.for_each(6, |index| assert_ne!(index, bad, "task {bad}"));
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        let runs = AtomicUsize::new(0);
        pool.for_each(6, |_| {
            runs.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(runs.into_inner(), 6);
    }
}
