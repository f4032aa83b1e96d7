//! A request that kills the server process is executed a limited number of times.

use std::path::Path;

use rusqlite::Connection;
use serde_json::{Value, json};

use tinkex_wire::{Datum, ForwardBackward, LossFn, Seq};

use crate::harness::{Http, step};
use crate::process::Process;

/// Returns a request for `samples` samples of 100 tokens.
fn sample(sampler: &Value, seq: u64, samples: u32) -> Value {
    json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
        "sampling_params": {"max_tokens": 100, "stop": []}, "num_samples": samples,
        "sampling_session_id": sampler, "seq_id": seq,
    })
}

/// Returns how often a request was started after restarts.
fn starts(data: &Path, future: &Value) -> i64 {
    let database = Connection::open(data.join("metadata.sqlite")).unwrap();
    let id = future["request_id"].as_str().unwrap();
    let sql = "SELECT starts FROM requests WHERE id = ?";
    database.query_row(sql, [id], |row| row.get(0)).unwrap()
}

/// Returns whether the server has recorded that it executes a request alone.
fn runs_alone(data: &Path) -> bool {
    let record = std::fs::read_to_string(data.join("passes/crashes.json"));
    record.is_ok_and(|record| record.contains(r#""executing":{"#))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_kills_the_process_is_not_executed_at_every_start() {
    let data = tempfile::tempdir().unwrap();
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let session = http.session().await;
    let (_, created) = http
        .post(
            "/create_sampling_session",
            json!({"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}),
        )
        .await;
    let sampler = &created["sampling_session_id"];
    // It runs for much longer than the test needs to kill the process.
    let (_, poison) = http.post("/asample", sample(sampler, 0, 16_000)).await;
    assert_eq!(starts(data.path(), &poison), 0, "a new request is not counted");
    process.kill();
    // After the first restart, the request runs together with others. Then it runs alone.
    for count in 1..=4 {
        let process = Process::start(data.path());
        let http = Http::new(&process.url);
        while starts(data.path(), &poison) < count || (count > 1 && !runs_alone(data.path())) {
            assert_eq!(http.get("/api/v1/healthz").await.0, 200);
        }
        process.kill();
    }

    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let failed = http.result(&poison).await;
    assert_eq!(failed["category"], "server", "{failed}");
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("the server process ended each time"), "{error}");
    let (_, next) = http.post("/asample", sample(sampler, 1, 1)).await;
    assert_eq!(http.sampled(&next).await.len(), 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspect_that_does_not_kill_the_process_finishes() {
    let data = tempfile::tempdir().unwrap();
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let session = http.session().await;
    let model = http.model(&session).await;
    // The request waits for sequence number 1, so that it is unfinished when the process dies.
    let save = json!({"model_id": model, "path": "a", "seq_id": 2, "type": "save_weights"});
    let (status, saved) = http.post("/save_weights", save).await;
    assert_eq!(status, 200, "{saved}");
    process.kill();
    let database = Connection::open(data.path().join("metadata.sqlite")).unwrap();
    database.execute("UPDATE requests SET starts = 1", []).unwrap();
    drop(database);

    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    assert_eq!(http.post("/optim_step", step(&model, 1, 1e-3)).await.0, 200);
    let saved = http.result(&saved).await;
    assert!(saved["path"].as_str().is_some_and(|path| path.ends_with("/weights/a")), "{saved}");
}

/// Sends a pass and returns its future.
async fn send_pass(http: &Http, model: &str, seq: u64) -> Value {
    let data = vec![Datum::completion([5, 6, 7], [8, 9]).unwrap(); 2];
    let request = ForwardBackward::new(model, data, LossFn::CrossEntropy).seq_id(Seq::new(seq));
    let body = request.to_proto().unwrap().to_vec();
    let (status, future) = http.send("POST", "/api/v1/forward_backward", &[], body).await;
    assert_eq!(status, 200, "{future}");
    future
}

/// No optimizer step is applied without the gradients of a pass that the server has dropped.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_pass_fails_the_requests_up_to_the_next_step() {
    let data = tempfile::tempdir().unwrap();
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let session = http.session().await;
    let model = http.model(&session).await;
    http.proto_result(&send_pass(&http, &model, 1).await).await;
    // The pass waits for sequence number 2, so that it is unfinished when the process dies.
    let poison = send_pass(&http, &model, 3).await;
    process.kill();
    // Three deaths are attributed to the pass.
    let database = Connection::open(data.path().join("metadata.sqlite")).unwrap();
    database.execute("UPDATE requests SET starts = 4", []).unwrap();
    drop(database);
    std::fs::create_dir_all(data.path().join("passes")).unwrap();
    let id = poison["request_id"].as_str().unwrap();
    let record = json!({"executing": null, "deaths": {id: {"place": 0, "count": 3}}});
    std::fs::write(data.path().join("passes/crashes.json"), record.to_string()).unwrap();

    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let second = send_pass(&http, &model, 2).await;
    http.proto_result(&second).await;
    let failed = http.result(&poison).await;
    assert!(failed["error"].as_str().unwrap().contains("ended each time"), "{failed}");
    // The mark is durable.
    process.kill();
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let later = send_pass(&http, &model, 4).await;
    let (_, stepped) = http.post("/optim_step", step(&model, 5, 1e-2)).await;
    for future in [&later, &stepped] {
        let failed = http.result(future).await;
        assert_eq!(failed["category"], "server", "{failed}");
        let error = failed["error"].as_str().unwrap();
        let reason = "an earlier pass are missing: request seq_id 3: the server process ended";
        assert!(error.contains(reason), "{error}");
    }
    // The gradients of the passes before are discarded, and the weights are unchanged.
    let (_, norm) = http.post("/optim_step", step(&model, 6, 0.0)).await;
    assert_eq!(http.result(&norm).await["metrics"]["unclipped_grad_l2:mean"], 0.0);
    process.kill();
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    http.proto_result(&send_pass(&http, &model, 7).await).await;
    let (_, norm) = http.post("/optim_step", step(&model, 8, 1e-2)).await;
    let norm = http.result(&norm).await["metrics"]["unclipped_grad_l2:mean"].as_f64();
    assert!(norm.is_some_and(|norm| norm > 0.0));
}
