//! Messages for clients contain no paths of the server.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tinkex_server::{Server, ServerOptions};

use crate::harness::{Http, MODEL, create_model, golden, options};

/// Copies the files of a folder, without its folders.
fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

/// Returns options with a model folder of the test's own, so that its files can be damaged.
fn own_model(data: &Path, model: &Path) -> ServerOptions {
    let mut options = options(data);
    options.models = vec![(MODEL.to_owned(), model.to_owned())];
    options
}

/// Returns the folder of a checkpoint.
fn weights_folder(data: &Path, name: &str) -> std::path::PathBuf {
    let mut folders = fs::read_dir(data.join("weights")).unwrap().map(|e| e.unwrap().path());
    folders.find(|path| path.to_string_lossy().contains(name)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_for_clients_contain_no_paths_of_the_server() {
    let home = tempfile::tempdir().unwrap();
    // Errors of the system have the canonical path.
    let home = home.path().canonicalize().unwrap();
    let data = home.join("data");
    let model_folder = home.join("models").join("qwen");
    copy_folder(&golden("qwen3"), &model_folder);
    let server = Server::start(own_model(&data, &model_folder)).await.unwrap();
    let http = Http::new(&server.base_url());
    let mut messages: Vec<(&str, Value)> = Vec::new();

    let session = http.session().await;
    let model = http.model(&session).await;
    let save = |kind: &str, name: &str, seq: u64| json!({"model_id": model, "path": name, "seq_id": seq, "type": kind});
    for (route, name, seq) in
        [("save_weights", "state", 1), ("save_weights_for_sampler", "sampler", 2)]
    {
        let (status, saved) = http.post(&format!("/{route}"), save(route, name, seq)).await;
        assert_eq!(status, 200, "{saved}");
        assert!(http.result(&saved).await["path"].is_string());
    }

    // A checkpoint whose files are damaged: loading it, sampling from it, downloading it.
    let tensors = "adapter_model.safetensors";
    fs::write(weights_folder(&data, "state").join(tensors), "damaged").unwrap();
    let state = format!("tinker://{model}/weights/state");
    let load = json!({"model_id": model, "path": state, "seq_id": 3, "optimizer": false,
        "type": "load_weights"});
    let (_, other) = http.post("/create_model", create_model(&session, 1)).await;
    let other = http.result(&other).await["model_id"].clone();
    let mut fresh = load.clone();
    fresh["model_id"] = other;
    fresh["seq_id"] = json!(1);
    let (_, loading) = http.post("/load_weights", fresh).await;
    messages.push(("load", http.result(&loading).await));
    fs::write(weights_folder(&data, "sampler").join(tensors), "damaged").unwrap();
    let sampler = format!("tinker://{model}/sampler_weights/sampler");
    let completion = json!({"model": sampler, "prompt": [5, 6, 7], "max_tokens": 2});
    let send = |body: &Value| body.to_string().into_bytes();
    let (status, body) = http.send("POST", "/v1/completions", &[], send(&completion)).await;
    assert_ne!(status, 200, "{body}");
    messages.push(("completion", body));
    let mut streamed = completion;
    streamed["stream"] = json!(true);
    let url = format!("{}/v1/completions", server.base_url());
    let request = crate::harness::http_client().post(url).body(streamed.to_string());
    let text = request.send().await.unwrap().text().await.unwrap();
    messages.push(("stream", Value::String(text)));
    let urls = format!("/api/v1/training_runs/{model}/checkpoints/sampler_weights/sampler/archive");
    messages.push(("download", http.get(&urls).await.1));

    // A folder that cannot be written to.
    fs::rename(data.join("weights"), data.join("moved")).unwrap();
    fs::write(data.join("weights"), "a file in place of the folder").unwrap();
    let (_, saving) = http.post("/save_weights", save("save_weights", "late", 3)).await;
    messages.push(("save", http.result(&saving).await));
    let import = format!("/api/v1/imports/x?base_model={MODEL}&name=x");
    messages.push(("import", http.send("PUT", &import, &[], vec![0; 64]).await.1));
    // What the dashboard shows of the failures.
    messages.push(("failures", http.get("/ui/api/server").await.1));
    messages.push(("run", http.get(&format!("/ui/api/run?id={model}")).await.1));
    drop(server);

    // A model whose files are missing.
    fs::remove_file(data.join("weights")).unwrap();
    fs::rename(data.join("moved"), data.join("weights")).unwrap();
    let server = Server::start(own_model(&data, &model_folder)).await.unwrap();
    let http = Http::new(&server.base_url());
    fs::remove_file(model_folder.join("model.safetensors")).unwrap();
    let session = http.session().await;
    let (_, created) = http.post("/create_model", create_model(&session, 0)).await;
    messages.push(("model", http.result(&created).await));

    let home = home.to_string_lossy();
    let failed = messages.iter().filter(|(_, message)| {
        let text = message.to_string();
        ["damaged", "cannot", "error"].iter().any(|word| text.contains(word))
    });
    assert!(failed.count() >= 6, "{messages:#?}");
    for (case, message) in &messages {
        assert!(!message.to_string().contains(&*home), "{case}: {message}");
    }
    // The client still learns which checkpoint and which file it is.
    let text = json!(messages.iter().map(|(_, message)| message).collect::<Vec<_>>()).to_string();
    assert!(text.contains("DATA/weights/") && text.contains(&state), "{text}");
}
