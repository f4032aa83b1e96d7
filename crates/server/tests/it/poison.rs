//! A request that kills the server process is executed a limited number of times.

use std::path::Path;

use rusqlite::Connection;
use serde_json::{Value, json};

use crate::harness::Http;
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
    for count in 1..=2 {
        let process = Process::start(data.path());
        let http = Http::new(&process.url);
        while starts(data.path(), &poison) < count {
            assert_eq!(http.get("/api/v1/healthz").await.0, 200);
        }
        process.kill();
    }

    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let failed = http.result(&poison).await;
    assert_eq!(failed["category"], "server", "{failed}");
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("the server process ended three times"), "{error}");
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
    let step = crate::harness::step(&model, 1, 1e-3);
    assert_eq!(http.post("/optim_step", step).await.0, 200);
    let saved = http.result(&saved).await;
    assert!(saved["path"].as_str().is_some_and(|path| path.ends_with("/weights/a")), "{saved}");
}
