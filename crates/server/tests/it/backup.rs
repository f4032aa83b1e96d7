//! Backups of a running server.

use std::path::Path;

use serde_json::{Value, json};
use tinkex::RestoreMode;
use tinkex_server::{Server, restore_backup};

use crate::harness::{Http, TestServer, client, options, train, training_client};

/// Makes a backup and returns its status.
async fn back_up(http: &Http, id: &str, folder: &Path) -> Value {
    let request = json!({"id": id, "folder": folder});
    let (status, started) = http.post("/server/backup", request).await;
    assert_eq!(status, 200, "{started}");
    loop {
        let (_, status) = http.get("/api/v1/server/backup").await;
        assert_eq!(status["id"], id);
        if status["state"] != "running" {
            return status;
        }
        tokio::task::yield_now().await;
    }
}

/// Trains a new model from a checkpoint and returns the bits of its losses.
async fn continue_training(server: &Server, path: &str, steps: usize) -> Vec<u64> {
    let service = client(&server.base_url());
    let mode = RestoreMode::WithOptimizer;
    let model = service.create_training_client_from(path, mode).await.unwrap();
    train(&model, steps).await
}

#[tokio::test(flavor = "multi_thread")]
async fn training_continues_from_a_restored_backup_with_the_same_bits() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let service = test_server.client();
    let model = training_client(&service).await;
    train(&model, 2).await;
    let path = model.save_state("a").await.unwrap().to_string();
    let backups = tempfile::tempdir().unwrap();
    let dir = backups.path().join("b");
    // Requests run during the backup.
    let (status, _) = tokio::join!(back_up(&http, "1", &dir), train(&model, 3));
    assert_eq!(status["state"], "complete", "{status}");
    assert_eq!(status["missing"], json!([]));
    // The original continues, and deletes what the backup has.
    let expected = continue_training(&test_server.server, &path, 3).await;
    let run = model.model_id().to_string();
    drop(model);
    let delete = format!("/api/v1/training_runs/{run}/checkpoints/weights/a");
    assert_eq!(http.send("DELETE", &delete, &[], Vec::new()).await.0, 200);

    let data = backups.path().join("restored");
    restore_backup(&dir, &data).unwrap();
    let restored = Server::start(options(&data)).await.unwrap();
    assert_eq!(continue_training(&restored, &path, 3).await, expected);
    let (_, runs) = Http::new(&restored.base_url()).get("/api/v1/training_runs").await;
    assert!(runs["training_runs"].to_string().contains(&run));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_backup_copies_only_what_is_new() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    http.save(&model, 1, "a").await;
    let dir = tempfile::tempdir().unwrap();
    let first = back_up(&http, "1", dir.path()).await;
    assert_eq!(first["linked_bytes"], 0, "{first}");
    http.save(&model, 2, "b").await;
    let second = back_up(&http, "2", dir.path()).await;
    let linked = second["linked_bytes"].as_u64().unwrap();
    assert!(linked > 0 && linked < second["bytes"].as_u64().unwrap(), "{second}");
    assert!(second["files"].as_u64() > first["files"].as_u64());
    // A retry does not make another backup.
    assert_eq!(back_up(&http, "2", dir.path()).await, second);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    // Each backup is complete without the other.
    let target = dir.path().join("restored");
    std::fs::remove_dir_all(first["folder"].as_str().unwrap()).unwrap();
    restore_backup(Path::new(second["folder"].as_str().unwrap()), &target).unwrap();
    test_server.server.stop().await;
    let restored = Server::start(options(&target)).await.unwrap();
    let (_, checkpoints) = Http::new(&restored.base_url()).get("/api/v1/checkpoints").await;
    assert_eq!(checkpoints["checkpoints"].as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_not_deleted_during_a_backup() {
    let test_server = TestServer::with(|options| {
        options.timeouts.expiry_interval = std::time::Duration::from_millis(1);
    })
    .await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let dir = tempfile::tempdir().unwrap();
    for n in 0_u64..8 {
        let name = format!("c-{n}");
        http.save(&model, n + 1, &name).await;
        let path = format!("/api/v1/training_runs/{model}/checkpoints/weights/{name}");
        let id = n.to_string();
        let delete = http.send("DELETE", &path, &[], Vec::new());
        let (status, (code, _)) = tokio::join!(back_up(&http, &id, dir.path()), delete);
        assert_eq!((code, &status["missing"]), (200, &json!([])), "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn disk_usage_names_runs_and_kinds() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    http.save(&model, 1, "a").await;
    let (status, usage) = http.get("/api/v1/server/disk_usage").await;
    assert_eq!(status, 200, "{usage}");
    let run = &usage["runs"][0];
    assert_eq!((&run["run"], &run["user"]), (&json!(model), &json!("admin")));
    assert!(run["bytes"].as_u64().unwrap() > 0);
    assert_eq!(usage["users"][0]["bytes"], run["bytes"]);
    let kinds: Vec<&str> = usage["kinds"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|kind| kind["kind"].as_str())
        .collect();
    assert!(["checkpoints", "database", "payloads"].iter().all(|kind| kinds.contains(kind)));
    let total: u64 =
        usage["kinds"].as_array().unwrap().iter().filter_map(|kind| kind["bytes"].as_u64()).sum();
    assert_eq!(usage["bytes"], total);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_that_cannot_be_made_says_why() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let failed = back_up(&http, "1", test_server.data.path()).await;
    assert_eq!(failed["state"], "failed");
    assert!(failed["error"].as_str().unwrap().contains("part of the data folder"), "{failed}");
    let (status, _) = http.post("/server/backup", json!({"id": "2", "folder": "relative"})).await;
    assert_eq!(status, 400);
}
