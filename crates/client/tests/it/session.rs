//! Sessions: creation, heartbeats, telemetry and closing.

use serde_json::{Value, json};
use tinkex::{
    AdamParams, CallOptions, Datum, Env, ErrorKind, JsonObject, LoraOptions, LossFn,
    SampleResponse, SampledSequence, SamplingClient, SamplingParams,
};
use tokio::time::{Duration, Instant, sleep};

use crate::event_log::EventLog;
use crate::numbered_server::{NumberedServer, cases, sample_output};

/// Covers T4.3.1, R-OLD.
#[tokio::test(start_paused = true)]
async fn a_session_is_created_on_first_use_and_shared() {
    let server = NumberedServer::new(json!({}));
    let metadata: JsonObject = [("k".to_owned(), json!("v"))].into_iter().collect();
    let env = Env::from_pairs([("TINKER_TAGS", "b,a,,b"), ("TINKER_PROJECT_ID", "p")]);
    let builder = server.builder().env(env).user_metadata(metadata).display_name("mine");
    let service = builder.build().unwrap();
    assert!(server.requests("/create_session").is_empty(), "not created before its first use");
    let create = || service.create_lora_training_client(LoraOptions::new("base").rank(16).seed(7));
    let (a, b) = tokio::join!(create(), create());
    a.and(b).unwrap();
    let opened = server.requests("/create_session");
    assert_eq!(opened.len(), 1);
    assert_eq!(
        opened[0].json(),
        json!({
            "tags": ["b", "a"], "user_metadata": {"k": "v"}, "sdk_version": "0.36.0",
            "project_id": "p", "display_name": "mine", "type": "create_session",
        })
    );
    let models: Vec<Value> =
        server.requests("/create_model").iter().map(|request| request.json()).collect();
    let mut numbers: Vec<_> =
        models.iter().map(|model| model["model_seq_id"].as_u64().unwrap()).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [0, 1]);
    assert_eq!(models[0]["lora_config"]["rank"], 16);

    service.finish().await;
    let finish = server.requests("/finish").pop().unwrap().json();
    assert_eq!(finish, json!({"reason": {"type": "success"}, "detail": null}));
}

/// Covers T4.3.3.
#[tokio::test(start_paused = true)]
async fn a_training_client_uses_the_settings_and_the_server_configuration_of_its_service() {
    let server = NumberedServer::new(json!({"fwdbwd_max_chunk_len": 2}));
    let builder = server.builder().api_key("tml-mine").header("x-team", "blue");
    let service = builder.build().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    let data = vec![Datum::completion([1, 2], [3]).unwrap(); 5];
    model.forward_backward(data, LossFn::CrossEntropy).await.unwrap();
    sampler.sample([1], SamplingParams::new().max_tokens(1)).await.unwrap();
    assert_eq!(server.requests("/client/config").len(), 1, "fetched once for all clients");
    assert_eq!(server.requests("/create_session").len(), 1);
    assert_eq!(server.requests("/forward_backward").len(), 3, "two examples per request");
    let all = server.requests("");
    assert!(all.iter().any(|request| request.path.ends_with("/create_model")));
    for request in all {
        assert_eq!(request.header("x-api-key"), Some("tml-mine"), "{}", request.path);
        assert_eq!(request.header("x-team"), Some("blue"), "{}", request.path);
    }
}

/// Covers T4.3.2, X14.
#[tokio::test(start_paused = true)]
async fn heartbeats_match_the_python_sdk() {
    for case in cases("heartbeat.json") {
        let lines = EventLog::default();
        let _log = tracing::subscriber::set_default(lines.clone());
        let server = NumberedServer::new(json!({}));
        let outcomes: Vec<Value> = case["outcomes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|outcome| if outcome == "ok" { json!({}) } else { outcome.clone() })
            .collect();
        server.heartbeats(outcomes, case["failure_latency"].as_f64().unwrap());
        let start = server.now();
        let started_at = tokio::time::Instant::now();
        let model = server.model().await;
        let expected = case["sent_at"].as_array().unwrap();
        let last = expected.last().unwrap().as_f64().unwrap();
        sleep(Duration::from_secs_f64(last + 5.0)).await;
        let beats: Vec<f64> = server
            .requests("/session_heartbeat")
            .iter()
            .map(|request| (request.at - start).as_secs_f64())
            .collect();
        assert_eq!(json!(beats), case["sent_at"], "{}", case["id"]);
        drop(model);
        sleep(Duration::from_secs(60)).await;
        assert_eq!(
            server.requests("/session_heartbeat").len(),
            beats.len(),
            "heartbeats end with the client"
        );
        let warned: Vec<f64> = lines
            .timed(&["WARN", "heartbeats are failing"])
            .iter()
            .map(|(at, _)| (*at - started_at).as_secs_f64())
            .collect();
        let expected: Vec<f64> =
            case["warned_at"].as_array().unwrap().iter().map(|at| at.as_f64().unwrap()).collect();
        assert_eq!(warned, expected, "{}", case["id"]);
    }
}

/// Covers R-HOLD.
#[tokio::test(start_paused = true)]
async fn abort_finishes_the_session_as_interrupted_and_stops_all_tasks() {
    let server = NumberedServer::new(json!({}));
    let service = server.builder().build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    // Still pending when the client is closed.
    server.respond("r1", vec![json!("conn")]);
    let waiting = model.optim_step(AdamParams::default());
    sleep(Duration::from_secs(2)).await;
    service.abort().await;
    service.finish().await;
    let ends: Vec<Value> =
        server.requests("/finish").iter().map(|request| request.json()).collect();
    assert_eq!(
        ends,
        [json!({"reason": {"type": "interrupted"}, "detail": null})],
        "the first reason is sent"
    );
    assert_eq!(waiting.await.unwrap_err().kind(), ErrorKind::Closed);
    let params = SamplingParams::new().max_tokens(1);
    assert_eq!(sampler.sample([1], params).await.unwrap_err().kind(), ErrorKind::Closed);
    let step = model.optim_step(AdamParams::default()).await.unwrap_err();
    assert_eq!(step.kind(), ErrorKind::Closed);
    assert!(step.hint().is_some());
    let create = service.create_sampling_client("base").await.unwrap_err();
    assert_eq!(create.kind(), ErrorKind::Closed);
    assert_eq!(service.server_capabilities().await.unwrap_err().kind(), ErrorKind::Closed);
    let received = server.requests("").len();
    sleep(Duration::from_secs(600)).await;
    assert_eq!(server.requests("").len(), received, "no heartbeat, no refresh, no telemetry");
    drop((service, model, sampler));
}

/// Covers R-TEL, X6.
#[tokio::test(start_paused = true)]
async fn telemetry_contains_no_secrets() {
    let server = NumberedServer::new(json!({}));
    let service = server.builder().header("X-Secret", "hush").build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    server.respond("r1", vec![json!(503), json!([400, {"detail": "odd"}]), json!([422, {"a": 1}])]);
    model.optim_step(AdamParams::default()).await.unwrap_err();
    server.respond("r2", vec![json!({"error": "lost it", "category": "server"})]);
    model.optim_step(AdamParams::default()).await.unwrap_err();
    service.report(&std::io::Error::other("the program's own"));
    service.finish().await;
    let mut events = Vec::new();
    for request in server.requests("/telemetry") {
        let text = String::from_utf8(request.body.to_vec()).unwrap();
        for secret in ["tml-server", "hush"] {
            assert!(!text.contains(secret), "{text}");
        }
        assert_eq!(request.json()["session_id"], "s");
        events.extend(request.json()["events"].as_array().unwrap().clone());
    }
    let names: Vec<String> = events
        .iter()
        .map(|event| {
            let name = event.get("event_name").unwrap_or(&event["event"]).as_str().unwrap();
            format!("{name} {}", event["severity"].as_str().unwrap())
        })
        .collect();
    assert_eq!(
        names,
        [
            "SESSION_START INFO",
            "APIFuture.result_async.api_status_error WARNING",
            "APIFuture.result_async.api_status_error ERROR",
            "APIFuture.result_async.api_status_error ERROR",
            "user_error WARNING",
            "APIFuture.result_async.application_error ERROR",
            "UNHANDLED_EXCEPTION ERROR",
            "UNHANDLED_EXCEPTION ERROR",
            "SESSION_END INFO",
        ]
    );
    let order: Vec<u64> =
        events.iter().map(|event| event["event_session_index"].as_u64().unwrap()).collect();
    assert_eq!(order, (0..9).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn telemetry_can_be_disabled() {
    let server = NumberedServer::new(json!({}));
    let quiet = [("TINKER_TELEMETRY", "0")];
    for builder in
        [server.builder().without_telemetry(), server.builder().env(Env::from_pairs(quiet))]
    {
        let service = builder.build().unwrap();
        service.create_lora_training_client("base").await.unwrap();
        service.report(&std::io::Error::other("not recorded"));
        sleep(Duration::from_secs(60)).await;
        service.finish_with_error(&"not recorded").await;
    }
    assert!(server.requests("/telemetry").is_empty());
}

/// Covers AUD.9.
#[test]
fn feature_gates_are_kept_although_this_client_knows_none() {
    let server = NumberedServer::new(json!({}));
    let gates = |variable: Option<&str>| {
        let env = Env::from_pairs(variable.map(|value| ("TINKER_FEATURE_GATES", value)));
        server.builder().env(env)
    };
    let built = |builder: tinkex::ServiceClientBuilder| builder.build().unwrap();
    assert_eq!(built(gates(None)).feature_gates(), ["async_sampling"]);
    assert_eq!(built(gates(Some(""))).feature_gates(), [""; 0]);
    let named = built(gates(Some("async_sampling,other,,other")));
    assert_eq!(named.feature_gates(), ["async_sampling", "other"]);
    assert_eq!(named.with_options(CallOptions::new()).feature_gates(), named.feature_gates());
    let argument = gates(Some("other")).feature_gates(["mine"]);
    assert_eq!(built(argument).feature_gates(), ["mine"], "an argument precedes the variable");
}

/// The state that limits warnings to one a minute belongs to a client: a new client of the same
/// sampling session has its own.
///
/// Covers AUD.7.
#[tokio::test(start_paused = true)]
async fn a_new_client_of_the_same_session_warns_although_a_dropped_one_has_just_warned() {
    let lines = EventLog::default();
    let _log = tracing::subscriber::set_default(lines.clone());
    let server = NumberedServer::new(json!({}));
    let service = server.builder().build().unwrap();
    let paused = json!({"type": "try_again", "queue_state": "paused_capacity"});
    let first = service.create_sampling_client("base").await.unwrap();
    let handle = first.handle();
    let sample = async |sampler: &SamplingClient| {
        // The first sample tells the number of the next one, which depends on the client.
        sampler.sample([1], SamplingParams::new().max_tokens(1)).await.unwrap();
        let number = server.sequence_numbers("/asample").pop().unwrap() + 1;
        let sequence = SampledSequence::default().tokens([7]);
        let output = sample_output(&SampleResponse::default().sequences(vec![sequence]));
        server.respond(&format!("q{number}"), vec![paused.clone(), output]);
        sampler.sample([1], SamplingParams::new().max_tokens(1)).await.unwrap();
        lines.with(&["WARN", "is paused"]).len()
    };
    let start = Instant::now();
    assert_eq!(sample(&first).await, 1);
    assert_eq!(sample(&first.clone()).await, 1, "a clone shares the state");
    drop(first);
    let second = service.restore_sampling_client(&handle).unwrap();
    assert_eq!(second.sampler_id(), &handle.sampling_session_id);
    assert_eq!(sample(&second).await, 2);
    assert!(start.elapsed() < Duration::from_secs(60), "the state of the first is still recent");
}

#[tokio::test(start_paused = true)]
async fn a_session_created_during_close_is_finished() {
    let server = NumberedServer::new(json!({}));
    server.delay("/create_session", Duration::from_secs(5));
    let service = server.builder().build().unwrap();
    let opening = service.create_lora_training_client("base");
    let closing = async {
        sleep(Duration::from_secs(1)).await;
        service.finish().await;
    };
    let (opened, ()) = tokio::join!(opening, closing);
    assert_eq!(opened.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(server.requests("/finish").len(), 1, "the session is finished on the server");
    sleep(Duration::from_secs(60)).await;
    assert!(server.requests("/session_heartbeat").is_empty());
}
