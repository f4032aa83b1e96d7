//! Training client: requests are sent in call order, results are polled concurrently, and dropped
//! futures lose no request.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::Request;
use serde_json::{Value, json};
use tinkex::loss::CustomLoss;
use tinkex::{
    AdamParams, CallOptions, Datum, Env, ErrorCategory, ErrorKind, HttpService as _, Lane, LossFn,
    MetricValue, ModelInput, RestoreMode, RestoreOptions, SamplingParams, SaveOptions,
};
use tinkex::{ImageFormat, InputChunk};
use tokio::time::{Instant, sleep};

use crate::numbered_server::{ACCEPTING, NumberedServer, cases, passes};

fn batch(n: usize) -> Vec<Datum> {
    vec![Datum::completion([1, 2], [3]).unwrap(); n]
}

/// Server configuration that makes every example a chunk of its own.
fn one_datum_per_chunk(parallel: bool) -> Value {
    json!({"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": parallel})
}

/// Covers T4.1.1a, T4.1.1b, T4.1.3, P4C.1, P4C.7, X1.
#[tokio::test(start_paused = true)]
async fn requests_are_sent_in_the_order_of_the_python_sdk() {
    for case in cases("turn_taking.json") {
        let id = case["id"].as_str().unwrap();
        let server = NumberedServer::new(one_datum_per_chunk(case["parallel_chunks"] == true));
        let model = server.model().await;
        let mut calls = Vec::new();
        let mut next = 1;
        for op in case["ops"].as_array().unwrap() {
            match op[0].as_str().unwrap() {
                "fb" => {
                    let n = op[1].as_u64().unwrap();
                    for (chunk, failure) in op[2].as_object().into_iter().flatten() {
                        assert_eq!(failure, &json!({"fail": true}));
                        server.reject(next + chunk.parse::<u64>().unwrap());
                    }
                    next += n;
                    let data = batch(usize::try_from(n).unwrap());
                    let gradients = model.forward_backward(data, LossFn::CrossEntropy);
                    calls.push(Some(gradients.map(|result| result.map(drop)).boxed()));
                }
                "optim" => {
                    next += 1;
                    let step = model.optim_step(AdamParams::default());
                    calls.push(Some(step.map(|result| result.map(drop)).boxed()));
                }
                // The caller drops the future.
                _ => calls[usize::try_from(op[1].as_u64().unwrap()).unwrap()] = None,
            }
        }
        let mut results = Vec::new();
        for call in calls {
            results.push(match call {
                Some(call) => {
                    if call.await.is_ok() {
                        "ok"
                    } else {
                        "error"
                    }
                }
                None => "dropped",
            });
        }
        let log = server.log();
        match id {
            // The Python SDK hangs here. Ours continues and leaves no gap in the sequence numbers.
            "BUG_parallel_later_chunk_fails" => {
                assert_eq!(results, ["error", "ok"]);
                let expected = [
                    "start 2", "start 3", "fail 2", "done 3", "start 1", "done 1", "start 4",
                    "done 4",
                ];
                assert_eq!(log, expected);
            }
            "BUG_cancel_while_waiting_for_turn" => {
                assert_eq!(results, ["ok", "dropped", "ok"]);
                let expected: Vec<String> =
                    (1..=4).flat_map(|i| [format!("start {i}"), format!("done {i}")]).collect();
                assert_eq!(log, expected, "the request of the dropped future was not sent");
            }
            _ => {
                assert_eq!(json!(results), case["calls"], "{id}");
                assert_eq!(json!(log), case["log"], "{id}");
            }
        }
    }
}

/// A training submission that fails with 5xx is sent again with the same sequence number and
/// idempotency key, so that it trains once. With retries disabled the error is returned at once,
/// and the next call is sent under the next number.
///
/// Covers P6C.3.
#[tokio::test(start_paused = true)]
async fn a_submission_that_fails_with_5xx_is_retried_unless_retries_are_disabled() {
    for status in [500, 503] {
        let server = NumberedServer::new(json!({}));
        let model = server.model().await;
        server.fail_times("/forward_backward", json!(status), 3);
        let output = model.forward_backward(batch(1), LossFn::CrossEntropy).await.unwrap();
        assert_eq!(output.outputs.len(), 1);
        let sent = server.requests("/forward_backward");
        assert_eq!(sent.len(), 4, "{status}");
        assert!(sent.iter().all(|request| request.body == sent[0].body), "the same bytes");
        let key = sent[0].header("x-idempotency-key");
        assert!(key.is_some() && sent.iter().all(|r| r.header("x-idempotency-key") == key));
        assert_eq!(server.log(), ["start 1", "done 1"], "accepted once");

        let service = server.builder().options(CallOptions::without_retries()).build().unwrap();
        let model = service.create_lora_training_client("base").await.unwrap();
        server.fail_times("/optim_step", json!(status), 1);
        let failed = model.optim_step(AdamParams::default());
        let next = model.optim_step(AdamParams::default());
        let error = failed.await.unwrap_err();
        assert_eq!((error.kind(), error.status()), (ErrorKind::Server, Some(status)));
        assert_eq!(error.attempts(), 1);
        next.await.unwrap();
        let numbers = server.sequence_numbers("/optim_step");
        assert_eq!(numbers, [1, 2], "{status}: the server may have accepted 1");
    }
}

/// Bug: a call that the server did not read used up its sequence number, and the server waited a
/// minute for it. After any other failure the server may have accepted the request.
#[tokio::test(start_paused = true)]
async fn a_sequence_number_that_was_never_sent_is_assigned_again() {
    for (failure, next) in [
        (json!("refused"), 1),
        (json!(401), 1),
        (json!(402), 1),
        (json!(429), 1),
        (json!(422), 4),
        (json!(503), 4),
        (json!("conn"), 4),
        (json!("timeout"), 4),
    ] {
        let server = NumberedServer::new(one_datum_per_chunk(true));
        let service = server.builder().options(CallOptions::without_retries()).build().unwrap();
        let model = service.create_lora_training_client("base").await.unwrap();
        server.fail("/optim_step", failure.clone());
        model.optim_step(AdamParams::default()).await.unwrap_err();
        server.fail("/forward_backward", failure.clone());
        model.forward_backward(batch(2), LossFn::CrossEntropy).await.unwrap_err();
        server.recover();
        model.optim_step(AdamParams::default()).await.unwrap();
        let sent = server.requests("/optim_step").pop().unwrap();
        assert_eq!(sent.json()["seq_id"], next, "{failure}");
    }
}

#[tokio::test(start_paused = true)]
async fn chunked_batch_returns_one_merged_output() {
    let server = NumberedServer::new(json!({"fwdbwd_max_chunk_len": 2}));
    let model = server.model().await;
    let (gradients, step) = model.split_step(batch(5), LossFn::CrossEntropy, AdamParams::default());
    let output = gradients.await.unwrap();
    assert_eq!(output.metrics["n:sum"], MetricValue::Number(5.0));
    let logprobs: Vec<f32> =
        output.outputs.iter().map(|datum| datum.f32("logprobs").unwrap()[0]).collect();
    assert_eq!(
        logprobs,
        [-1.0, -1.0, -2.0, -2.0, -3.0],
        "outputs are not in the order of the batch"
    );
    step.await.unwrap();
    let optim = server.requests("/optim_step").pop().unwrap();
    assert_eq!(optim.json()["seq_id"], 4);
    assert_eq!(optim.json()["adam_params"]["beta2"], 0.95);
}

#[tokio::test(start_paused = true)]
async fn results_are_polled_concurrently() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    // The first result takes several polls. The later requests are accepted in the meantime.
    let slow = vec![json!([408, {}]), json!("conn"), json!("conn"), json!({"metrics": {}})];
    server.respond("r1", slow);
    let start = Instant::now();
    let steps: Vec<_> = (0..3).map(|_| model.optim_step(AdamParams::default())).collect();
    let mut steps = steps.into_iter();
    let first = steps.next().unwrap();
    for later in steps {
        later.await.unwrap();
    }
    assert_eq!(start.elapsed(), 3 * ACCEPTING);
    first.await.unwrap();
    assert_eq!(start.elapsed(), ACCEPTING + Duration::from_secs(1 + 2));
}

#[tokio::test(start_paused = true)]
async fn dropping_a_training_future_does_not_cancel_the_request() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    drop(model.forward_backward(batch(1), LossFn::CrossEntropy));
    drop(model.optim_step(AdamParams::default()));
    drop(model);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(server.log(), ["start 1", "done 1", "start 2", "done 2"]);
    assert_eq!(server.requests("/retrieve_future").len(), 3, "the results were not polled");
}

#[tokio::test(start_paused = true)]
async fn invalid_input_is_rejected_and_queues_nothing() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let empty = model.forward_backward(vec![], LossFn::CrossEntropy).await.unwrap_err();
    assert_eq!(empty.kind(), ErrorKind::InvalidInput);
    let pointer = InputChunk::image_url("https://example.invalid/a.png", ImageFormat::Png);
    let pointer = pointer.expected_tokens(Some(1));
    let image_by_url = Datum::builder(ModelInput::from_tokens([1]).chunk(pointer)).build().unwrap();
    let rejected = model.forward(vec![image_by_url], LossFn::CrossEntropy).await.unwrap_err();
    assert_eq!(rejected.kind(), ErrorKind::InvalidInput);
    let nan = AdamParams::with_learning_rate(f64::NAN);
    assert_eq!(model.optim_step(nan).await.unwrap_err().kind(), ErrorKind::InvalidInput);
    model.optim_step(AdamParams::default()).await.unwrap();
    assert_eq!(server.log(), ["start 1", "done 1"]);
}

#[tokio::test(start_paused = true)]
async fn state_is_saved_and_loaded() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    server.respond("r1", vec![json!({"type": "save_weights", "path": "tinker://r/weights/a"})]);
    let path = model.save_state("a").await.unwrap();
    assert_eq!(path.to_string(), "tinker://r/weights/a");
    let saved = json!({"type": "save_weights_for_sampler", "path": "tinker://r/sampler_weights/b"});
    server.respond("r2", vec![saved]);
    model.save_weights_for_sampler("b").await.unwrap();
    server.respond("r3", vec![json!({"type": "load_weights"})]);
    model.load_state(&path, RestoreMode::WithOptimizer).await.unwrap();
    let load = server.requests("/load_weights").pop().unwrap().json();
    assert_eq!((&load["optimizer"], &load["seq_id"]), (&json!(true), &json!(3)));
    assert_eq!(model.get_info().await.unwrap().model_id, "s:train:0");
}

#[tokio::test(start_paused = true)]
async fn save_options_are_sent_and_validated() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    server.respond("r1", vec![json!({"type": "save_weights", "path": "tinker://r/weights/a"})]);
    let day = Duration::from_secs(86_400);
    let options = SaveOptions::new("a").ttl(day).overwrite().metadata("k", "v");
    model.save_state(options).await.unwrap();
    let sent = server.requests("/save_weights").pop().unwrap().json();
    assert_eq!((&sent["ttl_seconds"], &sent["overwrite"]), (&json!(86_400), &json!(true)));
    assert_eq!(sent["user_metadata"], json!({"k": "v"}));
    let path = "tinker://r/external_weights/b";
    server.respond(
        "r2",
        vec![json!({"type": "save_weights_external", "path": path, "size_bytes": 5})],
    );
    let options = SaveOptions::new("b").ttl(day).encrypt_for("age1x").encrypt_for("age1y");
    let saved = model.save_weights_external(options).await.unwrap();
    assert_eq!((saved.path.to_string(), saved.size_bytes), (path.to_owned(), Some(5)));
    let sent = server.requests("/save_weights_external").pop().unwrap().json();
    assert_eq!(sent["age_encryption_recipients"], json!(["age1x", "age1y"]));
    assert_eq!((&sent["path"], &sent["seq_id"]), (&json!("b"), &json!(2)));
    let eleven_recipients =
        (0..11).fold(SaveOptions::new("c"), |options, i| options.encrypt_for(format!("age{i}")));
    for (options, cause) in [
        (SaveOptions::new(""), "name is empty"),
        (SaveOptions::new("c").ttl(Duration::ZERO), "less than one second"),
        (SaveOptions::new("c").encrypt_for("age1x"), "encryption"),
    ] {
        let error = model.save_state(options).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(cause), "{error}");
    }
    model.save_weights_for_sampler(SaveOptions::new("c").overwrite()).await.unwrap_err();
    model.save_weights_external(eleven_recipients).await.unwrap_err();
    assert_eq!(server.requests("/save_weights").len(), 1, "invalid options were sent");
}

/// Covers R-SVC.
#[tokio::test(start_paused = true)]
async fn checkpoint_is_read_with_another_api_key() {
    let path = || "tinker://theirs/weights/a";
    for exchanged in [false, true] {
        let server = NumberedServer::new(json!({"pjwt_auth_enabled": exchanged}));
        let service = server.builder().build().unwrap();
        let options = RestoreOptions::new(RestoreMode::WeightsOnly).weights_key("tml-theirs");
        let model = service.create_training_client_from(path(), options).await.unwrap();
        let token = if exchanged { "eyJ-of-tml-theirs" } else { "tml-theirs" };
        let own = if exchanged { "eyJ-of-tml-server" } else { "tml-server" };
        let info = server.requests("/weights_info").pop().unwrap();
        assert_eq!(info.header("x-api-key"), Some(token), "the checkpoint needs the other key");
        let load = server.requests("/load_weights").pop().unwrap();
        assert_eq!(load.json()["weights_access_token"], token);
        assert_eq!(load.header("x-api-key"), Some(own), "the model needs the own key");
        model.load_state_with_key(path(), RestoreMode::WithOptimizer, "tml-theirs").await.unwrap();
        let load = server.requests("/load_weights").pop().unwrap().json();
        assert_eq!((&load["weights_access_token"], &load["seq_id"]), (&json!(token), &json!(2)));
        model.load_state(path(), RestoreMode::WeightsOnly).await.unwrap();
        let load = server.requests("/load_weights").pop().unwrap().json();
        assert!(load.get("weights_access_token").is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn an_invalid_key_of_a_checkpoint_is_not_replaced_by_the_credentials_of_the_environment() {
    for key in ["", "theirs"] {
        let server = NumberedServer::new(json!({}));
        let variables = [("TINKER_API_KEY", "tml-own"), ("TINKER_CREDENTIAL_CMD", "echo tml-own")];
        let service = server.builder().env(Env::from_pairs(variables)).build().unwrap();
        let options = RestoreOptions::new(RestoreMode::WeightsOnly).weights_key(key);
        let restored = service.create_training_client_from("tinker://theirs/weights/a", options);
        assert_eq!(restored.await.unwrap_err().kind(), ErrorKind::Auth);
        assert!(server.requests("/weights_info").is_empty(), "a request had another key");
    }
}

/// Covers R-OLD.
#[tokio::test(start_paused = true)]
async fn training_resumes_from_a_checkpoint() {
    let path = || "tinker://r/weights/a";
    for (restore, optimizer) in
        [(RestoreMode::WeightsOnly, "adamw"), (RestoreMode::WithOptimizer, "dimuon")]
    {
        let server = NumberedServer::new(json!({}));
        let service = server.builder().build().unwrap();
        let model = service.create_training_client_from(path(), restore).await.unwrap();
        let create = server.requests("/create_model").pop().unwrap().json();
        assert_eq!(create["optimizer_config"]["type"], optimizer);
        assert_eq!(
            create["lora_config"],
            json!({"rank": 8, "train_unembed": true, "train_mlp": false, "train_attn": true})
        );
        let load = server.requests("/load_weights").pop().unwrap().json();
        assert_eq!(load["optimizer"], restore == RestoreMode::WithOptimizer);
        assert_eq!(load["seq_id"], 1, "loading is the model's first request");
        model.optim_step(AdamParams::default()).await.unwrap();
        assert_eq!(server.requests("/optim_step")[0].json()["seq_id"], 2);
    }

    // With `create_model_via_load_weights`, one request creates and loads the model.
    let server = NumberedServer::new(json!({"create_model_via_load_weights": true}));
    let service = server.builder().build().unwrap();
    let options = RestoreOptions::new(RestoreMode::WeightsOnly).base_model("base:long");
    let model = service.create_training_client_from(path(), options).await.unwrap();
    assert_eq!(model.model_id(), &"s:train:0");
    let load = server.requests("/load_weights").pop().unwrap().json();
    assert_eq!(
        load,
        json!({
            "session_id": "s", "model_seq_id": 0, "base_model": "base:long", "optimizer": false,
            "path": "tinker://r/weights/a", "type": "load_weights",
        })
    );
    model.optim_step(AdamParams::default()).await.unwrap();
    assert_eq!(server.requests("/optim_step")[0].json()["seq_id"], 1);
    assert!(server.requests("/create_model").is_empty());

    let wrong = "tinker://r/sampler_weights/a";
    let error = service.create_training_client_from(wrong, RestoreMode::WeightsOnly).await;
    assert!(error.unwrap_err().hint().unwrap().as_str().contains("save_state"));
}

#[tokio::test(start_paused = true)]
async fn request_bodies_are_compressed_if_the_server_enables_it() {
    let server = NumberedServer::new(json!({"proto_compress_fwdbwd": true}));
    let forward = server.clone();
    let sent = Arc::new(Mutex::new(Bytes::new()));
    let last_sent = Arc::clone(&sent);
    // The server decompresses what it records.
    let http = move |request: Request<Bytes>| {
        if request.uri().path().ends_with("/forward_backward") {
            *last_sent.lock().unwrap() = request.body().clone();
        }
        let server = forward.clone();
        async move { server.send(Lane::Train, request, Duration::from_secs(60)).await }
    };
    let service = server.builder().http(http).build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    let output = model.forward_backward(batch(50), LossFn::CrossEntropy).await.unwrap();
    assert_eq!(output.outputs.len(), 50);
    let received = server.requests("/forward_backward").pop().unwrap();
    assert_eq!(received.header("content-encoding"), Some("zstd"));
    assert_eq!(received.forward_backward().unwrap().data.len(), 50);
    assert!(sent.lock().unwrap().len() < received.body.len() / 4);
}

/// Covers T3.2.1, T3.2.2, X16.
#[tokio::test(start_paused = true)]
async fn polling_behaves_like_the_python_sdk() {
    for case in cases("future_retrieve.json") {
        let script = case["script"].as_array().unwrap().clone();
        if script.contains(&json!("hang")) {
            drop_during_poll(&case).await;
            continue;
        }
        let billing = json!({"billing_exception_max_pause_duration_sec": 20});
        let server = NumberedServer::new(billing);
        let model = server.model().await;
        server.respond("r1", script.clone());
        let outcome = if case["result_type"] == "ForwardBackwardOutput" {
            model.forward_backward(batch(1), LossFn::CrossEntropy).await.map(drop)
        } else {
            model.optim_step(AdamParams::default()).await.map(drop)
        };
        let actual = match &outcome {
            Ok(()) => "success",
            Err(error) => match error.kind() {
                ErrorKind::WorkFailed => "request_failed",
                ErrorKind::Expired => "promise_expired",
                ErrorKind::Decode if error.to_string().contains("twice") => "protocol_error",
                _ => "fatal",
            },
        };
        assert_eq!(case["result"]["outcome"], actual, "{case}: {outcome:?}");
        if let Err(error) = &outcome {
            assert_eq!(error.request_id().unwrap(), &"r1");
            if let Some(category) = case["result"]["category"].as_str() {
                // Unlike the Python SDK, the client ignores the case of the category (D-20).
                let name = script[0]["category"].as_str().unwrap_or(category);
                assert_eq!(error.category(), Some(ErrorCategory::from_name(name)), "{case}");
            }
        }

        let polls = server.requests("/retrieve_future").split_off(1);
        // Unlike the Python SDK, the client polls again if the server failed (N-13).
        let (requests, expected) = if case["result"]["category"] == "server" {
            (json!(4), json!([1, 2, 4]))
        } else {
            (case["requests"].clone(), case["sleeps"].clone())
        };
        assert_eq!(json!(polls.len()), requests, "{case}");
        let sleeps: Vec<f64> = polls
            .windows(2)
            .enumerate()
            .map(|(i, pair)| {
                let timed_out = script.get(i).is_some_and(|outcome| outcome == "timeout");
                let timeout = if timed_out { pair[0].timeout } else { Duration::ZERO };
                (pair[1].at - pair[0].at - timeout).as_secs_f64()
            })
            .filter(|seconds| *seconds > 0.0)
            .collect();
        let expected: Vec<f64> =
            expected.as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
        assert_eq!(sleeps, expected, "{case}");
        for (poll, expected) in polls.iter().zip(case["sent"].as_array().unwrap()) {
            let iteration = poll.header("x-tinker-request-iteration");
            let metadata = poll.json()["allow_metadata_only"].clone();
            let roundtrip = poll.header("x-tinker-create-promise-roundtrip-time").is_some();
            assert_eq!(&json!([iteration, metadata, roundtrip]), expected, "{case}");
            let proto = poll.header("accept") == Some("application/x-protobuf");
            assert_eq!(json!(proto), case["accept_proto"], "{case}");
        }
    }
}

/// Drops a future while the server holds its poll. Only a sample is cancelled.
async fn drop_during_poll(case: &Value) {
    let server = NumberedServer::new(json!({}));
    server.dynamic_config(json!({"sample_cancel_enabled": true}));
    let id = if case["result_type"] == "SampleResponse" {
        let sampler = server.sampler().await;
        server.respond("q0", vec![json!("hang")]);
        let waiting = sampler.sample([1], SamplingParams::new().max_tokens(1));
        sleep(Duration::from_secs(5)).await;
        drop(waiting);
        sleep(Duration::from_secs(5)).await;
        "q0"
    } else {
        let model = server.model().await;
        server.respond("r1", vec![json!("hang")]);
        let waiting = model.optim_step(AdamParams::default());
        sleep(Duration::from_secs(5)).await;
        drop(waiting);
        sleep(Duration::from_secs(5)).await;
        "r1"
    };
    let polls = server.requests("/retrieve_future");
    let polls = polls.iter().filter(|poll| poll.json()["request_id"] == id).count();
    assert_eq!(json!(polls), case["requests"]);
    let cancelled = server.requests("/cancel_future").len();
    assert_eq!(cancelled, case["cancel_requests"].as_array().unwrap().len(), "{case}");
}

/// Covers T3.2.5.
#[tokio::test(start_paused = true)]
async fn poll_timeout_ends_the_wait_for_a_result() {
    let server = NumberedServer::new(json!({}));
    let options = CallOptions::new().poll_timeout(Duration::from_secs(100));
    let builder = server.builder().options(options);
    let service = builder.build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    server.respond("r1", vec![json!("conn")]);
    let start = Instant::now();
    let error = model.optim_step(AdamParams::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert_eq!((error.attempts(), start.elapsed().as_secs()), (1, 101), "{error}");
    assert!(server.requests("/retrieve_future").len() > 3);
    assert!(error.to_string().contains("continues on the server"), "{error}");
    assert_eq!(
        error.request_id().unwrap(),
        &"r1",
        "the error names the request, so that it can be polled later"
    );
}

/// Covers X7.
#[tokio::test(start_paused = true)]
async fn polls_answered_at_once_are_spaced_out() {
    let server = NumberedServer::new(json!({}));
    let mut responses = vec![json!(503); 40];
    responses.push(json!({"metrics": {}}));
    server.respond("r1", responses);
    let service = server.polling_builder().build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    let start = Instant::now();
    model.optim_step(AdamParams::default()).await.unwrap();
    assert!(start.elapsed() > Duration::from_secs(60), "forty polls in {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn rejected_chunk_fails_the_batch_while_other_chunks_hang() {
    let server = NumberedServer::new(one_datum_per_chunk(true));
    let model = server.model().await;
    server.reject(2);
    for seq in [1, 3] {
        server.respond(&format!("r{seq}"), vec![json!("hang")]);
    }
    let error = model.forward_backward(batch(3), LossFn::CrossEntropy).await.unwrap_err();
    assert_eq!(error.status(), Some(422));
    model.optim_step(AdamParams::default()).await.unwrap();
}

/// Bug: `weight` in place of `weights` was sent, and the prompt was trained too.
#[tokio::test(start_paused = true)]
async fn an_input_that_a_built_in_loss_does_not_read_is_not_sent() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let with = |name: &str| {
        let input = Datum::builder([1, 2]).loss_input("target_tokens", vec![2_i64, 3]);
        input.loss_input(name.to_owned(), vec![0.0, 1.0]).build().unwrap()
    };
    for (name, loss, advice) in [
        ("weight", LossFn::CrossEntropy, "did you mean \"weights\"?"),
        ("Weights", LossFn::CrossEntropy, "did you mean \"weights\"?"),
        ("advantage", LossFn::ImportanceSampling, "did you mean \"advantages\"?"),
        ("clip_low_treshold", LossFn::Ppo, "did you mean \"clip_low_threshold\"?"),
        ("mask", LossFn::CrossEntropy, "its inputs are target_tokens, weights"),
        ("advantages", LossFn::CrossEntropy, "its inputs are target_tokens, weights"),
    ] {
        let data = vec![with("weights"), with(name)];
        let passes = [
            model.forward_backward(data.clone(), loss.clone()),
            model.forward(data.clone(), loss.clone()),
        ];
        for pass in passes {
            let error = pass.await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            let expected =
                format!("data[1].loss_fn_inputs[{name:?}]: {loss} has no such input; {advice}");
            assert!(error.to_string().ends_with(&expected), "{error}");
        }
        let step = model.step(data, loss, AdamParams::default()).await;
        assert_eq!(step.unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    assert!(server.log().is_empty(), "nothing is sent");
}

/// Only the server knows the inputs of a loss that this version does not know.
#[tokio::test(start_paused = true)]
async fn inputs_of_losses_that_are_not_known_are_sent() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let input = Datum::builder([1]).loss_input("target_tokens", vec![2_i64]);
    let data = vec![input.loss_input("weight", vec![1.0]).build().unwrap()];
    for loss in [LossFn::from("brand_new"), LossFn::StableReinforce] {
        model.forward_backward(data.clone(), loss).await.unwrap();
    }
    let traced = CustomLoss::trace("weighted", |trace| {
        -(trace.input("logprobs", 1) * trace.input("weight", 1)).sum()
    });
    model.forward_backward(data, traced.unwrap()).await.unwrap();
    assert_eq!(passes(&server).len(), 4, "a loss that the client computes takes two passes");
}
