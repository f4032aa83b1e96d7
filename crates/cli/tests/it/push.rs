//! `tinkex checkpoint push-hf`: what is uploaded.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use bytes::Bytes;
use serde_json::{Map, Value, json};
use tinkex::Env;
use tinkex::testing::{FakeServer, Reply, Route};
use tinkex_cli::{Environment, Input, Interrupt, LogScope, Terminals};

use crate::sink::Sink;

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";

/// Splits a safetensors file into its header and its data.
fn split_tensors(file: &[u8]) -> (Map<String, Value>, &[u8]) {
    let (length, rest) = file.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*length)).unwrap());
    (serde_json::from_slice(header).unwrap(), data)
}

/// Returns an adapter as the hosted service writes it: configuration and tensors.
fn service_adapter() -> (Bytes, Bytes) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/qwen3/adapter");
    let file = fs::read(golden.join(TENSORS)).unwrap();
    let (header, data) = split_tensors(&file);
    let rename = |name: String| name.replace(".lm_head.", ".model.unembed_tokens.");
    let header: Map<String, Value> =
        header.into_iter().map(|(name, tensor)| (rename(name), tensor)).collect();
    let header = Value::from(header).to_string();
    let length = u64::try_from(header.len()).unwrap().to_le_bytes();
    let config =
        json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": "all-linear" });
    (config.to_string().into(), [&length, header.as_bytes(), data].concat().into())
}

/// Runs the command with `options` against a Tinker service and a hub, which takes each file as a
/// large file. Returns the exit code, the error output and the server.
async fn run_push(options: &str) -> (u8, String, FakeServer) {
    let (config, tensors) = service_adapter();
    let files =
        [(CONFIG, config), (TENSORS, tensors), ("checkpoint_complete", Bytes::from_static(b"1"))];
    let urls: BTreeMap<&str, String> =
        files.iter().map(|(name, _)| (*name, format!("http://files.test/blob/{name}"))).collect();
    let urls = json!({ "urls": urls, "expires": "2099-01-01T00:00:00Z" });
    let info = json!({ "base_model": "org/base", "is_lora": true, "lora_rank": 4 });
    let mut server = FakeServer::new()
        .on(Route::ExternalWeightsUrls, Reply::json(&urls).always())
        .on(Route::WeightsInfo, Reply::json(&info).always())
        .on_path("GET /api/whoami-v2", Reply::json(json!({ "name": "me" })).always())
        .on_path("POST /api/repos/create", Reply::json(json!({})))
        .on_path("HEAD /me/x/resolve/main/README.md", Reply::status(404))
        .on_path("POST /api/validate-yaml", Reply::json(json!({ "errors": [], "warnings": [] })))
        .on_path("PUT /file", Reply::status(200).always())
        .on_path("POST /api/models/me/x/commit/main", Reply::json(json!({ "commitUrl": "u" })))
        .on_path_call("POST /api/models/me/x/preupload/main", |call| {
            let files = call.json()["files"].as_array().unwrap().clone();
            let large = |file: &Value| json!({ "path": file["path"], "uploadMode": "lfs" });
            Reply::json(json!({ "files": files.iter().map(large).collect::<Vec<_>>() }))
        })
        .on_path_call("POST /me/x.git/info/lfs/objects/batch", |call| {
            let oid = call.json()["objects"][0]["oid"].as_str().unwrap().to_owned();
            let upload = json!({ "href": format!("http://store.test/file?{oid}") });
            Reply::json(json!({ "objects": [{ "actions": { "upload": upload } }] }))
        });
    for (name, content) in files {
        server = server.on_path(&format!("GET /blob/{name}"), Reply::status(200).text(content));
    }
    let http = server.clone();
    let home = tempfile::tempdir().unwrap();
    let out = Sink::default();
    let err = Sink::default();
    let variables = [
        ("HOME", home.path().to_str().unwrap()),
        ("TINKER_BASE_URL", "http://a.test"),
        ("TINKER_API_KEY", "tml-env"),
        ("HF_ENDPOINT", "http://hub.test"),
        ("HF_TOKEN", "hf_secret"),
    ];
    let mut environment = Environment {
        variables: Env::from_pairs(variables),
        folder: home.path().to_owned(),
        out: Box::new(out.clone()),
        err: Box::new(err.clone()),
        input: Input::new(std::io::empty()),
        terminals: Terminals::default(),
        interrupt: Interrupt::default(),
        log_scope: LogScope::ThisThread,
        prepare: Box::new(move |client| client.http(http.clone())),
    };
    let line =
        format!("tinkex checkpoint push-hf tinker://r/external_weights/hf --repo me/x {options}");
    let line = line.split_whitespace().map(Into::into).collect();
    let exit = tinkex_cli::run(&mut environment, line).await;
    (exit.code(), err.text(), server)
}

/// Runs the command with `options`. Returns the uploaded files.
async fn push(options: &str) -> BTreeMap<String, Bytes> {
    let (exit, err, server) = run_push(options).await;
    assert_eq!(exit, 0, "{err}");
    let calls = server.calls();
    let commit = calls.iter().find(|call| call.path.contains("/commit/")).unwrap();
    let lines = String::from_utf8(commit.body.to_vec()).unwrap();
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let uploaded = lines.filter(|line| line["key"] == "lfsFile").map(|line| {
        let name = &line["value"]["path"];
        let oid = &line["value"]["oid"];
        let path = format!("/file?{}", oid.as_str().unwrap());
        let put = calls.iter().find(|call| call.path == path).unwrap();
        (name.as_str().unwrap().to_owned(), put.body.clone())
    });
    uploaded.collect()
}

#[tokio::test(start_paused = true)]
async fn the_tensors_of_the_hosted_service_are_uploaded_with_the_names_of_peft() {
    // The configuration is needed for the conversion, also if it is not uploaded.
    for (options, names) in [
        ("", &["README.md", CONFIG, TENSORS][..]),
        ("--allow-pattern *.safetensors", &["README.md", TENSORS]),
        ("--ignore-pattern *.json --no-model-card", &[TENSORS]),
    ] {
        let uploaded = push(options).await;
        assert_eq!(uploaded.keys().collect::<Vec<_>>(), names, "{options}");
        let (header, _) = split_tensors(&uploaded[TENSORS]);
        for matrix in ["A", "B"] {
            let name = format!("base_model.model.lm_head.lora_{matrix}.weight");
            assert!(header.contains_key(&name), "{options}: {:?}", header.keys());
        }
        assert!(!header.keys().any(|name| name.contains("unembed_tokens")), "{options}");
        if let Some(config) = uploaded.get(CONFIG) {
            let config: Value = serde_json::from_slice(config).unwrap();
            assert!(config["target_modules"].as_array().unwrap().contains(&"lm_head".into()));
            assert_eq!(config["base_model_name_or_path"], "org/base");
        }
    }
    let uploaded = push("--allow-pattern checkpoint_complete --no-model-card").await;
    assert_eq!(uploaded.keys().collect::<Vec<_>>(), ["checkpoint_complete"]);
}

#[tokio::test(start_paused = true)]
async fn patterns_that_select_nothing_are_refused_before_the_download() {
    for options in
        ["--allow-pattern *.bin", "--ignore-pattern *.json --ignore-pattern *.safetensors"]
    {
        let (exit, err, server) = run_push(options).await;
        assert_ne!(exit, 0, "{options}");
        let message = "no file of tinker://r/external_weights/hf is left to upload: the patterns \
                       exclude all 3 files";
        assert!(err.contains(message), "{options}: {err}");
        assert!(err.contains("hint: Check --allow-pattern and --ignore-pattern."), "{err}");
        let paths: Vec<String> = server.calls().into_iter().map(|call| call.path).collect();
        assert!(!paths.iter().any(|path| path.starts_with("/blob/")), "{options}: {paths:?}");
        assert!(!paths.iter().any(|path| path == "/api/repos/create"), "{options}: {paths:?}");
    }
}
