//! Scenarios of `docs/scenarios.md` that no other file covers.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use tinkex::SampledSequence;
use tinkex::{
    AdamParams, CallOptions, Datum, Env, LossFn, MetricValue, SampleOptions, SampleResponse,
    SamplingClient, SamplingParams, ServiceClient, StopReason,
};
use tokio::time::sleep;

use crate::numbered_server::{NumberedServer, pass_output, passes, sample_output};
use crate::sampling::prompt_of;
use crate::scripted_server::ScriptedServer;

fn batch(n: usize) -> Vec<Datum> {
    vec![Datum::completion([1, 2], [3]).unwrap(); n]
}

/// Covers T4.1.4.
#[tokio::test(start_paused = true)]
async fn metrics_of_several_chunks_are_combined_by_their_suffix() {
    let server = NumberedServer::new(json!({"fwdbwd_max_chunk_len": 3}));
    let model = server.model().await;
    let names =
        ["loss:sum", "low:min", "high:max", "rate:mean", "gap:slack", "host:unique", "bare"];
    let chunk = |n: usize, value: f64| {
        let mut metrics = names.map(|name| (name, value)).to_vec();
        metrics.push(("digest:hash2", 7.0));
        if n == 3 {
            metrics.push(("only_in_the_first:sum", 1.0));
        }
        pass_output(&vec![vec![-1.0]; n], &metrics)
    };
    // Three examples with the value 2, and one with the value 10.
    server.respond("r1", vec![chunk(3, 2.0)]);
    server.respond("r2", vec![chunk(1, 10.0)]);
    let output = model.forward_backward(batch(4), LossFn::CrossEntropy).await.unwrap();
    let number = |name: &str| match output.metrics.get(name) {
        Some(MetricValue::Number(number)) => Some(*number),
        _ => None,
    };
    assert_eq!(number("loss:sum"), Some(12.0));
    assert_eq!(number("low:min"), Some(2.0));
    assert_eq!(number("high:max"), Some(10.0));
    assert_eq!(number("rate:mean"), Some(4.0), "weighted by the number of examples");
    assert_eq!(number("gap:slack"), Some(6.0), "maximum minus mean");
    assert_eq!(number("host:unique"), Some(2.0));
    assert_eq!(number("host:unique_1"), Some(10.0));
    assert!(matches!(output.metrics["digest:hash2"], MetricValue::Checksum(_)));
    assert_eq!(number("bare"), None, "without a suffix there is no reduction");
    assert_eq!(number("only_in_the_first:sum"), None);
    assert_eq!(output.outputs.len(), 4);
    assert_eq!(output.loss(), Some(12.0));
}

/// Covers T6.1.1, T6.1.2.
#[tokio::test(start_paused = true)]
async fn a_small_batch_is_trained_and_its_optimizer_step_follows() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    server.respond("r1", vec![pass_output(&[vec![-0.5], vec![-0.5]], &[("loss:sum", 1.5)])]);
    server.respond("r2", vec![json!({"metrics": {"grad_norm:mean": 0.25}})]);
    let data =
        vec![Datum::completion([5, 6], [7, 8]).unwrap(), Datum::completion([9], [10]).unwrap()];
    // Both are queued before either has a result.
    let gradients = model.forward_backward(data.clone(), LossFn::CrossEntropy);
    let step = model.optim_step(AdamParams::with_learning_rate(0.01));
    let output = gradients.await.unwrap();
    let optim = step.await.unwrap();

    assert_eq!(output.loss(), Some(1.5));
    let logprobs: Vec<f32> =
        output.outputs.iter().map(|datum| datum.f32("logprobs").unwrap()[0]).collect();
    assert_eq!(logprobs, [-0.5, -0.5]);
    assert_eq!(optim.metrics["grad_norm:mean"], MetricValue::Number(0.25));
    let [pass] = &passes(&server)[..] else { panic!("one pass") };
    assert_eq!((&pass.data, &pass.loss_fn), (&data, &LossFn::CrossEntropy));
    assert_eq!(pass.seq_id.map(|seq| seq.get()), Some(1));
    let sent = server.requests("/optim_step").pop().unwrap().json();
    assert_eq!(sent["model_id"], json!(pass.model_id));
    assert_eq!((&sent["seq_id"], &sent["adam_params"]["learning_rate"]), (&json!(2), &json!(0.01)));
    assert_eq!(server.log(), ["start 1", "done 1", "start 2", "done 2"]);
}

/// Covers P6B.1.
#[tokio::test(start_paused = true)]
async fn a_service_creates_a_sampling_client_that_returns_sequences_and_logprobs() {
    let server = NumberedServer::new(json!({}));
    let service = server.builder().build().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let sequence = |tokens: [u32; 2], reason: StopReason| {
        SampledSequence::default()
            .tokens(tokens)
            .logprobs(Some(vec![-0.25, -0.5].into()))
            .stop_reason(reason)
    };
    let response = SampleResponse::default()
        .sequences(vec![sequence([4, 5], StopReason::Stop), sequence([6, 7], StopReason::Length)]);
    server.respond("q0", vec![sample_output(&response)]);
    let params = SamplingParams::new().max_tokens(2);
    let response =
        sampler.sample([1, 2, 3], SampleOptions::new(params).num_samples(2)).await.unwrap();
    let sequences: Vec<_> = response
        .sequences
        .iter()
        .map(|sequence| {
            let logprobs = sequence.logprobs.as_ref().unwrap().to_vec();
            (sequence.tokens.to_vec(), logprobs, sequence.stop_reason)
        })
        .collect();
    let logprobs = || vec![Some(-0.25), Some(-0.5)];
    let expected =
        [(vec![4, 5], logprobs(), StopReason::Stop), (vec![6, 7], logprobs(), StopReason::Length)];
    assert_eq!(sequences, expected);
    let sent = server.requests("/asample").pop().unwrap().json();
    assert_eq!(sent["sampling_session_id"], "s:sample:0");
    assert_eq!(
        (&sent["num_samples"], &sent["sampling_params"]["max_tokens"]),
        (&json!(2), &json!(2))
    );
}

/// Covers P4C.8, T4.3.3.
#[tokio::test(start_paused = true)]
async fn every_request_of_every_client_has_the_settings_of_its_service() {
    let server = NumberedServer::new(json!({}));
    let builder = server.builder().api_key("tml-mine").header("x-team", "blue");
    let service = builder.build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    model.forward_backward(batch(1), LossFn::CrossEntropy).await.unwrap();
    model.optim_step(AdamParams::default()).await.unwrap();
    server.respond("r3", vec![json!({"path": null, "sampling_session_id": "s:sample:9"})]);
    let trained = model.save_weights_and_get_sampling_client().await.unwrap();
    trained.sample([1], SamplingParams::new()).await.unwrap();
    let base = service.create_sampling_client("base").await.unwrap();
    base.clone().sample([1], SamplingParams::new()).await.unwrap();
    // The heartbeats of the session.
    sleep(Duration::from_secs(15)).await;
    let requests = server.requests("");
    for request in &requests {
        assert_eq!(request.header("x-api-key"), Some("tml-mine"), "{}", request.path);
        assert_eq!(request.header("x-team"), Some("blue"), "{}", request.path);
    }
    for path in ["forward_backward", "optim_step", "asample", "session_heartbeat"] {
        assert!(requests.iter().any(|request| request.path.ends_with(path)), "no {path}");
    }
    // The training client belongs to the session of its service.
    assert_eq!(server.requests("/create_session").len(), 1);
    assert_eq!(server.requests("/create_model")[0].json()["session_id"], "s");
    assert_eq!(server.requests("/create_sampling_session")[0].json()["session_id"], "s");
}

/// Covers T2.1.1.
#[tokio::test(start_paused = true)]
async fn the_builder_overrides_the_environment() {
    let server = ScriptedServer::new()
        .respond("POST /api/v1/client/config", 200, json!({}))
        .respond("POST /api/v1/client/dynamic_config", 200, json!({}))
        .respond("POST /api/v1/create_session", 503, json!({}))
        .respond("POST /api/v1/create_session", 503, json!({}));
    let env = Env::from_pairs([
        ("TINKER_BASE_URL", "http://environment.test"),
        ("TINKER_API_KEY", "tml-environment"),
    ]);
    let timeout = Duration::from_secs(7);
    let service = ServiceClient::builder()
        .env(env)
        .base_url("http://builder.test")
        .api_key("tml-builder")
        .user_metadata([("k".to_owned(), json!("v"))].into_iter().collect())
        .options(CallOptions::new().max_attempts(2).request_timeout(timeout))
        .http(server.clone())
        .build()
        .unwrap();
    let error = service.create_sampling_client("base").await.unwrap_err();
    assert_eq!((error.status(), error.attempts()), (Some(503), 2), "{error}");
    let received = server.received();
    for request in &received {
        assert!(request.url.starts_with("http://builder.test/api/v1/"), "{}", request.url);
        assert_eq!(request.header("x-api-key"), Some("tml-builder"));
        assert_eq!(request.timeout, timeout, "{}", request.url);
    }
    let session = received.last().unwrap().json();
    assert_eq!(session["user_metadata"], json!({"k": "v"}));
}

/// Starts `n` samples that the server is slow to accept. Returns how many of them were sent.
async fn sent_at_once(server: &NumberedServer, sampler: &SamplingClient, n: usize) -> usize {
    let before = server.requests("/asample").len();
    server.delay("asample", Duration::from_secs(60));
    let samples = join_all((0..n).map(|_| sampler.sample(prompt_of(10), SamplingParams::new())));
    let sent = tokio::select! {
        _ = samples => panic!("the server accepts nothing within a second"),
        () = sleep(Duration::from_secs(1)) => server.requests("/asample").len() - before,
    };
    server.delay("asample", Duration::ZERO);
    sent
}

/// Covers AUD.1.
#[tokio::test(start_paused = true)]
async fn submitted_samples_are_limited_by_number_by_bytes_and_after_a_429() {
    // Bytes of the budget, samples sent at once, and samples sent at once after a 429. A sample has
    // 10 bytes, after a 429 it counts as 200. One sample may exceed the budget.
    for (bytes, sent, sent_after_backoff) in [(10_485_760, 400, 10), (1600, 161, 9), (1599, 160, 8)]
    {
        let config = json!({"sample_dispatch_bytes_semaphore_size": bytes});
        let server = NumberedServer::new(config.clone());
        assert_eq!(sent_at_once(&server, &server.sampler().await, 500).await, sent, "{bytes}");

        let server = NumberedServer::new(config);
        let sampler = server.sampler().await;
        server.samples(vec![json!(429)]);
        sampler.sample([1], SamplingParams::new()).await.unwrap();
        assert_eq!(sent_at_once(&server, &sampler, 50).await, sent_after_backoff, "{bytes}");
    }
}
