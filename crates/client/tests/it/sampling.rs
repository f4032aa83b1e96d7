//! Sampling client: shared backoff, resubmission, cancellation and timeouts.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tinkex::wire::{ImageFormat, InputChunk};
use tinkex::{
    CallOptions, ErrorKind, ModelInput, SampleOptions, SamplingClient, SamplingParams,
    ServiceClientBuilder, TensorData,
};
use tokio::time::{Instant, sleep};

use crate::numbered_server::{NumberedServer, cases, sample_output};

fn params() -> SamplingParams {
    SamplingParams::new()
}

/// Returns a prompt whose estimated size is `bytes`.
pub(crate) fn prompt_of(bytes: usize) -> ModelInput {
    let data = vec![0; bytes].into();
    let format = ImageFormat::Png;
    ModelInput::default().chunk(InputChunk::Image { data, format, expected_tokens: None })
}

async fn sampler(builder: ServiceClientBuilder) -> SamplingClient {
    builder.build().unwrap().create_sampling_client("base").await.unwrap()
}

/// Covers AUD.2, P4C.5.
#[tokio::test(start_paused = true)]
async fn backoff_delays_equal_those_of_the_python_sdk() {
    for case in cases("sampling_backoff.json") {
        let server = NumberedServer::new(json!({}));
        let sampler = server.sampler().await;
        server.samples(case["script"].as_array().unwrap().clone());
        let start = server.now();
        let mut result = Ok(());
        for _ in 0..case["samples"].as_u64().unwrap() {
            let bytes = usize::try_from(case["estimated_bytes"].as_u64().unwrap()).unwrap();
            let prompt = prompt_of(bytes);
            result = sampler.sample(prompt, params()).await.map(drop);
        }
        match case["result"].as_str().unwrap() {
            "ok" => result.unwrap(),
            _ => assert_eq!(result.unwrap_err().kind(), ErrorKind::Rejected),
        }
        let posts: Vec<Value> = server
            .requests("/asample")
            .iter()
            .zip(case["script"].as_array().unwrap())
            .map(|(request, outcome)| {
                assert_eq!(request.header("x-tinker-sampling-backpressure"), Some("1"));
                json!([(request.at - start).as_secs_f64(), request.json()["seq_id"], outcome])
            })
            .collect();
        assert_eq!(json!(posts), case["posts_time_seq_outcome"], "{case}");
    }
}

/// Covers T4.2.4, P6B.2.
#[tokio::test(start_paused = true)]
async fn concurrent_samples_are_limited_as_in_the_python_sdk() {
    const SUBMITTED_LATER: Duration = Duration::from_millis(500);
    const BACKOFF_END: Duration = Duration::from_millis(1250);
    for case in cases("sampling_concurrency.json") {
        let server = NumberedServer::new(json!({}));
        let sampler = server.sampler().await;
        let expected = case["posts_time_seq_outcome"].as_array().unwrap();
        server.samples(expected.iter().map(|post| post[2].clone()).collect());
        let latency = Duration::from_secs_f64(case["response_seconds"].as_f64().unwrap());
        server.delay("/asample", latency);
        let bytes = usize::try_from(case["estimated_bytes"].as_u64().unwrap()).unwrap();
        let start = server.now();
        let mut samples = Vec::new();
        for submitted in case["submitted"].as_array().unwrap() {
            let time = Duration::from_secs_f64(submitted[0].as_f64().unwrap());
            sleep(start + time - server.now()).await;
            for _ in 0..submitted[1].as_u64().unwrap() {
                samples.push(sampler.sample(prompt_of(bytes), params()));
            }
            tokio::task::yield_now().await;
        }
        for sample in join_all(samples).await {
            sample.unwrap();
        }
        let requests = server.requests("/asample");
        let mut posts: Vec<(Duration, u64)> = requests
            .iter()
            .map(|request| (request.at - start, request.json()["seq_id"].as_u64().unwrap()))
            .collect();
        posts.sort();
        let expected: Vec<(Duration, u64)> = expected
            .iter()
            .map(|post| {
                let at = Duration::from_secs_f64(post[0].as_f64().unwrap());
                // The Python SDK looks once per second whether the backoff is over.
                let waits = case["id"] == "submitted_during_the_backoff" && at > SUBMITTED_LATER;
                (if waits { BACKOFF_END } else { at }, post[1].as_u64().unwrap())
            })
            .collect();
        assert_eq!(posts, expected, "{}", case["id"]);
    }
}

/// Covers T4.2.4, T4.2.5, P6B.2.
#[tokio::test(start_paused = true)]
async fn concurrent_samples_wait_for_the_retry_after_of_a_429() {
    for (header, value, wait) in [
        ("retry-after", "7", Duration::from_secs(7)),
        ("retry-after-ms", "250", Duration::from_millis(250)),
    ] {
        let limited = json!({"status": 429, header: value});
        let server = NumberedServer::new(json!({}));
        let sampler = server.sampler().await;
        let mut outcomes = vec![json!("ok"); 10];
        outcomes.push(limited.clone());
        server.samples(outcomes);
        let start = server.now();
        let burst: Vec<_> = (0..50).map(|_| sampler.sample([1], params())).collect();
        tokio::task::yield_now().await;
        assert_eq!(sampler.backoff_remaining(), Some(wait), "{header}");
        for sample in join_all(burst).await {
            sample.unwrap();
        }
        let times: Vec<_> =
            server.requests("/asample").iter().map(|request| request.at - start).collect();
        assert_eq!(times.len(), 51);
        assert!(times[..11].iter().all(Duration::is_zero), "{header}: {times:?}");
        assert!(times[11..].iter().all(|time| *time >= wait), "{header}: {times:?}");

        // The sample gives up if the server's time exceeds its own, or without retries.
        for policy in [CallOptions::without_retries(), CallOptions::new().give_up_after(wait / 2)] {
            sleep(Duration::from_secs(60)).await;
            server.samples(vec![limited.clone()]);
            let hurried = sampler.with_options(policy);
            let error = hurried.sample([1], params()).await.unwrap_err();
            assert_eq!((error.kind(), error.attempts()), (ErrorKind::RateLimited, 1));
            assert_eq!(error.retry_after(), Some(wait), "{header}");
            let start = Instant::now();
            sampler.sample([1], params()).await.unwrap();
            assert_eq!(start.elapsed(), wait, "the next call waits");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn without_retries_a_429_fails_the_sample_and_delays_the_next() {
    let server = NumberedServer::new(json!({}));
    let sampler = sampler(server.builder().options(CallOptions::without_retries())).await;
    server.samples(vec![json!(429)]);
    let error = sampler.sample([1], params()).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::RateLimited, 1));
    let start = Instant::now();
    sampler.sample([1], params()).await.unwrap();
    assert_eq!(start.elapsed(), Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn sample_no_retries_disables_resubmission_but_not_backoff() {
    let server = NumberedServer::new(json!({"sample_no_retries": true}));
    let sampler = server.sampler().await;
    server.samples(vec![json!(429)]);
    sampler.sample([1], params()).await.unwrap();
    server.respond("q1", vec![json!(410)]);
    let expired = sampler.sample([1], params()).await.unwrap_err();
    assert_eq!(expired.kind(), ErrorKind::Expired, "the sample was resubmitted");
    server.respond("q2", vec![json!(410)]);
    let missing = sampler.compute_logprobs([1]).await.unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Decode, "the request was not resubmitted");
    assert_eq!(server.requests("/asample").len(), 5);
}

#[tokio::test(start_paused = true)]
async fn backoff_follows_retry_after_up_to_a_maximum() {
    let server = NumberedServer::new(json!({}));
    let sampler = server.sampler().await;
    for (retry_after, expected) in [("7", 7), ("3600", 1)] {
        server.samples(vec![json!({"status": 429, "retry-after": retry_after})]);
        let start = Instant::now();
        sampler.sample([1], params()).await.unwrap();
        assert_eq!(start.elapsed(), Duration::from_secs(expected));
    }
}

/// Covers T4.2.5, P6B.2.
#[tokio::test(start_paused = true)]
async fn concurrent_samples_all_succeed_despite_failures() {
    let server = NumberedServer::new(json!({}));
    let sampler = server.sampler().await;
    let outcomes = [json!("ok"), json!(429), json!("conn"), json!(503), json!("ok")];
    server.samples(outcomes.iter().cycle().take(100).cloned().collect());
    let samples =
        (0..100).map(|_| sampler.sample([1, 2], SampleOptions::new(params()).num_samples(1)));
    for (i, response) in join_all(samples).await.into_iter().enumerate() {
        let response = response.unwrap_or_else(|error| panic!("sample {i}: {error}"));
        assert_eq!(response.sequences[0].tokens[..], [7]);
        assert!(response.sequences[0].sequence_id.is_some());
    }
    let mut numbers = server.sequence_numbers("/asample");
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers, (0..100).collect::<Vec<_>>(), "a retry must keep its sequence number");
}

/// Covers P4C.6, P6B.5, P6C.1, P6C.2.
#[tokio::test(start_paused = true)]
async fn backoff_is_shared_per_server_and_api_key() {
    let server = NumberedServer::new(json!({}));
    // Clones of a builder share the backoffs of its HTTP service.
    let builder = server.builder();
    let limited = sampler(builder.clone()).await;
    let sibling = sampler(builder.clone()).await;
    let other_key = sampler(builder.clone().api_key("tml-other")).await;
    let other_server = sampler(builder.base_url("http://other.test")).await;
    server.samples(vec![json!(429)]);
    let start = Instant::now();
    let first = limited.sample(prompt_of(200_000), params());
    sleep(Duration::from_millis(10)).await;
    for free in [other_key, other_server] {
        for sample in join_all((0..100).map(|_| free.sample([1], params()))).await {
            sample.unwrap();
        }
        assert_eq!(start.elapsed(), Duration::from_millis(10), "it must not wait");
    }
    sibling.sample([1], params()).await.unwrap();
    assert_eq!(
        start.elapsed(),
        Duration::from_secs(5),
        "a client of the same server and key must wait"
    );
    first.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn expired_sample_is_resubmitted_under_a_new_number() {
    let server = NumberedServer::new(json!({}));
    let sampler = server.sampler().await;
    server.respond("q0", vec![json!(410)]);
    sampler.sample([1], params()).await.unwrap();
    let numbers = server.sequence_numbers("/asample");
    assert_eq!(numbers, [0, 1], "the resubmission needs a new number");

    server.respond("q2", vec![json!({"error": "bad prompt", "category": "user"})]);
    let error = sampler.sample([1], params()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WorkFailed);
    assert!(error.is_user_error());
    assert_eq!(server.requests("/asample").len(), 3, "a failed sample was resubmitted");
}

/// Covers T6.1.3, X10.
#[tokio::test(start_paused = true)]
async fn unnamed_weights_can_be_sampled_from() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    server.respond("r1", vec![json!({"path": null, "sampling_session_id": "s:sample:9"})]);
    server.lose_once("save_weights_for_sampler");
    let sampler = model.save_weights_and_get_sampling_client().await.unwrap();
    let saves: Vec<_> =
        server.requests("/save_weights_for_sampler").iter().map(|request| request.json()).collect();
    assert_eq!(saves.len(), 2);
    assert_eq!(saves[0], saves[1], "a retry must name the same sampling session");
    assert_eq!(saves[0].get("path"), None);
    sampler.sample([1], params()).await.unwrap();
    let sample = server.requests("/asample").pop().unwrap().json();
    assert_eq!(sample["sampling_session_id"], "s:sample:9");
}

#[tokio::test(start_paused = true)]
async fn a_failed_cancellation_is_not_repeated() {
    let server = NumberedServer::new(json!({}));
    server.dynamic_config(json!({"sample_cancel_enabled": true}));
    let sampler = server.sampler().await;
    server.respond("q0", vec![json!("conn")]);
    let waiting = sampler.sample([1], params());
    sleep(Duration::from_secs(5)).await;
    server.lose_once("/cancel_future");
    drop(waiting);
    sleep(Duration::from_secs(600)).await;
    assert_eq!(server.requests("/cancel_future").len(), 1);
}

/// Covers X13.
#[tokio::test(start_paused = true)]
async fn dropped_sample_is_cancelled_if_the_server_supports_it() {
    for enabled in [false, true] {
        let server = NumberedServer::new(json!({}));
        server.dynamic_config(json!({"sample_cancel_enabled": enabled}));
        let sampler = server.sampler().await;
        server.respond("q0", vec![json!("conn")]);
        let waiting = sampler.sample([1], params());
        sleep(Duration::from_secs(5)).await;
        drop(waiting);
        sampler.sample([1], params()).await.unwrap();
        sleep(Duration::from_secs(1)).await;
        let cancelled: Vec<_> = server
            .requests("/cancel_future")
            .iter()
            .map(|request| request.json()["request_id"].clone())
            .collect();
        let expected = if enabled { json!(["q0"]) } else { json!([]) };
        assert_eq!(json!(cancelled), expected, "only the dropped sample may be cancelled");
        let polls = server.requests("/retrieve_future").len();
        sleep(Duration::from_secs(60)).await;
        assert_eq!(
            server.requests("/retrieve_future").len(),
            polls,
            "polling continued after the drop"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn sample_past_its_poll_timeout_fails_and_is_cancelled() {
    let server = NumberedServer::new(json!({}));
    server.dynamic_config(json!({"sample_cancel_enabled": true}));
    let options = CallOptions::new().poll_timeout(Duration::from_secs(60));
    let options = options.progress_timeout(Duration::MAX);
    let sampler = sampler(server.builder().options(options)).await;
    server.respond("q0", vec![json!("hang")]);
    let start = Instant::now();
    let error = sampler.sample([1], params()).await.unwrap_err();
    assert_eq!((error.kind(), start.elapsed().as_secs()), (ErrorKind::Timeout, 60));
    assert!(!error.is_retryable());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(server.requests("/asample").len(), 1, "the sample was resubmitted");
    assert_eq!(server.requests("/cancel_future").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn sample_fails_after_the_progress_timeout() {
    let server = NumberedServer::new(json!({}));
    let sampler = server.sampler().await;
    server.respond("q0", vec![json!("conn")]);
    let start = Instant::now();
    let error = sampler.sample([1], params()).await.unwrap_err();
    assert_eq!((error.kind(), start.elapsed().as_secs()), (ErrorKind::Connect, 7200));
}

#[tokio::test(start_paused = true)]
async fn invalid_input_is_rejected_before_sending() {
    let server = NumberedServer::new(json!({}));
    let sampler = server.sampler().await;
    let nan = sampler.sample([1], params().temperature(f64::NAN)).await.unwrap_err();
    assert_eq!(nan.kind(), ErrorKind::InvalidInput);
    let vector = TensorData::from(vec![1_i64, 2]);
    let vector =
        sampler.sample([1], SampleOptions::new(params()).target_prompt_logprobs(vector)).await;
    assert_eq!(vector.unwrap_err().kind(), ErrorKind::InvalidInput);
    assert!(server.requests("/asample").is_empty());

    let service = server.builder().build().unwrap();
    let wrong = "tinker://r/weights/a";
    let error = service.create_sampling_client_from(wrong).await.unwrap_err();
    assert!(error.hint().unwrap().as_str().contains("save_weights_for_sampler"));
}

#[tokio::test(start_paused = true)]
async fn compute_logprobs_requests_prompt_logprobs() {
    let server = NumberedServer::new(json!({}));
    let sampler = server.sampler().await;
    let response =
        tinkex::SampleResponse::default().prompt_logprobs(Some(vec![f32::NAN, -0.5].into()));
    // The submit response announces one sequence, so the result must hold one.
    let response = response.sequences(vec![Default::default()]);
    server.respond("q0", vec![sample_output(&response)]);
    let logprobs = sampler.compute_logprobs([5, 6]).await.unwrap();
    assert_eq!(logprobs.iter().collect::<Vec<_>>(), [None, Some(-0.5)]);
    let sent = server.requests("/asample").pop().unwrap().json();
    assert_eq!(
        (&sent["sampling_params"]["max_tokens"], &sent["prompt_logprobs"]),
        (&json!(1), &json!(true))
    );
    let missing = sampler.compute_logprobs([5, 6]).await.unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Decode);
}
