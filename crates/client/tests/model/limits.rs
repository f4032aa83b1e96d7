//! Lost wake-ups and leaked permits.

use std::sync::Arc;

use futures_util::FutureExt as _;
use loom::future::block_on;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use crate::dispatch::limit::Limit;
use crate::model;

#[test]
fn nobody_waits_for_ever_and_places_are_never_exceeded() {
    model(|| {
        let limit = Limit::concurrency(1);
        let inside = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (limit, inside) = (Arc::clone(&limit), Arc::clone(&inside));
                thread::spawn(move || {
                    let permit = block_on(limit.acquire(1));
                    assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0, "one place, one inside");
                    inside.fetch_sub(1, Ordering::Relaxed);
                    drop(permit);
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(limit.remaining(), 0, "everything was given back");
    });
}

#[test]
fn who_gives_up_waiting_leaves_no_trace() {
    model(|| {
        let limit = Limit::bytes(0);
        let held = block_on(limit.acquire(5));
        let waiter = {
            let limit = Arc::clone(&limit);
            // Polled once: admitted, or given up with its place in the line.
            thread::spawn(move || drop(limit.acquire(7).now_or_never()))
        };
        let giver = thread::spawn(move || drop(held));
        giver.join().unwrap();
        waiter.join().unwrap();
        assert_eq!(limit.remaining(), 0, "no bytes were lost");
        drop(block_on(limit.acquire(1)));
        assert_eq!(limit.remaining(), 0);
    });
}

#[test]
fn a_debt_holds_back_all_who_come_after() {
    model(|| {
        let limit = Limit::bytes(1);
        let large = block_on(limit.acquire(10));
        let threads: Vec<_> = [3, 4]
            .into_iter()
            .map(|bytes| {
                let limit = Arc::clone(&limit);
                thread::spawn(move || drop(block_on(limit.acquire(bytes))))
            })
            .collect();
        drop(large);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(limit.remaining(), 1);
    });
}
