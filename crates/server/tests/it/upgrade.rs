//! Upgrades: this version opens the data folders of earlier versions and continues with equal
//! results.
//!
//! `tests/data/format-N` is the data folder of the first version with format N; see
//! [`write_the_folder_of_this_format`]. Never change or remove such a folder: it stands for the data
//! of users.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use tinkex_server::{BUILT_IN, Server, ServerOptions};
use tinkex_wire::{Datum, ForwardBackward, ForwardBackwardOutput, LossFn, Seq};

use crate::harness::{Http, step};

/// Format of the current version.
const FORMAT: u32 = 1;

fn folder_of(format: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/format-{format}"))
}

/// Returns the options of a server with the built-in model, on one thread.
fn options(data: &Path) -> ServerOptions {
    let mut options = ServerOptions::new(data);
    options.threads = 1;
    // Clients of the stored sessions return years later.
    options.timeouts.session_expiry = std::time::Duration::ZERO;
    options.timeouts.ended_session_retention = std::time::Duration::ZERO;
    options
}

/// Sends a training pass, waits for it and returns its metrics.
async fn pass_loss(http: &Http, model: &str, seq: u64) -> Value {
    let data = vec![Datum::completion([5, 6, 7], [8, 9, 10]).unwrap(); 2];
    let pass = ForwardBackward::new(model, data, LossFn::CrossEntropy).seq_id(Seq::new(seq));
    let headers = [("content-type", "application/x-protobuf")];
    let body = pass.to_proto().unwrap().to_vec();
    let (status, future) = http.send("POST", "/api/v1/forward_backward", &headers, body).await;
    assert_eq!(status, 200, "{future}");
    let output = ForwardBackwardOutput::from_proto(&http.proto_result(&future).await).unwrap();
    json!(output.metrics)
}

/// Sends the requests that continue the stored run: the missing pass, and a sample from the stored
/// checkpoint. Returns the results.
async fn continue_run(http: &Http, stored: &Value) -> Value {
    let text = |name: &str| stored[name].as_str().unwrap().to_owned();
    let model = text("model");
    let missing = pass_loss(http, &model, 4).await;
    // Was accepted before the server stopped, and waited for the pass above.
    let waiting = http.result(&json!({"request_id": text("waiting")})).await;
    let sample = json!({
        "sampling_session_id": text("sampler"), "seq_id": 1, "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 8, "temperature": 0.0, "seed": 7},
        "type": "sample",
    });
    let (_, sampled) = http.post("/asample", sample).await;
    let sampled = http.sampled(&sampled).await;
    json!({"missing": missing, "waiting": waiting, "sampled": sampled})
}

/// Compares results; numbers may differ by the rounding of other processors.
fn assert_equal(found: &Value, expected: &Value, path: &str) {
    match (found, expected) {
        (Value::Object(found), Value::Object(expected)) => {
            let keys = |map: &serde_json::Map<String, Value>| {
                map.keys().cloned().collect::<std::collections::BTreeSet<_>>()
            };
            assert_eq!(keys(found), keys(expected), "{path}");
            for (key, value) in found {
                assert_equal(value, &expected[key], &format!("{path}.{key}"));
            }
        }
        (Value::Array(found), Value::Array(expected)) => {
            assert_eq!(found.len(), expected.len(), "{path}");
            for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
                assert_equal(found, expected, &format!("{path}[{i}]"));
            }
        }
        (Value::Number(found), Value::Number(expected)) => {
            let [found, expected] = [found, expected].map(|number| number.as_f64().unwrap());
            assert!((found - expected).abs() <= 1e-3 * expected.abs().max(1.0), "{path}: {found}");
        }
        _ => assert_eq!(found, expected, "{path}"),
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_data_folder_of_every_earlier_format_is_opened_and_continued() {
    for format in 1..=FORMAT {
        let data = TempDir::new().unwrap();
        copy(&folder_of(format).join("data"), data.path());
        let stored = std::fs::read(folder_of(format).join("expected.json")).unwrap();
        let stored: Value = serde_json::from_slice(&stored).unwrap();
        let server = Server::start(options(data.path())).await.unwrap();
        let http = Http::new(&server.base_url());
        let finished = http.result(&json!({"request_id": stored["finished"]})).await;
        assert_equal(&finished, &stored["finished_result"], "finished");
        let results = continue_run(&http, &stored).await;
        assert_equal(&results, &stored["results"], "results");
        server.stop().await;
    }
}

/// Writes the data folder of this version to `tests/data`. Run it once, before the first release
/// with a new format:
///
/// ```text
/// cargo test -p tinkex-server --test it -- --ignored --exact upgrade::write_the_folder_of_this_format
/// ```
#[tokio::test(flavor = "multi_thread")]
#[ignore = "writes a folder that is checked in"]
async fn write_the_folder_of_this_format() {
    let folder = folder_of(FORMAT);
    assert!(!folder.exists(), "the folder of a released format never changes");
    let data = folder.join("data");
    let server = Server::start(options(&data)).await.unwrap();
    let http = Http::new(&server.base_url());
    let session = http.session().await;
    let create = json!({
        "session_id": session, "model_seq_id": 0, "base_model": BUILT_IN,
        "lora_config": {"rank": 1, "seed": 3, "train_unembed": false, "train_mlp": false},
        "type": "create_model",
    });
    let (_, created) = http.post("/create_model", create).await;
    let model = http.result(&created).await["model_id"].as_str().unwrap().to_owned();
    pass_loss(&http, &model, 1).await;
    let (_, finished) = http.post("/optim_step", step(&model, 2, 0.01)).await;
    let finished_result = http.result(&finished).await;
    let path = http.save(&model, 3, "kept").await;
    let sampler = json!({
        "session_id": session, "sampling_session_seq_id": 0, "model_path": path,
        "type": "create_sampling_session",
    });
    let (_, sampler) = http.post("/create_sampling_session", sampler).await;
    // Sequence number 4 is missing, so this one stays queued.
    let (_, waiting) = http.post("/optim_step", step(&model, 5, 0.01)).await;
    server.stop().await;

    let mut stored = json!({
        "session": session, "model": model, "finished": finished["request_id"],
        "finished_result": finished_result, "waiting": waiting["request_id"],
        "sampler": sampler["sampling_session_id"],
    });
    // The results that every later version must give, from a copy.
    let copied = TempDir::new().unwrap();
    copy(&data, copied.path());
    let server = Server::start(options(copied.path())).await.unwrap();
    stored["results"] = continue_run(&Http::new(&server.base_url()), &stored).await;
    server.stop().await;
    for unused in ["lock", "tokenizer"] {
        let path = data.join(unused);
        let _ =
            if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    }
    let expected = serde_json::to_string_pretty(&stored).unwrap();
    std::fs::write(folder.join("expected.json"), expected + "\n").unwrap();
}
