//! Models in memory: idle models are unloaded, evicted models are restored, and models of expired
//! sessions are saved.

use std::time::Duration;

use serde_json::json;
use tinkex::{LoraOptions, RestoreMode};
use tinkex_server::Server;

use crate::harness::{Http, MODEL, TestServer, golden, options, step, train, training_client};

/// Waits until the server has no base model in memory.
async fn wait_until_unloaded(http: &Http) {
    while http.metrics().await["loaded_models"] > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unloaded_model_is_restored_bit_for_bit() {
    let test_server = TestServer::new().await;
    let expected = train(&training_client(&test_server.client()).await, 4).await;
    let test_server = TestServer::with(|options| {
        options.timeouts.idle_model = Duration::ZERO;
        // The model is saved only because it is unloaded.
        options.timeouts.snapshot_after = Duration::from_secs(3_600);
    })
    .await;
    let service = test_server.client();
    let http = test_server.http();
    let model = training_client(&service).await;
    let sampler = service.create_sampling_client(MODEL).await.unwrap();
    let mut losses = Vec::new();
    for _ in 0..4 {
        losses.extend(train(&model, 1).await);
        let params = tinkex::SamplingParams::new().max_tokens(3);
        sampler.sample([5, 6], params).await.unwrap();
        wait_until_unloaded(&http).await;
    }
    assert_eq!(losses, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn models_beyond_the_memory_limit_are_evicted_and_restored() {
    let test_server = TestServer::new().await;
    let expected = train(&training_client(&test_server.client()).await, 4).await;
    let test_server = TestServer::with(|options| {
        options.limits.model_bytes = 1;
        options.timeouts.snapshot_after = Duration::from_secs(3_600);
    })
    .await;
    let service = test_server.client();
    let models = [
        training_client(&service).await,
        training_client(&service).await,
        training_client(&service).await,
    ];
    let mut losses = vec![Vec::new(); 3];
    for _ in 0..4 {
        for (model, losses) in models.iter().zip(&mut losses) {
            losses.extend(train(model, 1).await);
        }
    }
    assert_eq!(losses, [expected.clone(), expected.clone(), expected]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_can_be_served_under_any_name() {
    let name = "Qwen/Qwen3-8B";
    let test_server =
        TestServer::with(|options| *options = options.clone().model(name, golden("qwen3"))).await;
    let service = test_server.client();
    let model =
        service.create_lora_training_client(LoraOptions::new(name).rank(4).seed(5)).await.unwrap();
    assert_eq!(train(&model, 1).await.len(), 1);
    assert_eq!(model.get_info().await.unwrap().model_data.model_name.as_deref(), Some(name));
    let sampler = service.create_sampling_client(name).await.unwrap();
    let params = tinkex::SamplingParams::new().max_tokens(3);
    sampler.sample([5, 6], params).await.unwrap();
    let unknown =
        service.create_lora_training_client(LoraOptions::new("Qwen/Qwen3-32B").rank(4)).await;
    let error = unknown.unwrap_err().to_string();
    assert!(error.contains("--model Qwen/Qwen3-32B=FOLDER"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unsaved_models_of_an_expired_session_are_autosaved() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(options(data.path())).await.unwrap();
    let service = crate::harness::client(&server.base_url());
    let expected = train(&training_client(&service).await, 5).await;
    let unsaved = training_client(&service).await;
    let saved = training_client(&service).await;
    let untrained = training_client(&service).await;
    train(&unsaved, 3).await;
    train(&saved, 2).await;
    saved.save_state("own").await.unwrap();
    let ids = [&unsaved, &saved, &untrained].map(|model| model.model_id().clone());
    let session = ids[0].as_str().split(':').next().unwrap().to_owned();
    drop((service, unsaved, saved, untrained));
    server.stop().await;

    // No client sends a request any more.
    let mut short_lived = options(data.path());
    short_lived.timeouts.session_expiry = Duration::from_millis(1);
    short_lived.timeouts.expiry_interval = Duration::from_millis(5);
    let server = Server::start(short_lived).await.unwrap();
    let http = Http::new(&server.base_url());
    while http.post("/session_heartbeat", json!({"session_id": session})).await.0 == 200 {}
    server.stop().await;

    let server = Server::start(options(data.path())).await.unwrap();
    let service = crate::harness::client(&server.base_url());
    let rest = service.rest();
    let mut found = Vec::new();
    for id in &ids {
        let list = rest.list_checkpoints(id.clone()).await.unwrap().checkpoints;
        found.push(list.into_iter().map(|c| (c.tinker_path, c.expires_at.is_some())).collect());
    }
    let [unsaved, saved, untrained] = <[Vec<(String, bool)>; 3]>::try_from(found).unwrap();
    assert_eq!(unsaved, [(format!("tinker://{}/weights/autosave-6", ids[0]), true)]);
    assert_eq!(saved, [(format!("tinker://{}/weights/own", ids[1]), false)]);
    assert_eq!(untrained, []);
    let path: tinkex::TinkerPath = unsaved[0].0.parse().unwrap();
    let resumed =
        service.create_training_client_from(&path, RestoreMode::WithOptimizer).await.unwrap();
    assert_eq!(train(&resumed, 2).await, expected[3..]);
    // The session itself has ended.
    let http = Http::new(&server.base_url());
    assert_eq!(http.post("/optim_step", step(ids[0].as_str(), 7, 0.1)).await.0, 403);
}

/// The client polls for no result of a session that it has finished. Before, they used memory and
/// disk for an hour.
#[tokio::test(flavor = "multi_thread")]
async fn results_of_a_finished_session_are_removed() {
    let test_server = TestServer::with(|options| {
        options.timeouts.expiry_interval = Duration::from_millis(5);
        options.timeouts.finished_session_retention = Duration::ZERO;
    })
    .await;
    let first = test_server.client();
    let second = test_server.client();
    train(&training_client(&first).await, 2).await;
    train(&training_client(&second).await, 1).await;
    let http = test_server.http();
    // A model and two requests for each step, of both sessions.
    assert_eq!(http.metrics().await["requests"], 5 + 3);
    first.finish().await;
    while http.metrics().await["requests"] > 3 {
        tokio::task::yield_now().await;
    }
    second.finish().await;
    while http.metrics().await["requests"] > 0 {
        tokio::task::yield_now().await;
    }
}
