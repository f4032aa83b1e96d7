//! The crew with real threads; `tests/model` tries every order of few of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::thread_pool::ThreadPool;

#[test]
fn every_task_is_done_once_and_before_the_caller_goes_on() {
    for threads in [0, 1, 3] {
        let crew = ThreadPool::new(threads).unwrap();
        for round in 0..2_000 {
            let count = round % 17;
            let done: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            crew.each(count, |index| {
                done[index].fetch_add(1, Ordering::Relaxed);
            });
            assert!(done.into_iter().all(|done| done.into_inner() == 1), "round {round}");
        }
    }
}

#[test]
fn a_thread_that_fell_asleep_is_woken() {
    let crew = ThreadPool::new(2).unwrap();
    for _ in 0..20 {
        while crew.asleep() < 2 {
            std::thread::yield_now();
        }
        // Three tasks that wait for each other need three threads.
        let all = std::sync::Barrier::new(3);
        crew.each(3, |_| {
            all.wait();
        });
    }
}

#[test]
fn a_caller_that_fell_asleep_is_woken() {
    let crew = ThreadPool::new(1).unwrap();
    let both = std::sync::Barrier::new(2);
    let caller = std::thread::current().id();
    crew.each(2, |_| {
        both.wait();
        if std::thread::current().id() != caller {
            while !crew.is_waiting() {
                std::thread::yield_now();
            }
        }
    });
}

#[test]
fn many_callers_take_turns_and_work_inside_work_is_done_alone() {
    let crew = ThreadPool::new(2).unwrap();
    let total = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    crew.each(5, |_| {
                        crew.each(3, |_| {
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
fn a_panic_reaches_the_caller_and_the_crew_goes_on() {
    let crew = ThreadPool::new(2).unwrap();
    for bad in 0..6 {
        let run = || crew.each(6, |index| assert_ne!(index, bad, "task {bad}"));
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        let done = AtomicUsize::new(0);
        crew.each(6, |_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 6);
    }
}
