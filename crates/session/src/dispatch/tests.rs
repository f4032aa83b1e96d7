//! Unit tests of [`Limit`] and [`Admission`].
//!
//! The tests are not in `limit.rs` and `admission.rs` because the model tests of the crate `tinkex`
//! compile these files a second time, with loom.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use serde_json::json;

use super::Admission;
use super::limit::Limit;
use crate::fixture;
use crate::task::Task;
use crate::transport::retry::shared_backoff::SharedBackoff;

#[tokio::test(start_paused = true)]
async fn limit_admits_in_the_same_order_as_the_python_sdk() {
    for case in fixture::cases("bytes_semaphore.json") {
        let limit = Limit::bytes(case["max"].as_u64().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let held = Arc::new(Mutex::new(HashMap::new()));
        let mut tasks = HashMap::new();
        for op in case["ops"].as_array().unwrap() {
            let name = op[1].as_str().unwrap().to_owned();
            match op[0].as_str().unwrap() {
                "acquire" => {
                    let bytes = op[2].as_u64().unwrap();
                    let limit = Arc::clone(&limit);
                    let log = Arc::clone(&log);
                    let held = Arc::clone(&held);
                    let owner = name.clone();
                    let task = Task::spawn(async move {
                        let permit = limit.acquire(bytes).await;
                        log.lock().unwrap().push(format!("in:{owner}"));
                        held.lock().unwrap().insert(owner, permit);
                    });
                    tasks.insert(name, task);
                }
                "release" => {
                    log.lock().unwrap().push(format!("out:{name}"));
                    let permit = held.lock().unwrap().remove(&name);
                    drop(permit.expect("a permit to release"));
                }
                _ => drop(tasks.remove(&name).expect("a task to cancel")),
            }
            // With a paused clock the sleep ends only after every runnable task has run.
            tokio::time::sleep(Duration::from_millis(1)).await;
            log.lock().unwrap().push(format!("budget={}", limit.remaining()));
        }
        assert_eq!(json!(*log.lock().unwrap()), case["log"], "{case}");
    }
}

/// Covers AUD.1.
#[tokio::test(start_paused = true)]
async fn a_recent_backoff_tightens_two_of_the_three_admission_limits() {
    const MAX_BYTES: u64 = 5_000_000;
    for case in fixture::cases("sampling_recent_backoff.json") {
        let backoff = Arc::new(SharedBackoff::new());
        if let Some(until) = case["backoff_until"].as_f64() {
            backoff.start(Duration::from_secs_f64(until));
        }
        tokio::time::advance(Duration::from_secs_f64(case["now"].as_f64().unwrap())).await;
        let admission = Admission::new(MAX_BYTES, backoff);
        let permit = admission.acquire(1000).now_or_never();
        let charged = i64::try_from(MAX_BYTES).unwrap() - admission.bytes_remaining();
        assert_eq!(json!(charged), json!(1000 * case["byte_multiplier"].as_i64().unwrap()));
        drop(permit.expect("the first request is admitted"));

        let throttled = case["throttled_semaphore_used"].as_bool().unwrap();
        let admitted = std::iter::from_fn(|| admission.acquire(0).now_or_never());
        let admitted: Vec<_> = admitted.take(1000).collect();
        assert_eq!(admitted.len(), if throttled { 10 } else { 400 }, "{case}");
        drop(admitted);

        let large = admission.acquire(MAX_BYTES + 1).now_or_never();
        assert!(large.is_some(), "a request above the budget is admitted alone");
        assert!(admission.acquire(0).now_or_never().is_none(), "the byte budget is used up");
    }
}

#[test]
fn concurrency_limit_admits_exactly_its_maximum() {
    let limit = Limit::concurrency(2);
    let first = limit.acquire(1).now_or_never();
    let second = limit.acquire(1).now_or_never();
    assert!(first.is_some() && second.is_some());
    assert!(limit.acquire(1).now_or_never().is_none());
    drop(first);
    assert!(limit.acquire(1).now_or_never().is_some(), "a cancelled waiter blocks the queue");
}

#[test]
fn maximum_amounts_do_not_overflow() {
    let limit = Limit::bytes(u64::MAX);
    let all = limit.acquire(u64::MAX).now_or_never();
    assert!(all.is_some());
    let more = limit.acquire(u64::MAX).now_or_never();
    assert!(more.is_some(), "the budget was not negative");
    assert!(limit.acquire(1).now_or_never().is_none());
    drop((all, more));
    assert!(limit.acquire(1).now_or_never().is_some());
}

#[test]
fn cancelled_waiters_behind_an_active_one_are_removed() {
    let limit = Limit::concurrency(1);
    let held = limit.acquire(1).now_or_never();
    let mut active = Box::pin(limit.acquire(1));
    assert!((&mut active).now_or_never().is_none());
    for _ in 0..10_000 {
        assert!(limit.acquire(1).now_or_never().is_none());
    }
    assert!(limit.queue_len() < 100, "{} waiters are queued", limit.queue_len());
    drop(held);
    assert!(active.now_or_never().is_some(), "the active waiter was not admitted");
}
