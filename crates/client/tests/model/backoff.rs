//! Pauses that begin at the same time, and the admission behind them.

use std::sync::Arc;
use std::time::Duration;

use loom::future::block_on;
use loom::thread;

use crate::dispatch::admission::Admission;
use crate::model;
use crate::transport::backoff::Backoff;

const SHORT: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(60);

#[test]
fn the_longer_of_two_pauses_counts() {
    model(|| {
        let backoff = Arc::new(Backoff::new());
        let other = Arc::clone(&backoff);
        let start = tokio::time::Instant::now();
        let there = thread::spawn(move || other.start(SHORT));
        backoff.start(LONG);
        there.join().unwrap();
        assert!(backoff.until().unwrap() >= start + LONG);
    });
}

#[test]
fn a_pause_that_begins_while_others_enter_leaks_no_pass() {
    model(|| {
        let backoff = Arc::new(Backoff::new());
        let admission = Arc::new(Admission::with_limits(1, 1, 0, Arc::clone(&backoff)));
        let other = Arc::clone(&admission);
        let there = thread::spawn(move || drop(block_on(other.acquire(3))));
        backoff.start(LONG);
        drop(block_on(admission.acquire(5)));
        there.join().unwrap();
        // All three layers are free again.
        drop(block_on(admission.acquire(1)));
    });
}
