//! Tests of the queue: order by sequence number, gaps, retries after faults, and limits.

use tinkex_store::clock::{ManualClocks, TICK};

use super::*;

/// A queue of operations and samples without content.
type TestQueue = Queue<(), ()>;

fn queue() -> TestQueue {
    let clock = Clock::resume(ManualClocks::new(0, "boot", 0), None, None);
    Queue::new(Duration::from_secs(60), clock)
}

fn request(model: &str, seq: u64) -> QueuedOperation<()> {
    request_of("user", "session", model, seq)
}

fn request_of(user: &str, session: &str, model: &str, seq: u64) -> QueuedOperation<()> {
    let id = format!("{model}{seq}").into();
    let account = Account { owner: user.to_owned().into(), session: session.into() };
    let model = model.into();
    QueuedOperation { id, bytes: 10, starts: None, account, model, seq, operation: () }
}

fn take_id(queue: &TestQueue) -> Option<String> {
    queue.try_take(true).0.model_request.map(|request| request.id.as_str().to_owned())
}

#[test]
fn requests_run_in_order_of_sequence_numbers() {
    let queue = queue();
    for seq in [2, 3, 1] {
        assert!(queue.push(request("m", seq)).is_ok());
        assert_eq!(take_id(&queue), None, "0 is missing");
    }
    assert_eq!(queue.missing(&"m".into(), 3), Some(0));
    assert!(queue.push(request("m", 0)).is_ok());
    assert_eq!(queue.size(), (4, 40));
    let all: Vec<_> = std::iter::from_fn(|| take_id(&queue)).collect();
    assert_eq!(all, ["m0", "m1", "m2", "m3"]);
    assert_eq!(queue.size(), (0, 0));
    assert!(queue.push(request("m", 2)).is_err(), "2 was already dispatched");
}

#[tokio::test(start_paused = true)]
async fn a_gap_that_never_fills_is_skipped() {
    let queue = queue();
    assert!(queue.push(request("m", 0)).is_ok());
    assert!(queue.push(request("m", 2)).is_ok());
    assert_eq!(take_id(&queue).unwrap(), "m0");
    for _ in 0..60 {
        assert_eq!(take_id(&queue), None);
        tokio::time::advance(TICK).await;
        queue.clock.tick();
    }
    assert_eq!(take_id(&queue).unwrap(), "m2");
    let Err(LateRequest(late)) = queue.push(request("m", 1)) else {
        panic!("1 was skipped");
    };
    assert_eq!(late, "m1");
}

/// After SIGCONT the worker may look at the queue before the server has read the missing request.
#[tokio::test(start_paused = true)]
async fn a_gap_is_not_skipped_because_the_process_was_stopped() {
    let queue = queue();
    assert!(queue.push(request("m", 1)).is_ok());
    tokio::time::advance(Duration::from_secs(3_600)).await;
    assert_eq!(take_id(&queue), None);
    assert!(queue.push(request("m", 0)).is_ok());
    assert_eq!(take_id(&queue).unwrap(), "m0");
    assert_eq!(take_id(&queue).unwrap(), "m1");
}

#[tokio::test(start_paused = true)]
async fn a_fault_stops_the_queue_of_its_model_only() {
    let queue = queue();
    for (model, seq) in [("a", 0), ("a", 1), ("b", 0)] {
        assert!(queue.push(request(model, seq)).is_ok());
    }
    let faulty = queue.try_take(true).0.model_request.unwrap();
    assert_eq!(faulty.id, "a0");
    let retry_at = Instant::now() + Duration::from_secs(3);
    queue.put_back(faulty, retry_at, "no files left".to_owned());
    assert_eq!((queue.size(), queue.next_of(&"a".into())), ((3, 30), 0));
    assert_eq!(queue.fault(&"a".into()).unwrap(), "no files left");
    assert_eq!(take_id(&queue).unwrap(), "b0");
    assert_eq!(take_id(&queue), None, "a1 waits for a0");
    // The worker sleeps until the next attempt.
    let dispatch = queue.take(true, Some(Duration::from_secs(10))).await;
    assert_eq!(dispatch.model_request.unwrap().id, "a0");
    assert!(Instant::now() >= retry_at && queue.fault(&"a".into()).is_none());
    assert_eq!(take_id(&queue).unwrap(), "a1");
    assert_eq!(queue.size(), (0, 0));
}

#[test]
fn waiting_requests_can_be_taken_at_once() {
    let queue = queue();
    for seq in [0, 1, 3] {
        assert!(queue.push(request("a", seq)).is_ok());
    }
    assert_eq!(queue.take_waiting(&"a".into()), ["a0", "a1", "a3"]);
    assert_eq!((queue.size(), queue.next_of(&"a".into())), ((0, 0), 4));
    assert!(queue.push(request("a", 4)).is_ok());
    assert_eq!(take_id(&queue).unwrap(), "a4");
    assert!(queue.take_waiting(&"b".into()).is_empty());
}

#[test]
fn a_rejected_number_leaves_no_gap() {
    let queue = queue();
    assert!(queue.push(request("m", 0)).is_ok());
    assert!(queue.push(request("m", 3)).is_ok());
    assert_eq!(take_id(&queue).unwrap(), "m0");
    queue.reject(&"m".into(), 2);
    assert_eq!(take_id(&queue), None, "1 is missing");
    assert_eq!(queue.missing(&"m".into(), 3), Some(1));
    assert!(queue.push(request("m", 1)).is_ok());
    assert_eq!(take_id(&queue).unwrap(), "m1");
    assert_eq!(take_id(&queue).unwrap(), "m3");
}

#[test]
fn a_sample_counts_until_it_is_finished() {
    let queue = queue();
    queue.push_sample(QueuedSample { id: "r".into(), bytes: 10, starts: None, sample: () });
    let samples = queue.try_take(true).0.samples;
    assert_eq!((samples.len(), queue.size()), (1, (1, 10)));
    queue.sample_finished(samples[0].bytes);
    assert_eq!(queue.size(), (0, 0));
}

#[test]
fn models_are_served_round_robin() {
    let queue = queue();
    for seq in 0..3 {
        for model in ["a", "b"] {
            assert!(queue.push(request(model, seq)).is_ok());
        }
    }
    let all: Vec<_> = std::iter::from_fn(|| take_id(&queue)).collect();
    assert_eq!(all, ["a0", "b0", "a1", "b1", "a2", "b2"]);
}

#[test]
fn dropping_a_model_returns_its_queued_requests() {
    let queue = queue();
    assert!(queue.push(request("a", 1)).is_ok());
    assert!(queue.push(request("b", 0)).is_ok());
    assert_eq!(queue.drop_model(&"a".into()), ["a1"]);
    assert_eq!(queue.size(), (1, 10));
    assert_eq!(take_id(&queue).unwrap(), "b0");
}

/// Takes `count` requests. Returns the names of their models, whose first letter is the user.
fn served(queue: &TestQueue, count: usize) -> Vec<String> {
    let requests = (0..count).map(|_| queue.try_take(true).0.model_request.unwrap());
    requests.map(|request| request.model.as_str().to_owned()).collect()
}

#[test]
fn users_get_equal_shares_however_many_models_and_sessions_they_have() {
    let queue = queue();
    for model in 0..20 {
        for seq in 0..10 {
            let session = format!("session {}", model % 5);
            assert!(queue.push(request_of("a", &session, &format!("a{model}"), seq)).is_ok());
        }
    }
    for seq in 0..10 {
        assert!(queue.push(request_of("b", "session", "b", seq)).is_ok());
    }
    let served = served(&queue, 20);
    assert_eq!(served.iter().filter(|model| *model == "b").count(), 10);
    let first: std::collections::HashSet<_> = served.iter().collect();
    assert_eq!(first.len(), 11, "ten different models of a are served, and b: {served:?}");
}

#[test]
fn a_large_pass_counts_for_more_than_a_small_one() {
    let queue = queue();
    for seq in 0..10 {
        let large = QueuedOperation { bytes: 9 * REQUEST_COST, ..request_of("a", "s", "a", seq) };
        let small = QueuedOperation { bytes: 0, ..request_of("b", "s", "b", seq) };
        assert!(queue.push(large).is_ok() && queue.push(small).is_ok());
    }
    let served = served(&queue, 11);
    assert_eq!(served.iter().filter(|model| *model == "a").count(), 1, "{served:?}");
}

#[test]
fn a_user_whose_request_waits_for_a_missing_number_does_not_block_others() {
    let queue = queue();
    assert!(queue.push(request_of("a", "s", "a", 1)).is_ok());
    assert!(queue.push(request_of("b", "s", "b", 0)).is_ok());
    assert_eq!(served(&queue, 1), ["b"]);
    assert!(queue.push(request_of("a", "s", "a", 0)).is_ok());
    assert_eq!(served(&queue, 2), ["a", "a"]);
    assert!(queue.lock().round_robin.is_empty());
}

#[test]
fn later_requests_of_a_busy_model_wait_and_other_models_continue() {
    let queue = queue();
    for model in ["m", "n"] {
        for seq in 0..2 {
            assert!(queue.push(request(model, seq)).is_ok());
        }
    }
    assert_eq!(take_id(&queue).unwrap(), "m0");
    queue.hold(&"m".into(), 10);
    assert_eq!(queue.size(), (4, 40), "the held request still counts");
    let others: Vec<_> = std::iter::from_fn(|| take_id(&queue)).collect();
    assert_eq!(others, ["n0", "n1"]);
    queue.release(&"m".into(), 10);
    assert_eq!(take_id(&queue).unwrap(), "m1");
    assert_eq!(queue.size(), (0, 0));
}

#[test]
fn a_model_that_was_dropped_while_busy_can_be_released() {
    let queue = queue();
    assert!(queue.push(request("m", 0)).is_ok());
    assert_eq!(take_id(&queue).unwrap(), "m0");
    queue.hold(&"m".into(), 10);
    assert!(queue.drop_model(&"m".into()).is_empty());
    queue.release(&"m".into(), 10);
    assert_eq!(queue.size(), (0, 0));
}
