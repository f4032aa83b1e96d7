//! Apart from the files they test, because `tests/model` compiles those too.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use serde_json::json;

use super::limit::Limit;
use crate::fixture;
use crate::task::Task;

#[tokio::test(start_paused = true)]
async fn requests_are_admitted_as_in_the_reference() {
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
                    let (limit, log) = (Arc::clone(&limit), Arc::clone(&log));
                    let (held, owner) = (Arc::clone(&held), name.clone());
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
            // Everything that can run has run before the clock moves.
            tokio::time::sleep(Duration::from_millis(1)).await;
            log.lock().unwrap().push(format!("budget={}", limit.left()));
        }
        assert_eq!(json!(*log.lock().unwrap()), case["log"], "{case}");
    }
}

#[test]
fn places_are_counted() {
    let limit = Limit::concurrency(2);
    let (one, two) = (limit.acquire(1).now_or_never(), limit.acquire(1).now_or_never());
    assert!(one.is_some() && two.is_some());
    assert!(limit.acquire(1).now_or_never().is_none());
    drop(one);
    assert!(limit.acquire(1).now_or_never().is_some(), "the one who gave up waiting is forgotten");
}

#[test]
fn absurd_amounts_overflow_nothing() {
    let limit = Limit::bytes(u64::MAX);
    let all = limit.acquire(u64::MAX).now_or_never();
    assert!(all.is_some());
    let more = limit.acquire(u64::MAX).now_or_never();
    assert!(more.is_some(), "nothing was owed");
    assert!(limit.acquire(1).now_or_never().is_none());
    drop((all, more));
    assert!(limit.acquire(1).now_or_never().is_some());
}

#[test]
fn those_who_gave_up_behind_somebody_who_waits_are_forgotten() {
    let limit = Limit::concurrency(1);
    let held = limit.acquire(1).now_or_never();
    let mut patient = Box::pin(limit.acquire(1));
    assert!((&mut patient).now_or_never().is_none());
    for _ in 0..10_000 {
        assert!(limit.acquire(1).now_or_never().is_none());
    }
    assert!(limit.in_line() < 100, "{} are remembered", limit.in_line());
    drop(held);
    assert!(patient.now_or_never().is_some(), "and whoever waits still gets a place");
}
