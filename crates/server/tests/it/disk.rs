//! A full disk: requests are rejected without side effects, and work continues once there is space.

#![cfg(target_os = "linux")]

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use crate::harness::{Http, MODEL, create_model, step};
use crate::process::Process;

/// Returns the state of a server that its API exposes.
async fn visible_state(http: &Http, session: &str, model: &str) -> Vec<Value> {
    let mut all = Vec::new();
    for path in [
        "/sessions".to_owned(),
        format!("/sessions/{session}"),
        format!("/training_runs/{model}/checkpoints"),
        "/checkpoints".to_owned(),
    ] {
        let (status, response) = http.get(&format!("/api/v1{path}")).await;
        assert_eq!(status, 200, "{path}: {response}");
        all.push(response);
    }
    let (_, found) = http.post("/sessions/search", json!({"session_id": session})).await;
    all.push(found);
    // The time of the last request changes with every attempt; the number of runs does not.
    let (_, runs) = http.get("/api/v1/training_runs").await;
    all.push(runs["cursor"].clone());
    all
}

fn folders(data: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(data.join("weights")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_on_a_full_disk_are_rejected_and_change_nothing() {
    let data = tempfile::tempdir().unwrap();
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let session = http.session().await;
    let model = http.model(&session).await;
    http.save(&model, 1, "a").await;
    let sampler = http.sampler(&session).await;
    let before = visible_state(&http, &session, &model).await;
    let folders_before = folders(data.path());

    let checkpoint = format!("/api/v1/training_runs/{model}/checkpoints/weights/a");
    let path = format!("tinker://{model}/weights/a");
    let body = |value: Value| value.to_string().into_bytes();
    let requests: Vec<(&str, String, Vec<u8>)> = vec![
        ("POST", "/api/v1/create_session".into(), body(json!({"tags": [], "sdk_version": "1"}))),
        ("POST", "/api/v1/create_model".into(), body(create_model(&session, 1))),
        ("POST", "/api/v1/optim_step".into(), body(step(&model, 2, 0.1))),
        (
            "POST",
            "/api/v1/create_sampling_session".into(),
            body(json!({"session_id": session, "sampling_session_seq_id": 1, "base_model": MODEL})),
        ),
        (
            "POST",
            "/api/v1/asample".into(),
            body(json!({
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "seq_id": 0,
                "sampling_params": {"max_tokens": 2}, "sampling_session_id": sampler,
            })),
        ),
        ("DELETE", checkpoint.clone(), vec![]),
        ("POST", format!("{checkpoint}/publish"), vec![]),
        ("PUT", format!("{checkpoint}/ttl"), body(json!({"ttl_seconds": 7200}))),
        (
            "POST",
            "/api/v1/copy_weights".into(),
            body(json!({"source_path": path, "destination_project_id": "p"})),
        ),
        ("PUT", format!("/api/v1/sessions/{session}/project"), body(json!({"project_id": "p"}))),
        (
            "POST",
            format!("/api/v1/sessions/{session}/finish"),
            body(json!({"reason": {"type": "success"}, "detail": null})),
        ),
        (
            "POST",
            "/api/v1/join_sampling_session".into(),
            body(json!({"sampling_session_id": sampler})),
        ),
    ];
    // Limits that allow no write, a part of a payload, and a part of a commit.
    for limit in [0, process.payloads() + 1, process.payloads() + 30, process.wal() + 1_000] {
        process.fill_disk(limit);
        for (method, path, body) in &requests {
            let (status, rejected) = http.send(method, path, &[], body.clone()).await;
            assert_eq!(status, 503, "{method} {path}: {rejected}");
            assert!(
                rejected["detail"].as_str().unwrap().contains("nothing was changed"),
                "{rejected}"
            );
        }
        process.free_disk();
        assert_eq!(visible_state(&http, &session, &model).await, before, "limit of {limit} bytes");
    }
    // The rejected requests have left nothing behind for the next start.
    let length = process.payloads();
    process.kill();
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    assert_eq!(process.payloads(), length);
    assert_eq!(visible_state(&http, &session, &model).await, before);
    assert_eq!(folders(data.path()), folders_before);
    // All requests succeed now, except those for a checkpoint or session that an earlier one has
    // deleted or ended.
    for (method, path, body) in &requests {
        let (status, response) = http.send(method, path, &[], body.clone()).await;
        let deleted =
            path.contains("/publish") || path.contains("/ttl") || path.contains("copy_weights");
        let ended = path.contains("join");
        assert!(
            status == 200 || (status == 404 && (deleted || ended)),
            "{method} {path}: {status} {response}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_does_not_fit_fails_and_training_continues() {
    let data = tempfile::tempdir().unwrap();
    let process = Process::start(data.path());
    let service = crate::harness::client(&process.url);
    let model = service
        .create_lora_training_client(tinkex::LoraOptions::new(MODEL).rank(32).seed(1))
        .await
        .unwrap();
    let train = async || {
        let batch = vec![tinkex::Datum::completion([5, 6], [7]).unwrap()];
        let adam = tinkex::AdamParams::with_learning_rate(1e-2);
        model.step(batch, tinkex::LossFn::CrossEntropy, adam).await.unwrap();
    };
    train().await;
    let folders_before = folders(data.path());
    // Allow the files of the database but not the files of a checkpoint. Truncating the WAL makes it
    // smaller than the limit.
    let limit_disk = || {
        process.free_disk();
        let database = rusqlite::Connection::open(data.path().join("metadata.sqlite")).unwrap();
        database.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
        process.fill_disk(128 << 10);
    };
    for _ in 0..2 {
        limit_disk();
        let error = model.save_state("big").await.unwrap_err();
        assert!(error.to_string().contains("adapter_model.safetensors"), "{error}");
        limit_disk();
        let error = model.save_weights_for_sampler("big").await.unwrap_err();
        assert_eq!(error.category(), Some(tinkex::ErrorCategory::Server), "{error}");
        limit_disk();
        assert!(model.save_weights_and_get_sampling_client().await.is_err());
    }
    limit_disk();
    train().await;
    assert_eq!(folders(data.path()), folders_before, "incomplete folders are removed");
    process.free_disk();
    train().await;
    model.save_state("big").await.unwrap();
    model.save_weights_for_sampler("big").await.unwrap();
    let list = service.rest().list_checkpoints(model.model_id().clone()).await.unwrap();
    assert_eq!(list.checkpoints.len(), 2);
}

/// The next request would have trained a new adapter instead of the checkpoint.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_whose_first_snapshot_does_not_fit_cannot_be_used() {
    let data = tempfile::tempdir().unwrap();
    let process = Process::start(data.path());
    let service = crate::harness::client(&process.url);
    let source = service
        .create_lora_training_client(tinkex::LoraOptions::new(MODEL).rank(32).seed(1))
        .await
        .unwrap();
    let path = source.save_state("source").await.unwrap().to_string();
    let http = Http::new(&process.url);
    let session = http.session().await;
    // Allow the files of the database but not the files of a snapshot.
    let database = rusqlite::Connection::open(data.path().join("metadata.sqlite")).unwrap();
    database.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    drop(database);
    process.fill_disk(128 << 10);
    let load = json!({
        "session_id": session, "model_seq_id": 0, "path": path, "optimizer": false,
        "type": "load_weights",
    });
    let (status, future) = http.post("/load_weights", load).await;
    assert_eq!(status, 200, "{future}");
    let loaded = http.result(&future).await;
    assert!(loaded.to_string().contains("adapter_model.safetensors"), "{loaded}");
    process.free_disk();
    let model = future["model_id"].as_str().unwrap();
    let (status, response) = http.post("/optim_step", step(model, 1, 0.1)).await;
    let response = if status == 200 { http.result(&response).await } else { response };
    assert!(response.to_string().contains("its creation failed"), "{response}");
}

/// A client could act on a result that the next process computes again.
#[tokio::test(flavor = "multi_thread")]
async fn a_result_whose_commit_failed_is_not_shown() {
    let data = tempfile::tempdir().unwrap();
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let session = http.session().await;
    let model = http.model(&session).await;
    let (status, future) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    assert_eq!(status, 200, "{future}");
    let finished = http.metrics().await["requests_total"];
    process.fill_disk(0);
    // Number 2 runs once number 1 has been rejected. Its result cannot be written.
    let invalid = json!({"model_id": model, "seq_id": 1, "path": "a b", "type": "save_weights"});
    assert_eq!(http.post("/save_weights", invalid.clone()).await.0, 400);
    while http.metrics().await["requests_total"] == finished {}
    let calls = http.metrics().await["http_requests_total"];
    let poll = async {
        let url = format!("{}/api/v1/retrieve_future", process.url);
        let body = json!({"request_id": future["request_id"]}).to_string();
        let response = crate::harness::http_client().post(url).body(body).send().await.ok()?;
        response.text().await.ok()
    };
    let stop = async {
        // Wait until the poll has arrived. Every request for metrics counts, too.
        let mut own = 1;
        while http.metrics().await["http_requests_total"] <= calls + own {
            own += 1;
        }
        process.send_signal(rustix::process::Signal::TERM);
    };
    let (shown, ()) = tokio::join!(poll, stop);
    assert!(!shown.as_ref().is_some_and(|text| text.contains("metrics")), "{shown:?}");
    assert!(process.wait().success());

    // The next process executes the request again.
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    assert_eq!(http.post("/save_weights", invalid).await.0, 400);
    let result = http.result(&future).await;
    assert!(result["metrics"].is_object(), "{result}");
}
