//! A killed server restores its state and produces the same results.

use std::path::Path;

use serde_json::{Value, json};
use tinkex_wire::{Datum, ForwardBackward, ForwardBackwardOutput, LossFn, Seq};

use crate::harness::{Http, create_model, step};
use crate::process::Process;

fn pass(model: &str, seq: u64) -> Vec<u8> {
    let tokens = [u32::try_from(seq % 50).unwrap() + 3, 4, 5];
    let data = vec![Datum::completion(tokens, [9, 10]).unwrap(); 2];
    let request = ForwardBackward::new(model, data, LossFn::CrossEntropy).seq_id(Seq::new(seq));
    request.to_proto().unwrap().to_vec()
}

const PROTO: &[(&str, &str)] = &[("content-type", "application/x-protobuf")];

/// Polls until a pass is finished and returns the bits of its loss.
async fn loss(http: &Http, future: &Value) -> u64 {
    let body = http.proto_result(future).await;
    ForwardBackwardOutput::from_proto(&body).unwrap().metrics["loss:sum"].to_bits()
}

/// Runs thirty steps and kills the server after the passes with the given indices. Returns the bits
/// of the losses, and the final weights with the optimizer state.
async fn run(kills: &[u64]) -> (Vec<u64>, Vec<u8>) {
    let data = tempfile::tempdir().unwrap();
    let mut process = Process::start(data.path());
    let mut http = Http::new(&process.url);
    let session = http.session().await;
    let (_, created) = http.post("/create_model", create_model(&session, 0)).await;
    let model = format!("{session}:train:0");
    let mut futures = Vec::new();
    for n in 0..30 {
        let (status, future) =
            http.send("POST", "/api/v1/forward_backward", PROTO, pass(&model, 2 * n + 1)).await;
        assert_eq!(status, 200, "{future}");
        futures.push(future);
        if kills.contains(&n) {
            process.kill();
            process = Process::start(data.path());
            http = Http::new(&process.url);
            // A client that lost the response retries and gets the same request id.
            let (status, again) =
                http.send("POST", "/api/v1/forward_backward", PROTO, pass(&model, 2 * n + 1)).await;
            assert_eq!((status, &again), (200, &futures[futures.len() - 1]));
        }
        let (status, response) = http.post("/optim_step", step(&model, 2 * n + 2, 1e-2)).await;
        assert_eq!(status, 200, "{response}");
    }
    assert_eq!(http.result(&created).await["model_id"], model);
    let mut losses = Vec::new();
    for future in &futures {
        losses.push(loss(&http, future).await);
    }
    http.save(&model, 61, "end").await;
    let folder = std::fs::read_dir(data.path().join("weights"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_string_lossy().contains("-weights-end-"))
        .unwrap();
    let mut bytes = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    bytes.extend(std::fs::read(folder.join("optimizer.safetensors")).unwrap());
    (losses, bytes)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_run_is_bit_identical() {
    let uninterrupted = run(&[]).await;
    assert!(f64::from_bits(uninterrupted.0[29]) < f64::from_bits(uninterrupted.0[0]));
    assert_eq!(run(&[0, 7, 8, 20, 29]).await, uninterrupted);
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_samplers_and_results_are_restored() {
    let data = tempfile::tempdir().unwrap();
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let session = http.session().await;
    let model = http.model(&session).await;
    let save = json!({
        "model_id": model, "sampling_session_seq_id": 0, "seq_id": 1,
        "type": "save_weights_for_sampler",
    });
    let (_, saved) = http.post("/save_weights_for_sampler", save).await;
    let sampler = http.result(&saved).await["sampling_session_id"].clone();
    let request = json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
        "sampling_params": {"max_tokens": 200, "stop": []},
        "sampling_session_id": sampler, "seq_id": 0,
    });
    let (_, sample) = http.post("/asample", request.clone()).await;
    process.kill();

    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    assert_eq!(http.post("/asample", request).await.1, sample, "the same request id");
    let (status, info) = http.get(&format!("/api/v1/sessions/{session}")).await;
    assert_eq!((status, &info["sampler_ids"]), (200, &json!([sampler])));
    assert_eq!(http.sampled(&sample).await.len(), 200);
    let beat = http.post("/session_heartbeat", json!({"session_id": session})).await;
    assert_eq!(beat.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_keeps_everything_that_a_restart_needs() {
    let data = tempfile::tempdir().unwrap();
    let start = |data: &Path| {
        let mut options = crate::harness::options(data);
        // Compact and expire as much as possible, and never take a snapshot.
        options.limits.payload_bytes = 0;
        options.timeouts.expiry_interval = std::time::Duration::from_millis(5);
        options.timeouts.result_retention = std::time::Duration::ZERO;
        options.timeouts.snapshot_after = std::time::Duration::from_secs(3600);
        tinkex_server::Server::start(options)
    };
    let server = start(data.path()).await.unwrap();
    let http = Http::new(&server.base_url());
    let session = http.session().await;
    let (status, _) = http.post("/create_model", create_model(&session, 0)).await;
    assert_eq!(status, 200);
    let model = format!("{session}:train:0");
    let send = async |http: &Http, seq: u64| {
        let body = pass(&model, seq);
        let (status, reply) = http.send("POST", "/api/v1/forward_backward", PROTO, body).await;
        assert_eq!(status, 200, "{reply:?}");
        let (status, reply) = http.post("/optim_step", step(&model, seq + 1, 1e-2)).await;
        assert_eq!(status, 200, "{reply}");
    };
    for n in 0..5 {
        send(&http, 2 * n + 1).await;
    }
    let save = json!({"model_id": model, "path": "five", "seq_id": 11, "type": "save_weights"});
    assert_eq!(http.post("/save_weights", save).await.0, 200);
    let listed = format!("/api/v1/training_runs/{model}/checkpoints");
    while http.get(&listed).await.1["checkpoints"].as_array().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    // Once all results have expired, nothing is written any more.
    while http.metrics().await["requests"] > 0 {
        tokio::task::yield_now().await;
    }
    // Simulate a crash with the files from before the graceful stop. The last removal may still be
    // written: equal contents in two readings were on the disk at one time.
    let files = ["payloads", "metadata.sqlite-wal", "metadata.sqlite"];
    let read = || files.map(|name| std::fs::read(data.path().join(name)).unwrap());
    let mut copies = read();
    loop {
        let again = read();
        if again == copies {
            break;
        }
        copies = again;
    }
    server.stop().await;
    // Use another folder: SQLite would continue with the index of the first database while a
    // connection of the stopped server is open.
    let restored = tempfile::tempdir().unwrap();
    for (name, copy) in files.iter().zip(copies) {
        std::fs::write(restored.path().join(name), copy).unwrap();
    }
    std::fs::rename(data.path().join("weights"), restored.path().join("weights")).unwrap();

    let server = start(restored.path()).await.unwrap();
    let http = Http::new(&server.base_url());
    let save = json!({"model_id": model, "path": "again", "seq_id": 12, "type": "save_weights"});
    let (status, reply) = http.post("/save_weights", save).await;
    assert_eq!(status, 200, "{reply}");
    while http.get(&listed).await.1["checkpoints"].as_array().unwrap().len() < 2 {
        tokio::task::yield_now().await;
    }
    let weights = |name: &str| {
        let folders = std::fs::read_dir(restored.path().join("weights")).unwrap();
        let folder = folders
            .map(|entry| entry.unwrap().path())
            .find(|path| path.to_string_lossy().contains(&format!("-weights-{name}-")))
            .unwrap();
        std::fs::read(folder.join("adapter_model.safetensors")).unwrap()
    };
    assert_eq!(weights("five"), weights("again"), "the restored model is bit-identical");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_does_not_change_the_last_use_of_a_run() {
    let data = tempfile::tempdir().unwrap();
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let session = http.session().await;
    let model = http.model(&session).await;
    let path = format!("/api/v1/training_runs/{model}");
    let (_, before) = http.get(&path).await;
    assert!(before["last_request_time"].is_string(), "{before}");
    process.kill();
    let process = Process::start(data.path());
    let (_, after) = Http::new(&process.url).get(&path).await;
    assert_eq!(before["last_request_time"], after["last_request_time"]);
}
