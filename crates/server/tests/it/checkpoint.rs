//! Saving, loading, listing and downloading checkpoints.

use std::time::Duration;

use serde_json::json;
use tinkex::rest::{ListTrainingRuns, ListUserCheckpoints};
use tinkex::{
    CopyCheckpoint, ErrorKind, Hint, RestoreMode, SamplingParams, SaveOptions, StopCondition,
    TinkerPath,
};

use crate::harness::{MODEL, TestServer, create_model, train, training_client};

#[tokio::test(flavor = "multi_thread")]
async fn a_resumed_model_continues_bit_for_bit() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let whole = train(&training_client(&service).await, 6).await;
    let first = training_client(&service).await;
    assert_eq!(train(&first, 3).await, whole[..3]);
    let path = first.save_state("half").await.unwrap();
    let resumed =
        service.create_training_client_from(&path, RestoreMode::WithOptimizer).await.unwrap();
    assert_eq!(train(&resumed, 3).await, whole[3..], "with the optimizer");
    let fresh = service.create_training_client_from(&path, RestoreMode::WeightsOnly).await.unwrap();
    let other = train(&fresh, 3).await;
    assert_eq!(other[0], whole[3], "the weights are restored");
    assert_ne!(other[2], whole[5], "the optimizer state is not");
}

#[tokio::test(flavor = "multi_thread")]
async fn checkpoints_are_listed_published_copied_and_deleted() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let model = training_client(&service).await;
    train(&model, 1).await;
    let state = model.save_state(SaveOptions::new("a").metadata("k", "v")).await.unwrap();
    let sampler_path = model
        .save_weights_for_sampler(SaveOptions::new("a").ttl(Duration::from_secs(3600)))
        .await
        .unwrap();
    let error = model.save_state("a").await.unwrap_err();
    assert_eq!(error.status(), Some(400), "{error}");
    model.save_state(SaveOptions::new("a").overwrite()).await.unwrap();
    for name in ["../up", "", ".", "a/b"] {
        assert!(model.save_state(name).await.is_err(), "{name:?}");
    }
    let rest = service.rest();
    let all = rest.list_checkpoints(model.model_id().clone()).await.unwrap().checkpoints;
    assert_eq!(all.len(), 2);
    let expires =
        all.iter().find(|c| c.tinker_path == sampler_path.to_string()).unwrap().expires_at;
    assert!(expires.is_some());
    let info = rest.get_weights_info(&state).await.unwrap();
    assert_eq!((info.base_model.as_str(), info.lora_rank), (MODEL, Some(4)));
    rest.publish_checkpoint(&state).await.unwrap();
    rest.publish_checkpoint(&state).await.expect("a repeated request succeeds");
    rest.unpublish_checkpoint(&state).await.unwrap();
    rest.set_checkpoint_ttl(&sampler_path, None).await.unwrap();
    let copy = rest
        .copy_weights(CopyCheckpoint::new(sampler_path.clone()).into_project("p"))
        .await
        .unwrap();
    let runs = rest.list_training_runs(&ListTrainingRuns::default()).await.unwrap();
    assert_eq!(runs.cursor.total_count, 2);

    // The copy gives the same samples after the original is deleted.
    let params = || SamplingParams::new().max_tokens(6).seed(1).stop(StopCondition::NEVER);
    let original = service.create_sampling_client_from(&sampler_path).await.unwrap();
    let before = original.sample([5, 6], params()).await.unwrap();
    rest.delete_checkpoint(&sampler_path).await.unwrap();
    rest.delete_checkpoint(&sampler_path).await.expect("a repeated request succeeds");
    let unknown: TinkerPath = format!("{sampler_path}-2").parse().unwrap();
    assert_eq!(rest.delete_checkpoint(&unknown).await.unwrap_err().status(), Some(404));
    let copied = service.create_sampling_client_from(&copy).await.unwrap();
    let after = copied.sample([5, 6], params()).await.unwrap();
    assert_eq!(before.sequences[0].tokens, after.sequences[0].tokens);
    assert_eq!(before.sequences[0].logprobs, after.sequences[0].logprobs);
    let page = rest
        .list_user_checkpoints(&ListUserCheckpoints::default().limit(1).offset(1))
        .await
        .unwrap();
    assert_eq!((page.checkpoints.len(), page.cursor.unwrap().total_count), (1, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_downloaded_by_url() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let model = training_client(&service).await;
    let saved = model.save_weights_external("files").await.unwrap();
    let rest = service.rest();
    let urls = rest.get_external_weights_urls(&saved.path).await.unwrap().urls;
    assert_eq!(
        urls.keys().collect::<Vec<_>>(),
        ["adapter_config.json", "adapter_model.safetensors"]
    );
    let http = crate::harness::http_client();
    let mut total = 0;
    for url in urls.values() {
        let response = http.get(url).send().await.unwrap();
        assert_eq!(response.status(), 200);
        total += response.bytes().await.unwrap().len() as u64;
    }
    assert_eq!(Some(total), saved.size_bytes);
    // An interrupted download can be resumed if the file has not changed.
    let part = |range: &str, tag: &str| {
        let request = http.get(&urls["adapter_config.json"]).header("range", range.to_owned());
        request.header("if-range", tag.to_owned()).send()
    };
    let whole = http.get(&urls["adapter_config.json"]).send().await.unwrap();
    let tag = whole.headers()["etag"].to_str().unwrap().to_owned();
    let whole = whole.bytes().await.unwrap();
    let partial = part("bytes=10-", &tag).await.unwrap();
    assert_eq!(partial.status(), 206);
    let range = format!("bytes 10-{}/{}", whole.len() - 1, whole.len());
    assert_eq!(partial.headers()["content-range"], range.as_str());
    assert_eq!(partial.bytes().await.unwrap(), whole[10..]);
    let piece = part("bytes=2-4", &tag).await.unwrap();
    assert_eq!(piece.bytes().await.unwrap(), whole[2..5]);
    assert_eq!(part("bytes=10-", "\"other\"").await.unwrap().status(), 200);
    assert_eq!(part("bytes=999999-", &tag).await.unwrap().status(), 416);
    let up = urls["adapter_config.json"].replace("adapter_config.json", "..%2F..%2Flock");
    assert_eq!(http.get(up).send().await.unwrap().status(), 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn downloading_a_training_checkpoint_leaves_nothing_on_the_server() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let model = training_client(&service).await;
    let path = model.save_state("state").await.unwrap();
    let home = tempfile::tempdir().unwrap();
    let done = service.rest().download(path, home.path().join("adapter")).peft(true).await.unwrap();
    assert_eq!(done.files, ["adapter_config.json", "adapter_model.safetensors"]);
    assert!(home.path().join("adapter/adapter_model.safetensors").is_file());
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1);
    let all = ListUserCheckpoints::default().limit(10);
    let left = service.rest().list_user_checkpoints(&all).await.unwrap().checkpoints;
    assert_eq!(left.len(), 1, "the temporary export is deleted: {left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_checkpoint_name_is_a_conflict_and_the_hint_names_overwrite() {
    let test_server = TestServer::new().await;
    let model = training_client(&test_server.client()).await;
    model.save_state("a").await.unwrap();
    model.save_weights_for_sampler("a").await.unwrap();
    let error = model.save_state("a").await.unwrap_err();
    assert_eq!((error.kind(), error.status()), (ErrorKind::Conflict, Some(400)), "{error}");
    assert_eq!((error.attempts(), error.is_retryable()), (1, false), "a retry cannot succeed");
    assert!(error.hint().unwrap().as_str().contains("SaveOptions::overwrite"), "{error:#}");
    let error = model.save_weights_for_sampler("a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    assert_eq!(error.hint(), Some(Hint::ChooseAnotherName), "sampler weights have no overwrite");
    assert!(!error.to_string().contains("overwrite"), "{error}");
    model.save_state(SaveOptions::new("a").overwrite()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_taken_while_the_save_is_queued_is_a_conflict() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let save = |seq: u32| json!({"model_id": model, "path": "a", "seq_id": seq});
    // Request 2 waits for request 1, which takes the name.
    let (status, second) = http.post("/save_weights", save(2)).await;
    assert_eq!(status, 200, "{second}");
    let (status, first) = http.post("/save_weights", save(1)).await;
    assert_eq!(status, 200, "{first}");
    assert!(http.result(&first).await["path"].is_string());
    let failed = http.result(&second).await;
    assert_eq!((&failed["category"], &failed["code"]), (&json!("user"), &json!("conflict")));
    assert!(failed["error"].as_str().unwrap().contains("set overwrite"), "{failed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_model_cannot_replace_a_copy() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let path = http.save(&model, 1, "a").await;
    let copy = json!({"source_path": path, "session_id": session, "model_seq_id": 1});
    let (status, copied) = http.post("/copy_weights", copy).await;
    assert_eq!(status, 200, "{copied}");
    let load = json!({
        "session_id": session, "model_seq_id": 1, "path": path, "optimizer": false,
        "type": "load_weights",
    });
    for (route, request) in [("/create_model", create_model(&session, 1)), ("/load_weights", load)]
    {
        let (status, rejected) = http.post(route, request).await;
        assert_eq!(status, 400, "{rejected}");
        assert!(rejected["detail"].as_str().unwrap().contains("already exists"), "{rejected}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_load_gets_the_same_id_after_its_checkpoint_is_deleted() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let path = http.save(&model, 1, "a").await;
    let load = json!({
        "session_id": session, "model_seq_id": 1, "path": path, "optimizer": false,
        "type": "load_weights",
    });
    let (status, loaded) = http.post("/load_weights", load.clone()).await;
    assert_eq!(status, 200, "{loaded}");
    assert!(http.result(&loaded).await["model_id"].is_string());
    let checkpoint = format!("/api/v1/training_runs/{model}/checkpoints/weights/a");
    assert_eq!(http.send("DELETE", &checkpoint, &[], vec![]).await.0, 200);
    assert_eq!(http.post("/load_weights", load).await, (200, loaded));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_deleted_with_its_checkpoints_unless_a_client_trains_it() {
    let test_server = TestServer::new().await;
    let other = test_server.client();
    let service = test_server.client();
    let model = training_client(&service).await;
    train(&model, 1).await;
    let path = model.save_state("a").await.unwrap();
    let kept = training_client(&other).await;
    let id = model.model_id().clone();
    let error = other.rest().delete_training_run(id.clone()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    service.finish().await;
    other.rest().delete_training_run(id.clone()).await.unwrap();
    let again = other.rest().delete_training_run(id.clone()).await.unwrap_err();
    assert_eq!(again.kind(), ErrorKind::NotFound, "{again}");

    // The deletion survives a restart, and other runs do too.
    test_server.server.stop().await;
    let data = test_server.data;
    let server = tinkex_server::Server::start(crate::harness::options(data.path())).await.unwrap();
    let rest = crate::harness::client(&server.base_url()).rest();
    let runs = rest.list_training_runs(&ListTrainingRuns::default()).await.unwrap();
    let ids: Vec<_> = runs.training_runs.iter().map(|run| run.training_run_id.clone()).collect();
    assert_eq!(ids, [kept.model_id().clone()]);
    let error = rest.get_weights_info(&path).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    // The session of the other run is open, but its client has not been heard since the start.
    rest.delete_training_run(kept.model_id().clone()).await.unwrap();
    server.stop().await;
}
