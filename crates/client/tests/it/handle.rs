//! Handles of sampling sessions, clones, and the batch poll.

use futures_util::future::join_all;
use serde_json::{Value, json};
use tinkex::{ErrorKind, SamplerHandle, SamplingClient, SamplingParams};
use tokio::time::{Duration, sleep};

use crate::numbered_server::NumberedServer;

fn params() -> SamplingParams {
    SamplingParams::new().max_tokens(1)
}

/// Covers X11, R-HOLD.
#[tokio::test(start_paused = true)]
async fn a_handle_contains_no_key() {
    let config = json!({"sample_max_concurrent_requests": 7, "pjwt_auth_enabled": false});
    let here = NumberedServer::new(config);
    let there = NumberedServer::new(json!({}));
    let service = here.builder().header("X-Team", "blue").build().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let text = sampler.handle().to_text();
    let handle = SamplerHandle::from_text(&text).unwrap();
    assert!(!serde_json::to_string(&handle).unwrap().contains("tml-"), "{handle:?}");
    assert_eq!(handle.holder.client_config.sample_max_concurrent_requests, 7);
    assert_eq!(handle.holder.default_headers_overrides.as_ref().unwrap()["X-Team"], "blue");

    let other = there.builder().api_key("tml-there").build().unwrap();
    let restored = other.restore_sampling_client(&handle).unwrap();
    assert!(there.requests("").is_empty(), "restoring sends nothing");
    restored.sample([1], params()).await.unwrap();
    let paths: Vec<String> = there.requests("").into_iter().map(|request| request.path).collect();
    assert_eq!(paths, ["/api/v1/asample", "/api/v1/retrieve_future"], "no session was created");
    assert_eq!(there.requests("/asample")[0].header("x-api-key"), Some("tml-there"));
    assert_eq!(there.requests("/asample")[0].json()["sampling_session_id"], "s:sample:0");
    sleep(Duration::from_secs(11)).await;
    assert_eq!(
        there.requests("/session_heartbeat").len(),
        1,
        "a restored session sends heartbeats"
    );

    let elsewhere = there.builder().base_url("http://elsewhere.test");
    let error = elsewhere.build().unwrap().restore_sampling_client(&handle).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let mut expected = handle;
    expected.holder = restored.handle().holder;
    assert_eq!(restored.handle(), expected);
}

/// Covers X12.
#[tokio::test(start_paused = true)]
async fn clones_use_distinct_sequence_ranges() {
    let server = NumberedServer::new(json!({"sample_join_sampling_session": true}));
    let service = server.builder().build().unwrap();
    let creator = service.create_sampling_client("base").await.unwrap();
    let handle = creator.handle();
    let one = service.restore_sampling_client(&handle).unwrap();
    let two = service.restore_sampling_client(&handle).unwrap();
    creator.sample([1], params()).await.unwrap();
    assert!(server.requests("/join_sampling_session").is_empty(), "the creator is clone 0");
    let samples = [&one, &one, &two].map(|client: &SamplingClient| client.sample([1], params()));
    for response in join_all(samples).await {
        response.unwrap();
    }
    let mut received = server.sequence_numbers("/asample");
    received.sort_unstable();
    assert_eq!(received, [0, 1_000_000_000, 1_000_000_001, 2_000_000_000]);
    assert_eq!(server.requests("/join_sampling_session").len(), 2, "each joins once");
    assert_eq!(server.requests("/create_session").len(), 1, "the existing session is used");
}

/// Covers X12.
#[tokio::test(start_paused = true)]
async fn a_clone_chooses_a_random_range_if_the_server_assigns_none() {
    let server = NumberedServer::new(json!({}));
    let service = server.builder().build().unwrap();
    let creator = service.create_sampling_client("base").await.unwrap();
    let clone = service.restore_sampling_client(&creator.handle()).unwrap();
    for _ in 0..2 {
        clone.sample([1], params()).await.unwrap();
    }
    let received = server.sequence_numbers("/asample");
    assert!(
        received[0] >= 1_000_000_000 && received[0].is_multiple_of(1_000_000_000),
        "{received:?}"
    );
    assert_eq!(received[1], received[0] + 1);
}

/// Covers R-POLL.
#[tokio::test(start_paused = true)]
async fn one_batch_poll_announces_all_samples_and_reports_retrieved_results() {
    let server = NumberedServer::new(json!({
        "sample_use_retrieve_futures": true, "sample_max_concurrent_requests": 1,
    }));
    let sampler = server.sampler().await;
    let samples = (0..50).map(|_| sampler.sample([1, 2], params()));
    for response in join_all(samples).await {
        assert_eq!(response.unwrap().sequences[0].tokens[..], [7]);
    }
    sleep(Duration::from_secs(1)).await;
    assert_eq!(server.requests("/asample").len(), 50);
    let polls = server.requests("/retrieve_future");
    assert_eq!(polls.len(), 50, "each result is retrieved once, after its announcement");
    assert!(polls.iter().all(|poll| poll.json()["allow_metadata_only"] == false));
    let batch_polls: Vec<Value> =
        server.requests("/retrieve_futures").iter().map(|request| request.json()).collect();
    assert!(batch_polls.len() < 10, "{} batch polls for 50 samples", batch_polls.len());
    let reported: usize = batch_polls
        .iter()
        .map(|poll| poll["retrieved_request_ids"].as_array().unwrap().len())
        .sum();
    assert_eq!(reported, 50);
    assert_eq!(batch_polls[0]["target"]["type"], "sampling_session");
    drop(sampler);
    let polls = server.requests("/retrieve_futures").len();
    sleep(Duration::from_secs(300)).await;
    assert_eq!(server.requests("/retrieve_futures").len(), polls, "polling ends with the client");
}

#[test]
fn restoring_a_handle_outside_a_runtime_is_an_error() {
    let server = NumberedServer::new(json!({}));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (service, handle) = runtime.block_on(async {
        let service = server.builder().build().unwrap();
        let handle = service.create_sampling_client("base").await.unwrap().handle();
        (service, handle)
    });
    let error = service.restore_sampling_client(&handle).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
}
