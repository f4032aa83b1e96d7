//! Backoffs that start concurrently, and admission during a backoff.

use std::sync::Arc;
use std::time::Duration;

use loom::future::block_on;
use loom::thread;

use crate::dispatch::admission::Admission;
use crate::model;
use crate::transport::retry::shared_backoff::SharedBackoff;

const SHORT: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(60);

#[test]
fn longer_of_two_concurrent_backoffs_wins() {
    model(|| {
        let backoff = Arc::new(SharedBackoff::new());
        let other = Arc::clone(&backoff);
        let thread = thread::spawn(move || other.start(SHORT));
        backoff.start(LONG);
        thread.join().unwrap();
        assert!(backoff.remaining() > SHORT);
    });
}

#[test]
fn backoff_during_admission_leaks_no_permit() {
    model(|| {
        let backoff = Arc::new(SharedBackoff::new());
        let admission = Arc::new(Admission::with_limits(1, 1, 0, Arc::clone(&backoff)));
        let other = Arc::clone(&admission);
        let thread = thread::spawn(move || drop(block_on(other.acquire(3))));
        backoff.start(LONG);
        drop(block_on(admission.acquire(5)));
        thread.join().unwrap();
        // Succeeds only if the permits of all three limits were released.
        drop(block_on(admission.acquire(1)));
    });
}
