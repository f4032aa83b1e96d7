//! Limits on records: budget per user, metadata on disk, pages of lists.

use serde_json::{Value, json};

#[cfg(target_os = "linux")]
use crate::child_server::ChildOptions;
use crate::harness::{Http, MODEL, TestServer, create_model};
#[cfg(target_os = "linux")]
use crate::process::Process;

/// Size of the metadata of a session in bytes, below the limit of a body.
const METADATA: usize = 1_000_000;

/// Sends a request to create a session with [`METADATA`] bytes of metadata.
async fn create_session(http: &Http, name: &str) -> (u16, Value) {
    let metadata = json!({"name": name, "text": "x".repeat(METADATA)});
    let request = json!({"tags": [], "user_metadata": metadata, "sdk_version": "0.36.0"});
    http.post("/create_session", request).await
}

/// Creates sessions until the budget is used up. Returns their number and the response to the first
/// session that was refused.
async fn fill(http: &Http) -> (usize, Value) {
    let mut count = 0;
    loop {
        match create_session(http, &format!("n-{count}")).await {
            (200, _) => count += 1,
            (status, body) => {
                assert_eq!(status, 429, "{body}");
                return (count, body);
            }
        }
        assert!(count < 1_000, "no session is refused");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_beyond_the_budget_are_refused_and_accepted_work_continues() {
    let test_server = TestServer::with(|options| options.limits.record_bytes = 10 << 20).await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (count, refused) = fill(&http).await;
    assert_eq!(count, 10);
    let detail = refused["detail"].as_str().unwrap();
    assert!(detail.contains("11 sessions") && detail.contains("finish sessions"), "{detail}");
    // Small requests still fit, and results are never refused.
    assert!(http.save(&model, 1, "a").await.ends_with("/a"));
    // The metadata of checkpoints counts too.
    let save = json!({
        "model_id": model, "path": "b", "seq_id": 2, "type": "save_weights",
        "user_metadata": {"text": "x".repeat(METADATA / 2)},
    });
    let (status, body) = http.post("/save_weights", save).await;
    assert_eq!(status, 429, "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_that_stay_in_memory_are_short() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let long = "x".repeat(2_000);
    for field in ["display_name", "project_id"] {
        let mut request = json!({"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"});
        request[field] = long.clone().into();
        let (status, body) = http.post("/create_session", request).await;
        assert_eq!((status, body["detail"].as_str().unwrap().contains(field)), (400, true));
    }
    let request = json!({"tags": [long], "user_metadata": {}, "sdk_version": "0.36.0"});
    assert_eq!(http.post("/create_session", request).await.0, 400);
    let session = http.session().await;
    let mut create = create_model(&session, 0);
    create["optimizer_config"] = json!({"type": "adamw", "note": "x".repeat(5_000)});
    let (status, body) = http.post("/create_model", create).await;
    assert_eq!(status, 400, "{body}");
    // The end of a session succeeds whatever its description.
    let finish = json!({"reason": {"type": "success"}, "detail": "ü".repeat(100_000)});
    assert_eq!(http.post(&format!("/sessions/{session}/finish"), finish).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn search_returns_all_sessions_in_pages_of_bounded_size() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    for n in 0..9 {
        assert_eq!(create_session(&http, &format!("n-{n}")).await.0, 200);
    }
    let mut names = Vec::new();
    let mut cursor = Value::Null;
    let mut pages = 0;
    loop {
        let mut request = json!({"user_metadata": {}, "owner": {"type": "own"}, "limit": 200});
        if !cursor.is_null() {
            request["cursor"] = cursor;
        }
        let (status, page) = http.post("/sessions/search", request).await;
        assert_eq!(status, 200, "{}", page["detail"]);
        assert!(page.to_string().len() < 5 << 20, "{} bytes", page.to_string().len());
        let sessions = page["sessions"].as_array().unwrap();
        names.extend(sessions.iter().map(|row| row["user_metadata"]["name"].clone()));
        pages += 1;
        cursor = page["next_cursor"].clone();
        if cursor.is_null() {
            break;
        }
    }
    let expected: Vec<Value> = (0..9).rev().map(|n| format!("n-{n}").into()).collect();
    assert_eq!((names, pages), (expected, 3));
    // A search by metadata finds the session wherever it is.
    let request = json!({"user_metadata": {"name": "n-0"}, "owner": {"type": "own"}, "limit": 1});
    let (_, found) = http.post("/sessions/search", request).await;
    assert_eq!(found["sessions"].as_array().unwrap().len(), 1);
    assert_eq!(found["sessions"][0]["user_metadata"]["name"], "n-0");
    assert!(found["next_cursor"].is_null());
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_is_returned_with_its_objects() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let request = json!({"tags": [], "user_metadata": {"n": 7}, "sdk_version": "0.36.0"});
    let (_, session) = http.post("/create_session", request).await;
    let session = session["session_id"].as_str().unwrap();
    let mut create = create_model(session, 0);
    create["user_metadata"] = json!({"name": "animals", "list": [1]});
    let (_, created) = http.post("/create_model", create).await;
    let model = http.result(&created).await["model_id"].as_str().unwrap().to_owned();
    let save = json!({
        "model_id": model, "path": "a", "seq_id": 1, "type": "save_weights",
        "user_metadata": {"step": "1"},
    });
    let (_, saved) = http.post("/save_weights", save).await;
    http.result(&saved).await;
    let check = async |http: &Http| {
        let info = http.get(&format!("/api/v1/sessions/{session}")).await.1;
        assert_eq!(info["user_metadata"], json!({"n": "7"}));
        let run = http.get(&format!("/api/v1/training_runs/{model}")).await.1;
        assert_eq!(run["user_metadata"], json!({"name": "animals", "list": "[1]"}));
        assert_eq!(run["last_checkpoint"]["user_metadata"], json!({"step": "1"}));
        let runs = http.get("/api/v1/training_runs").await.1;
        assert_eq!(runs["training_runs"][0], run);
        let of_run = http.get(&format!("/api/v1/training_runs/{model}/checkpoints")).await.1;
        assert_eq!(of_run["checkpoints"][0], run["last_checkpoint"]);
        let all = http.get("/api/v1/checkpoints").await.1;
        assert_eq!(all["checkpoints"][0], run["last_checkpoint"]);
        run["last_checkpoint"]["tinker_path"].as_str().unwrap().to_owned()
    };
    let path = check(&http).await;
    // A change of the checkpoint keeps its metadata, a copy has it too, another save replaces it.
    let ttl = format!("/api/v1/training_runs/{model}/checkpoints/weights/a/publish");
    assert_eq!(http.send("POST", &ttl, &[], Vec::new()).await.0, 200);
    check(&http).await;
    let copy = json!({"source_path": path, "destination_project_id": "p"});
    let (status, copied) = http.post("/copy_weights", copy).await;
    assert_eq!(status, 200, "{copied}");
    let copied = copied["tinker_path"].as_str().unwrap();
    let run = copied.strip_prefix("tinker://").unwrap().split('/').next().unwrap();
    let copies = http.get(&format!("/api/v1/training_runs/{run}/checkpoints")).await.1;
    assert_eq!(copies["checkpoints"][0]["user_metadata"], json!({"step": "1"}));
    let save = json!({
        "model_id": model, "path": "a", "seq_id": 2, "type": "save_weights", "overwrite": true,
    });
    let (_, saved) = http.post("/save_weights", save).await;
    http.result(&saved).await;
    let of_run = http.get(&format!("/api/v1/training_runs/{model}/checkpoints")).await.1;
    assert_eq!(of_run["checkpoints"][0]["user_metadata"], Value::Null);
    assert_eq!(http.get(&format!("/api/v1/training_runs/{model}")).await.1["base_model"], MODEL);
}

/// Before there was a budget, 814 sessions with a megabyte of metadata each ended the process, and
/// each restart began there.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_a_full_budget_restarts_in_bounded_memory() {
    let options = ChildOptions { record_bytes: Some(100 << 20), ..ChildOptions::default() };
    let empty = tempfile::tempdir().unwrap();
    let server = Process::with(empty.path(), 0, options.clone());
    let session = Http::new(&server.url).session().await;
    assert!(!session.is_empty());
    let memory_of_empty = server.peak_memory();
    server.kill();

    let data = tempfile::tempdir().unwrap();
    let server = Process::with(data.path(), 0, options.clone());
    let (count, _) = fill(&Http::new(&server.url)).await;
    assert!(count >= 100, "{count} sessions");
    server.kill();
    let server = Process::with(data.path(), 0, options);
    let http = Http::new(&server.url);
    // The budget is still used up, and the server works.
    assert_eq!(create_session(&http, "more").await.0, 429);
    let sampler = http.sampler(&http.session().await).await;
    assert!(!sampler.is_empty());
    let list = http.get("/api/v1/sessions?limit=1000").await.1;
    assert_eq!(list["sessions"].as_array().unwrap().len(), count + 1);
    let more = server.peak_memory().saturating_sub(memory_of_empty);
    assert!(more < 24 << 20, "{more} bytes more than a server without records");
    server.kill();
}
