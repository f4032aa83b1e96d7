//! Limits lose no wake-up and leak no permit.

use std::sync::Arc;

use futures_util::FutureExt as _;
use loom::future::block_on;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use crate::dispatch::limit::Limit;
use crate::model;

#[test]
fn concurrency_limit_is_kept_and_no_waiter_is_lost() {
    model(|| {
        let limit = Limit::concurrency(1);
        let active = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let limit = Arc::clone(&limit);
                let active = Arc::clone(&active);
                thread::spawn(move || {
                    let permit = block_on(limit.acquire(1));
                    assert_eq!(active.fetch_add(1, Ordering::Relaxed), 0, "the limit is 1");
                    active.fetch_sub(1, Ordering::Relaxed);
                    drop(permit);
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(limit.remaining(), 0, "a permit leaked");
    });
}

#[test]
fn cancelled_waiter_leaks_no_permit() {
    model(|| {
        let limit = Limit::bytes(0);
        let held = block_on(limit.acquire(5));
        let waiter = {
            let limit = Arc::clone(&limit);
            // Polled once: either admitted or cancelled while waiting.
            thread::spawn(move || drop(limit.acquire(7).now_or_never()))
        };
        let releaser = thread::spawn(move || drop(held));
        releaser.join().unwrap();
        waiter.join().unwrap();
        assert_eq!(limit.remaining(), 0, "bytes leaked");
        drop(block_on(limit.acquire(1)));
        assert_eq!(limit.remaining(), 0);
    });
}

#[test]
fn negative_budget_blocks_later_requests() {
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
