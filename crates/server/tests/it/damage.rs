//! Damaged files, and other programs that read the database.

use std::path::Path;

use rusqlite::Connection;
use serde_json::{Value, json};
use tinkex_server::Server;

use crate::harness::{Http, MODEL, TestServer, options, step};

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
    assert!(error.contains("is needed and not found") && error.contains("backup"), "{error}");
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
