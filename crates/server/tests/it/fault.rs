//! Faults of the disk that pass: promised requests are executed again, and later ones wait.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::Connection;
use serde_json::{Value, json};
use tinkex_server::Server;
use tinkex_wire::{Datum, ForwardBackward, LossFn, Seq};

use crate::harness::{Http, TestServer, create_model, options, step};

/// Returns the body of a `forward_backward` request as protobuf.
fn pass(model: &str, seq: u64) -> Vec<u8> {
    let data = vec![Datum::completion([5, 6, 7], [8, 9, 10]).unwrap(); 2];
    let request = ForwardBackward::new(model, data, LossFn::CrossEntropy).seq_id(Seq::new(seq));
    request.to_proto().unwrap().to_vec()
}

async fn submit_pass(http: &Http, model: &str, seq: u64) -> Value {
    let headers = [("content-type", "application/x-protobuf")];
    let body = pass(model, seq);
    let (status, pass) = http.send("POST", "/api/v1/forward_backward", &headers, body).await;
    assert_eq!(status, 200, "{pass}");
    pass
}

/// Submits a training pass and an optimizer step.
async fn submit(http: &Http, model: &str, seq: u64) -> [Value; 2] {
    let (status, pass) = http.send("POST", "/api/v1/forward_backward", &[], pass(model, seq)).await;
    assert_eq!(status, 200, "{pass}");
    let (status, step) = http.post("/optim_step", step(model, seq + 1, 1e-2)).await;
    assert_eq!(status, 200, "{step}");
    [pass, step]
}

/// Replaces a file of a model's snapshot by a link to itself: opening it fails with ELOOP, which is
/// neither damage nor a missing file.
struct BrokenFile {
    path: PathBuf,
    aside: PathBuf,
}

impl BrokenFile {
    fn new(data: &Path) -> Self {
        let folders = std::fs::read_dir(data.join("weights")).unwrap();
        let snapshot = folders
            .map(|entry| entry.unwrap().path())
            .find(|path| path.file_name().unwrap().to_str().unwrap().starts_with("snapshot-"));
        let path = snapshot.unwrap().join("adapter_model.safetensors");
        let aside = data.join("aside");
        std::fs::rename(&path, &aside).unwrap();
        std::os::unix::fs::symlink(&path, &path).unwrap();
        Self { path, aside }
    }

    fn repair(&self) {
        std::fs::remove_file(&self.path).unwrap();
        std::fs::rename(&self.aside, &self.path).unwrap();
    }
}

/// Starts a server with a trained model, stops it and breaks the model's snapshot. Returns the
/// model's id.
async fn with_broken_snapshot() -> (TestServer, String, BrokenFile) {
    // Only the stop takes a snapshot.
    let test_server = TestServer::with(|options| {
        options.timeouts.snapshot_after = Duration::from_secs(3_600);
    })
    .await;
    let http = test_server.http();
    let model = http.model(&http.session().await).await;
    for future in submit(&http, &model, 1).await {
        wait(&http, &future).await;
    }
    let TestServer { server, data } = test_server;
    server.stop().await;
    let broken = BrokenFile::new(data.path());
    let server = Server::start(options(data.path())).await.unwrap();
    (TestServer { server, data }, model, broken)
}

/// Waits until a request is finished. Returns the body of the response.
async fn wait(http: &Http, future: &Value) -> bytes::Bytes {
    loop {
        let body = http.poll(future).await;
        if !body.windows(9).any(|part| part == b"try_again") {
            return body;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_training_pass_survives_a_fault_that_passes() {
    // What the requests give without a fault.
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let model = http.model(&http.session().await).await;
    let mut expected = Vec::new();
    for seq in [1, 3] {
        expected.clear();
        for future in submit(&http, &model, seq).await {
            expected.push(wait(&http, &future).await);
        }
    }

    let (test_server, model, broken) = with_broken_snapshot().await;
    let http = test_server.http();
    let futures = submit(&http, &model, 3).await;
    loop {
        let metrics = http.metrics().await;
        assert_eq!(metrics["failed_requests_total"], 0, "the fault is retried");
        if metrics["retries_total"] >= 2 {
            break;
        }
    }
    // Other models go on meanwhile.
    let session = http.session().await;
    let (_, created) = http.post("/create_model", create_model(&session, 1)).await;
    let other = http.result(&created).await["model_id"].as_str().unwrap().to_owned();
    for future in submit(&http, &other, 1).await {
        wait(&http, &future).await;
    }
    broken.repair();
    let mut results = Vec::new();
    for future in &futures {
        results.push(wait(&http, future).await);
    }
    // The optimizer step has the gradient of the pass: it ran after it.
    assert_eq!(results, expected);
}

/// A request that kills the process must not escape by faults in between.
#[tokio::test(flavor = "multi_thread")]
async fn a_fault_does_not_clear_the_deaths_that_are_attributed_to_a_request() {
    let (test_server, model, broken) = with_broken_snapshot().await;
    let pass = submit_pass(&test_server.http(), &model, 3).await;
    let TestServer { server, data } = test_server;
    server.stop().await;
    let database = Connection::open(data.path().join("metadata.sqlite")).unwrap();
    database.execute("UPDATE requests SET starts = 3", []).unwrap();
    drop(database);
    std::fs::create_dir_all(data.path().join("passes")).unwrap();
    let record = data.path().join("passes/crashes.json");
    let id = pass["request_id"].as_str().unwrap();
    let deaths = json!({"executing": null, "deaths": {id: {"place": 0, "count": 2}}});
    std::fs::write(&record, deaths.to_string()).unwrap();

    let server = Server::start(options(data.path())).await.unwrap();
    let http = Http::new(&server.base_url());
    while http.metrics().await["retries_total"] < 2 {}
    let found: Value = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
    assert_eq!(found, deaths);
    broken.repair();
    let body = wait(&http, &pass).await;
    assert!(!body.windows(8).any(|part| part == b"category"), "{body:?}");
    assert!(!record.exists(), "the process has survived the request");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fault_that_lasts_fails_the_request_and_those_behind_it() {
    let (test_server, model, broken) = with_broken_snapshot().await;
    let TestServer { server, data } = test_server;
    server.stop().await;
    let mut options = options(data.path());
    options.timeouts.fault_retry = Duration::from_millis(1);
    let server = Server::start(options).await.unwrap();
    let http = Http::new(&server.base_url());
    // Number 3 arrives last, so that both are queued when it fails.
    let (status, step_4) = http.post("/optim_step", step(&model, 4, 1e-2)).await;
    assert_eq!(status, 200, "{step_4}");
    let pass_3 = submit_pass(&http, &model, 3).await;
    let failed = http.result(&pass_3).await;
    assert_eq!(failed["category"], "server", "{failed}");
    assert!(failed["error"].as_str().unwrap().contains("snapshot of model"), "{failed}");
    let failed = http.result(&step_4).await;
    assert_eq!(failed["category"], "server", "{failed}");
    assert!(failed["error"].as_str().unwrap().contains("seq_id 3"), "{failed}");
    broken.repair();
    for future in submit(&http, &model, 5).await {
        let body = wait(&http, &future).await;
        assert!(!body.windows(8).any(|part| part == b"category"), "{body:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_file_fails_at_once() {
    let (test_server, model, broken) = with_broken_snapshot().await;
    std::fs::remove_file(&broken.path).unwrap();
    std::fs::write(&broken.path, "damaged").unwrap();
    let http = test_server.http();
    let [pass, _] = submit(&http, &model, 3).await;
    let failed = http.result(&pass).await;
    assert!(failed["error"].as_str().unwrap().contains("damaged"), "{failed}");
    assert_eq!(http.metrics().await["retries_total"], 0);
}
