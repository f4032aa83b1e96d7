//! Exports of checkpoints and of local adapters.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tempfile::TempDir;
use tinkex::testing::{Reply, Route};
use tinkex::{
    CheckpointExport, Env, ErrorKind, ExportDType, ExportFormat, ExportProgress, ExportStage,
    ServiceClient,
};
use tokio::sync::oneshot;

use crate::adapter_download::HostedServer;
use crate::event_log::{EventLog, keep_events};

const EXTERNAL: &str = "tinker://run/external_weights/hf";
const TRAINING: &str = "tinker://run/weights/final";

/// Returns the folder of a recorded model, which has its adapter in `adapter`.
fn golden(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden").join(model)
}

/// Returns a server with the adapter of a recorded model.
fn server(model: &str) -> HostedServer {
    let adapter = golden(model).join("adapter");
    let config = fs::read(adapter.join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    HostedServer::new(&config, fs::read(adapter.join("adapter_model.safetensors")).unwrap())
}

/// Records the events of this thread until the guard is dropped.
fn record_events() -> (EventLog, tracing::subscriber::DefaultGuard) {
    keep_events();
    let log = EventLog::default();
    (log.clone(), tracing::subscriber::set_default(log))
}

/// Returns the warnings that were logged.
fn warnings(log: &EventLog) -> Vec<String> {
    log.with(&["tinkex::", " WARN "])
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Copies the files of a folder to a new folder.
fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_is_downloaded_and_merged() {
    let server = server("qwen3");
    let home = TempDir::new().unwrap();
    let to = home.path().join("new/merged");
    let stages: Arc<Mutex<Vec<ExportProgress>>> = Arc::default();
    let reports = Arc::clone(&stages);
    let exported = server
        .rest()
        .export(EXTERNAL, &to)
        .base(golden("qwen3"))
        .dtype(ExportDType::F32)
        .detail("dataset", "animals")
        .on_progress(move |now| reports.lock().unwrap().push(*now))
        .await
        .unwrap();
    assert_eq!(names_in(&to), ["README.md", "config.json", "model.safetensors"]);
    assert_eq!(names_in(home.path()), ["new"]);
    assert_eq!(names_in(&home.path().join("new")), ["merged"]);
    let card = fs::read_to_string(to.join("README.md")).unwrap();
    assert!(card.contains(&format!("| checkpoint | `{EXTERNAL}` |")), "{card}");
    assert!(card.contains("| dataset | `animals` |"), "{card}");
    let stages = stages.lock().unwrap().clone();
    let last = |stage| *stages.iter().rfind(|now| now.stage == stage).unwrap();
    assert!(stages.is_sorted_by_key(|now| now.stage == ExportStage::Writing));
    let downloaded = last(ExportStage::Downloading);
    assert_eq!(Some(downloaded.bytes), downloaded.bytes_total);
    assert_eq!(last(ExportStage::Writing).bytes, exported.bytes);

    // An export from the local adapter has the same weights.
    let local = home.path().join("local");
    CheckpointExport::from_adapter(golden("qwen3").join("adapter"), &local, &Env::empty())
        .base(golden("qwen3"))
        .dtype(ExportDType::F32)
        .await
        .unwrap();
    let weights = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
    assert!(weights(&local) == weights(&to));
}

#[cfg(feature = "blocking")]
#[test]
fn the_blocking_client_exports() {
    let server = server("llama");
    let home = TempDir::new().unwrap();
    let to = home.path().join("adapter");
    let service = tinkex::blocking::ServiceClient::from_builder(server.server.builder()).unwrap();
    let export = service.rest().export(EXTERNAL, &to);
    let exported = export.with(|export| export.format(ExportFormat::Peft)).wait().unwrap();
    assert_eq!(exported.files.len(), 3);
    assert!(to.join("adapter_model.safetensors").is_file());
}

/// Asserts that a refused export sent no request but that for the description of the checkpoint,
/// opened no session and left nothing.
#[track_caller]
fn assert_untouched(server: &HostedServer, home: &TempDir) {
    assert_eq!(names_in(home.path()), Vec::<String>::new());
    assert_eq!(server.take_requests(), Vec::<String>::new(), "a file was requested");
    for route in [Route::CreateSession, Route::CreateModel, Route::ExternalWeightsUrls] {
        assert!(server.server.calls_to(route).is_empty(), "{route:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn faults_are_found_before_the_download() {
    let server = server("llama");
    let home = TempDir::new().unwrap();
    let to = home.path().join("a/b/merged");
    let export = || server.rest().export(TRAINING, &to);
    let base = golden("llama");
    // llama.cpp's qwen2 models have no such rotary frequencies.
    let scaled = TempDir::new().unwrap();
    copy_folder(&golden("qwen2"), scaled.path());
    let file = scaled.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    config["rope_parameters"] = json!({
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    });
    fs::write(&file, config.to_string()).unwrap();
    let cases = [
        (
            export().base(&base).dtype(ExportDType::Q8_0),
            ErrorKind::InvalidInput,
            "cannot store q8_0",
            "Choose another format",
        ),
        (
            export().format(ExportFormat::Peft).dtype(ExportDType::F16),
            ErrorKind::InvalidInput,
            "cannot convert it to f16",
            "Choose another format",
        ),
        (
            export().format(ExportFormat::Peft).shard_bytes(1000),
            ErrorKind::InvalidInput,
            "format peft has one file of weights",
            "Choose another format",
        ),
        (
            export().base(home.path().join("gone")),
            ErrorKind::Io,
            "gone/config.json",
            "Check that the path exists",
        ),
        (
            export().base(base.join("config.json")),
            ErrorKind::InvalidInput,
            "is a file",
            "Pass the Hugging Face folder of the base model (--base FOLDER",
        ),
        (
            export().base(&base).format(ExportFormat::Gguf),
            ErrorKind::Io,
            "tokenizer.json",
            "Check that the path exists",
        ),
        (
            export().base(scaled.path()).format(ExportFormat::Gguf),
            ErrorKind::InvalidInput,
            "cannot scale rotary frequencies",
            "Choose another format",
        ),
        (
            export().base(&base).free_space(|_| Some(1000)),
            ErrorKind::Io,
            "but only 1.0 kB are free on",
            "Free disk space",
        ),
        (
            export(),
            ErrorKind::NotFound,
            "cannot find base model \"org/base\"",
            "Pass the folder of the base model",
        ),
    ];
    for (export, kind, message, hint) in cases {
        let error = export.await.unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.kind(), kind, "{error}");
        let given = error.hint().unwrap();
        assert!(given.as_str().starts_with(hint), "{error}: {given:?}");
        assert_untouched(&server, &home);
    }
    let error = server.rest().export(TRAINING, home.path()).base(&base).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert_untouched(&server, &home);
}

/// The base model fits on the disk, but not together with its own unembedding and the adapter of it,
/// whose size follows from the rank.
#[tokio::test(start_paused = true)]
async fn the_size_of_the_adapter_is_estimated_before_its_download() {
    let hosted = server("qwen3");
    let info = json!({ "base_model": "qwen3", "is_lora": true, "lora_rank": 4,
        "train_attn": true, "train_mlp": true, "train_unembed": true });
    let replaced = hosted.server.clone().on_call(Route::WeightsInfo, move |_| Reply::json(&info));
    let home = TempDir::new().unwrap();
    let weights = fs::metadata(golden("qwen3").join("model.safetensors")).unwrap().len();
    let rest = replaced.builder().build().unwrap().rest();
    let export = rest.export(TRAINING, home.path().join("a/merged")).base(golden("qwen3"));
    let error = export.free_space(move |_| Some(weights)).await.unwrap_err();
    assert!(error.to_string().contains("are free on"), "{error}");
    assert_untouched(&hosted, &home);
}

/// As above, on a server that tells only the size of the files.
#[tokio::test(start_paused = true)]
async fn the_download_leaves_space_for_the_export() {
    let server = server("llama");
    let home = TempDir::new().unwrap();
    let to = home.path().join("a/merged");
    let weights = fs::metadata(golden("llama").join("model.safetensors")).unwrap().len();
    let export = server.rest().export(EXTERNAL, &to).base(golden("llama"));
    let error = export.free_space(move |_| Some(weights)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    let message = error.to_string();
    assert!(message.contains("cannot write the downloaded file: needs "), "{message}");
    assert_eq!(names_in(home.path()), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_export_leaves_nothing() {
    let server = server("llama");
    let home = TempDir::new().unwrap();
    let to = home.path().join("a/merged");
    // The first report of the thread that writes cancels the export, and blocks the thread until
    // the export has seen it.
    let (cancel, cancelled) = oneshot::channel();
    let (seen, was_seen) = oneshot::channel();
    let (release, released) = mpsc::channel();
    let start = Mutex::new(Some((cancel, released)));
    let export = server
        .rest()
        .export(EXTERNAL, &to)
        .base(golden("llama"))
        .on_progress(move |now| {
            if now.stage == ExportStage::Writing
                && let Some((cancel, released)) = start.lock().unwrap().take()
            {
                cancel.send(()).unwrap();
                released.recv().unwrap();
            }
        })
        .cancel_on(async move {
            cancelled.await.unwrap();
            seen.send(()).unwrap();
        });
    // `join!` polls the export first, which sets its flag in the poll in which the signal resolves.
    let (result, ()) = tokio::join!(export.into_future(), async {
        was_seen.await.unwrap();
        release.send(()).unwrap();
    });
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(names_in(home.path()), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_dropped_export_leaves_nothing() {
    let server = server("llama");
    let home = TempDir::new().unwrap();
    let to = home.path().join("a/merged");
    let (started, has_started) = oneshot::channel();
    let (release, released) = mpsc::channel();
    // Closed when the thread that writes has ended.
    let (alive, mut ended) = tokio::sync::mpsc::channel::<()>(1);
    let start = Mutex::new(Some((started, released)));
    let export = server
        .rest()
        .export(EXTERNAL, &to)
        .base(golden("llama"))
        .on_progress(move |now| {
            let _alive = &alive;
            if now.stage == ExportStage::Writing
                && let Some((started, released)) = start.lock().unwrap().take()
            {
                started.send(()).unwrap();
                released.recv().unwrap();
            }
        })
        .into_future();
    tokio::select! {
        _ = export => panic!("the thread that writes is blocked"),
        started = has_started => started.unwrap(),
    }
    // `select!` has dropped the export.
    assert!(!to.exists());
    release.send(()).unwrap();
    assert_eq!(ended.recv().await, None);
    assert_eq!(names_in(home.path()), Vec::<String>::new());
}

/// Returns a client of the server on a loopback address, at which the server describes a sampling
/// session of `base_model` with these properties.
fn local_client(server: &HostedServer, sampler: Value, hub_cache: &Path) -> ServiceClient {
    let server = server.server.clone().on_call(Route::GetSampler, move |_| Reply::json(&sampler));
    let env = Env::from_pairs([("HF_HUB_CACHE", hub_cache.to_str().unwrap())]);
    server.builder().env(env).base_url("http://127.0.0.1:9").build().unwrap()
}

fn sampler(base_model_path: &Path) -> Value {
    json!({ "sampler_id": "s", "base_model": "org/base", "tokenizer_id": "org/base",
        "base_model_path": base_model_path })
}

/// Writes the recorded model to the hub cache as `org/base`.
fn fill_cache(cache: &Path, model: &str) -> PathBuf {
    let folder = cache.join("models--org--base/snapshots/c0ffee");
    copy_folder(&golden(model), &folder);
    folder
}

#[tokio::test(start_paused = true)]
async fn the_base_model_is_the_folder_that_the_server_serves() {
    let hosted = server("llama");
    let home = TempDir::new().unwrap();
    let cache = home.path().join("hub");
    let served = home.path().join("served");
    // It has neither a tokenizer nor the name of the model, and the cache has another model.
    copy_folder(&golden("llama"), &served);
    fill_cache(&cache, "qwen2");
    let rest = local_client(&hosted, sampler(&served), &cache).rest();
    let (log, _recording) = record_events();
    rest.export(EXTERNAL, home.path().join("merged")).await.unwrap();
    assert!(home.path().join("merged/model.safetensors").is_file());
    assert_eq!(warnings(&log), Vec::<String>::new());

    // Only a server on this machine has the folder of this machine.
    let rest = hosted.rest();
    let error = rest.export(EXTERNAL, home.path().join("other")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_base_model_in_the_hub_cache_is_used_and_differs_from_a_served_gguf_file() {
    let hosted = server("llama");
    let home = TempDir::new().unwrap();
    let cache = home.path().join("hub");
    let cached = fill_cache(&cache, "llama");
    let gguf = home.path().join("base-q4.gguf");
    let export = |to: &str, path: &Path| {
        let rest = local_client(&hosted, sampler(path), &cache).rest();
        rest.export(EXTERNAL, home.path().join(to))
    };
    let (log, _recording) = record_events();
    // The server does not tell a path that exists here.
    export("first", &gguf).await.unwrap();
    assert_eq!(warnings(&log), Vec::<String>::new());
    fs::write(&gguf, "GGUF").unwrap();
    export("second", &gguf).await.unwrap();
    let warnings = warnings(&log);
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains("serves \"org/base\" from the GGUF file"), "{warning}");
    assert!(warning.contains(&*cached.to_string_lossy()), "{warning}");

    fs::remove_dir_all(&cache).unwrap();
    let error = export("third", &gguf).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("serves the GGUF file"), "{error}");
    assert!(error.hint().unwrap().as_str().contains("--base FOLDER"), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn another_name_of_the_base_model_is_a_warning() {
    let home = TempDir::new().unwrap();
    let base = golden("llama");
    let adapter = home.path().join("adapter");
    copy_folder(&base.join("adapter"), &adapter);
    let file = adapter.join("adapter_config.json");
    let config = fs::read(&file).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    let mut export = |name: &str, to: &str| {
        config["base_model_name_or_path"] = name.into();
        fs::write(&file, config.to_string()).unwrap();
        let to = home.path().join(to);
        CheckpointExport::from_adapter(&adapter, to, &Env::empty()).base(&base)
    };
    let (log, _recording) = record_events();
    export("meta-llama/Llama", "same").await.unwrap();
    export("", "unnamed").await.unwrap();
    assert_eq!(warnings(&log), Vec::<String>::new());
    export("org/other", "other").await.unwrap();
    let warnings = warnings(&log);
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains("was trained on \"org/other\" but"), "{warning}");
    assert!(warning.contains("golden/llama"), "{warning}");
}
