//! Damaged files, and other programs that read the database.

use std::path::{Path, PathBuf};

use rusqlite::Connection;
use serde_json::{Value, json};
use tinkex_server::Server;

use crate::harness::{Http, MODEL, TestServer, create_model, options, step};

fn database(data: &Path) -> Connection {
    Connection::open(data.join("metadata.sqlite")).unwrap()
}

/// Modifies the first byte of the first payload that starts with `text`.
fn damage(data: &Path, text: &str) {
    let path = data.join("payloads");
    let mut bytes = std::fs::read(&path).unwrap();
    let mut starts = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(text.as_bytes()));
    let at = starts.next().unwrap();
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_payload_fails_only_the_requests_that_need_it() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (_, finished) = http.post("/optim_step", step(&model, 1, 0.1)).await;
    http.result(&finished).await;
    let save = json!({"model_id": model, "path": "intact", "seq_id": 2, "type": "save_weights"});
    let (_, saved) = http.post("/save_weights", save).await;
    http.result(&saved).await;
    // Number 3 is missing, so the others stay queued.
    let futures: Vec<Value> = {
        let mut futures = Vec::new();
        for seq in [4, 5] {
            let body = format!("{{\"a\":{seq},{}", &step(&model, seq, 0.1).to_string()[1..]);
            let sent = http.send("POST", "/api/v1/optim_step", &[], body.into_bytes()).await;
            assert_eq!(sent.0, 200, "{}", sent.1);
            futures.push(sent.1);
        }
        futures
    };
    test_server.server.stop().await;
    damage(test_server.data.path(), "{\"a\":4");
    damage(test_server.data.path(), "{\"metrics\"");

    let mut options = options(test_server.data.path());
    options.timeouts.sequence_gap = std::time::Duration::ZERO;
    let server = Server::start(options).await.unwrap();
    let http = Http::new(&server.base_url());
    for future in [&futures[0], &finished] {
        let failed = http.result(future).await;
        assert_eq!(failed["category"], "server", "{failed}");
        assert!(failed["error"].as_str().unwrap().contains("damaged"), "{failed}");
    }
    assert!(http.result(&futures[1]).await["metrics"].is_object());
    assert!(http.result(&saved).await["path"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_its_payload_file_does_not_start() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    http.model(&session).await;
    test_server.server.stop().await;
    std::fs::remove_file(test_server.data.path().join("payloads")).unwrap();
    let error = Server::start(options(test_server.data.path())).await.unwrap_err().to_string();
    assert!(error.contains("empty or missing") && error.contains("backup"), "{error}");
}

/// Runs queries like those in `docs/server.md`.
#[tokio::test(flavor = "multi_thread")]
async fn other_programs_may_read_the_database_while_the_server_runs() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (status, unfinished) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    assert_eq!(status, 200, "{unfinished}");
    let save = json!({"model_id": model, "path": "a", "seq_id": 1, "type": "save_weights"});
    let database = database(test_server.data.path());
    let text = |sql: &str| -> Vec<String> {
        let mut statement = database.prepare(sql).unwrap();
        let rows = statement.query_map([], |row| row.get::<_, String>(0)).unwrap();
        rows.map(Result::unwrap).collect()
    };
    // A long read transaction does not block the server.
    database.execute_batch("BEGIN").unwrap();
    let unfinished_requests =
        "SELECT kind || ' ' || seq || ' ' || session FROM requests WHERE result_payload IS NULL";
    assert_eq!(text(unfinished_requests), [format!("optim_step 2 {session}")]);
    let (_, saved) = http.post("/save_weights", save).await;
    http.result(&saved).await;
    http.result(&unfinished).await;
    database.execute_batch("COMMIT").unwrap();
    assert_eq!(text(unfinished_requests), Vec::<String>::new());
    assert_eq!(text("SELECT id FROM sessions WHERE NOT ended"), [session.as_str()]);
    let runs = "SELECT id || ' ' || base_model || ' ' || last_seq || ' ' || session FROM runs";
    assert_eq!(text(runs), [format!("{model} {MODEL} 2 {session}")]);
    let checkpoints = "SELECT path FROM checkpoints WHERE size_bytes > 0 AND expires_at IS NULL";
    assert_eq!(text(checkpoints), [format!("tinker://{model}/weights/a")]);
    assert_eq!(text("SELECT meter || ' ' || count FROM usage"), ["checkpoints 1"]);
    assert_eq!(text("SELECT json_extract(result_kind, '$') FROM requests"), ["json"; 3]);

    // A write transaction of another program blocks until the timeout; the request is rejected.
    database.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (status, rejected) = http.post("/optim_step", step(&model, 3, 0.1)).await;
    assert_eq!(status, 503, "{rejected}");
    database.execute_batch("ROLLBACK").unwrap();
    let (status, next) = http.post("/optim_step", step(&model, 3, 0.1)).await;
    assert_eq!(status, 200, "{next}");
    assert!(http.result(&next).await["metrics"].is_object());
}

/// Returns the folders of weights whose names start with `prefix`.
fn folders(data: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(data.join("weights")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(prefix)).collect()
}

/// Flips a bit of a weight in the adapter of a folder. The file can still be read.
fn flip_weight(folder: &Path) {
    let path = folder.join("adapter_model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
}

/// Asserts that a request failed because of damage to `object`, and that its message contains no
/// path of the server.
fn assert_damaged(failed: &Value, object: &str, data: &Path) {
    let message = failed["error"].as_str().or(failed["detail"].as_str()).unwrap_or_default();
    assert!(message.contains("damaged") && message.contains(object), "{failed}");
    assert!(!failed.to_string().contains(data.to_str().unwrap()), "{failed}");
}

/// One flipped bit changed a loss silently.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_checkpoint_is_neither_trained_nor_sampled_nor_downloaded() {
    let test_server = TestServer::new().await;
    let data = test_server.data.path();
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let training = http.save(&model, 1, "training").await;
    let save = json!({"model_id": model, "path": "sampler", "seq_id": 2,
                      "type": "save_weights_for_sampler"});
    let (_, saved) = http.post("/save_weights_for_sampler", save).await;
    let sampler = http.result(&saved).await["path"].as_str().unwrap().to_owned();
    let load = async |n: u32| {
        let load = json!({"session_id": session, "model_seq_id": n, "path": training,
                          "optimizer": true, "type": "load_weights"});
        let (status, loaded) = http.post("/load_weights", load).await;
        assert_eq!(status, 200, "{loaded}");
        http.result(&loaded).await
    };
    assert!(load(1).await["model_id"].is_string(), "an intact checkpoint is loaded");
    for kind in ["weights-training", "sampler_weights-sampler"] {
        let prefix = format!("{}-{kind}", model.replace(':', "_"));
        let found = folders(data, &prefix);
        assert_eq!(found.len(), 1, "{prefix}");
        flip_weight(&found[0]);
    }

    assert_damaged(&load(2).await, &training, data);
    let (_, step_after) = http.post("/optim_step", step(&model, 3, 0.1)).await;
    assert!(http.result(&step_after).await["metrics"].is_object(), "other models continue");

    let create = json!({"session_id": session, "sampling_session_seq_id": 7,
                        "model_path": sampler});
    let (status, created) = http.post("/create_sampling_session", create).await;
    assert_eq!(status, 200, "{created}");
    let sample = json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "seq_id": 0,
        "sampling_params": {"max_tokens": 2},
        "sampling_session_id": created["sampling_session_id"],
    });
    let (_, sample) = http.post("/asample", sample).await;
    assert_damaged(&http.result(&sample).await, &sampler, data);

    let checkpoint = format!("/api/v1/training_runs/{model}/checkpoints/sampler_weights/sampler");
    let (status, failed) = http.get(&format!("{checkpoint}/external_weights_urls")).await;
    assert_eq!(status, 500, "{failed}");
    assert_damaged(&failed, &sampler, data);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_snapshot_fails_its_run_alone_or_is_replaced_by_a_checkpoint() {
    let test_server = TestServer::with(|options| {
        options.timeouts.snapshot_after = std::time::Duration::ZERO;
    })
    .await;
    let data = test_server.data.path().to_owned();
    let http = test_server.http();
    let session = http.session().await;
    let damaged = http.model(&session).await;
    let (_, created) = http.post("/create_model", create_model(&session, 1)).await;
    let rescued = http.result(&created).await["model_id"].as_str().unwrap().to_owned();
    for model in [&damaged, &rescued] {
        let (_, future) = http.post("/optim_step", step(model, 1, 0.1)).await;
        assert!(http.result(&future).await["metrics"].is_object());
    }
    test_server.server.stop().await;
    let snapshots = folders(&data, "snapshot-");
    assert_eq!(snapshots.len(), 2, "{snapshots:?}");

    // Train on without snapshots, and save a checkpoint of the second model.
    let server = Server::start(options(&data)).await.unwrap();
    let http = Http::new(&server.base_url());
    let (_, future) = http.post("/optim_step", step(&rescued, 2, 0.1)).await;
    assert!(http.result(&future).await["metrics"].is_object());
    http.save(&rescued, 3, "later").await;
    // Drop instead of stopping: the stop would take a snapshot.
    drop(server);
    snapshots.iter().for_each(|folder| flip_weight(folder));

    let server = Server::start(options(&data)).await.unwrap();
    let http = Http::new(&server.base_url());
    let (_, future) = http.post("/optim_step", step(&damaged, 2, 0.1)).await;
    assert_damaged(&http.result(&future).await, &damaged, &data);
    let (_, future) = http.post("/optim_step", step(&rescued, 4, 0.1)).await;
    let result = http.result(&future).await;
    assert!(result["metrics"].is_object(), "{result}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_byte_in_a_payload_header_loses_nothing() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (_, finished) = http.post("/optim_step", step(&model, 1, 0.1)).await;
    let expected = http.result(&finished).await;
    test_server.server.stop().await;
    let path = test_server.data.path().join("payloads");
    let mut bytes = std::fs::read(&path).unwrap();
    // The first header is behind the first eight bytes.
    bytes[9] ^= 0x40;
    std::fs::write(&path, &bytes).unwrap();
    let report = tinkex_server::check_data_folder(test_server.data.path(), false).unwrap();
    assert_eq!(report.payloads.state, tinkex_server::FileState::Damaged, "{report:?}");
    assert!(report.lost.is_empty(), "{report:?}");
    let server = Server::start(options(test_server.data.path())).await.unwrap();
    let http = Http::new(&server.base_url());
    assert_eq!(http.result(&finished).await, expected);
    let in_use = tinkex_server::check_data_folder(test_server.data.path(), false);
    assert!(in_use.unwrap_err().to_string().contains("in use"));
}

/// A removed lock file, or a file system with locks per machine, lets a second server start.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_stops_when_another_one_takes_over_its_folder() {
    let test_server = TestServer::new().await;
    let data = test_server.data.path();
    let first = test_server.http();
    let session = first.session().await;
    let model = first.model(&session).await;
    std::fs::remove_file(data.join("lock")).unwrap();
    let second_server = Server::start(options(data)).await.unwrap();
    let second = Http::new(&second_server.base_url());
    let (status, refused) = first.post("/optim_step", step(&model, 1, 0.1)).await;
    assert_eq!(status, 503, "{refused}");
    let health = test_server.server.broken().await;
    assert_eq!(health, tinkex_server::ServerHealth::Superseded);
    let (status, refused) = first.get("/api/v1/sessions").await;
    assert_eq!(status, 503, "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("another server"), "{refused}");
    drop(test_server.server);
    let (_, future) = second.post("/optim_step", step(&model, 1, 0.1)).await;
    assert!(second.result(&future).await["metrics"].is_object());
}

/// Removes the bytes of a run from every file, also from a small payload file.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_run_leaves_no_tokens_in_the_data_folder() {
    let test_server = TestServer::with(|options| {
        options.timeouts.expiry_interval = std::time::Duration::from_millis(20);
    })
    .await;
    let data = test_server.data.path();
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (_, saved) = http
        .post(
            "/save_weights_for_sampler",
            json!({"model_id": model, "path": "s", "seq_id": 1,
                   "type": "save_weights_for_sampler"}),
        )
        .await;
    let path = http.result(&saved).await["path"].as_str().unwrap().to_owned();
    let sampler = json!({"session_id": session, "sampling_session_seq_id": 7, "model_path": path});
    let (_, sampler) = http.post("/create_sampling_session", sampler).await;
    // A sequence of tokens that occurs nowhere else.
    let prompt: Vec<u32> = (40..80).rev().collect();
    let sample = json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]}, "seq_id": 0,
        "sampling_params": {"max_tokens": 2},
        "sampling_session_id": sampler["sampling_session_id"],
    });
    let (_, sample) = http.post("/asample", sample).await;
    http.sampled(&sample).await;
    let as_json: Vec<u8> = prompt.iter().map(u32::to_string).collect::<Vec<_>>().join(",").into();
    let as_blob: Vec<u8> = prompt.iter().flat_map(|token| token.to_le_bytes()).collect();
    let markers = [&as_json[..20], &as_blob[..40]];
    let contains_marker = || {
        let files = std::fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path());
        let contents = files.filter_map(|path| std::fs::read(path).ok());
        contents.into_iter().any(|bytes| {
            markers.iter().any(|marker| bytes.windows(marker.len()).any(|part| part == *marker))
        })
    };
    assert!(contains_marker(), "the prompt is stored");
    http.post(
        &format!("/sessions/{session}/finish"),
        json!({"reason": {"type": "success"}, "detail": null}),
    )
    .await;
    let (status, deleted) =
        http.send("DELETE", &format!("/api/v1/training_runs/{model}"), &[], Vec::new()).await;
    assert_eq!(status, 200, "{deleted}");
    // The deletion has queued the removal of the results and the compaction. A session is written
    // after both.
    for _ in 0..3 {
        http.session().await;
    }
    assert!(!contains_marker());
}
