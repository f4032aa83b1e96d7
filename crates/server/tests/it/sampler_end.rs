//! The end of sampling sessions, and the weights that were saved for them.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tinkex::{ErrorKind, SamplingClient, SamplingParams};

use crate::harness::{Http, TestServer, client, train, training_client};
use crate::process::Process;

/// Returns the names of the folders of weights that were saved for sampling sessions only.
fn unnamed_weights(data: &Path) -> Vec<String> {
    let folders = std::fs::read_dir(data.join("weights")).unwrap();
    let names = folders.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.contains("-ephemeral-")).collect()
}

/// Returns the tokens of a sample, which depend on the weights only.
async fn sample(sampler: &SamplingClient) -> tinkex::Result<Vec<u32>> {
    let params = SamplingParams::new().max_tokens(3).seed(1);
    Ok(sampler.sample([5, 6], params).await?.sequences[0].tokens.to_vec())
}

/// Bug: a program with one sampling client per step kept the weights of all steps.
#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_closes_its_samplers_keeps_the_weights_of_one_step() {
    let test_server = TestServer::with(|options| {
        options.timeouts.expiry_interval = Duration::from_millis(5);
    })
    .await;
    let service = test_server.client();
    let model = training_client(&service).await;
    let named = model.save_weights_for_sampler("kept").await.unwrap();
    let named = service.create_sampling_client_from(named.to_string().as_str()).await.unwrap();
    let expected = sample(&named).await.unwrap();
    let mut last = None;
    for _ in 0..6 {
        train(&model, 1).await;
        let sampler = model.save_weights_and_get_sampling_client().await.unwrap();
        sample(&sampler).await.unwrap();
        let previous: Option<SamplingClient> = last.replace(sampler);
        if let Some(previous) = previous {
            previous.close().await.unwrap();
        }
    }
    let data = test_server.data.path();
    while unnamed_weights(data).len() > 1 {
        tokio::task::yield_now().await;
    }
    sample(&last.unwrap()).await.unwrap();
    // A checkpoint has a name, and stays.
    named.close().await.unwrap();
    let again = model_path(&model);
    let again = service.create_sampling_client_from(again.as_str()).await.unwrap();
    assert_eq!(sample(&again).await.unwrap(), expected);
}

fn model_path(model: &tinkex::TrainingClient) -> String {
    format!("tinker://{}/sampler_weights/kept", model.model_id())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_sampling_session_executes_accepted_samples_and_no_others() {
    let test_server = TestServer::with(|options| {
        options.timeouts.expiry_interval = Duration::from_millis(1);
    })
    .await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let save = json!({
        "model_id": model, "sampling_session_seq_id": 0, "seq_id": 1,
        "type": "save_weights_for_sampler",
    });
    let (_, saved) = http.post("/save_weights_for_sampler", save).await;
    let sampler = http.result(&saved).await["sampling_session_id"].as_str().unwrap().to_owned();
    let request = |seq: u64| {
        json!({
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_params": {"max_tokens": 60, "stop": [], "seed": seq},
            "sampling_session_id": sampler, "seq_id": seq,
        })
    };
    let mut accepted = Vec::new();
    for seq in 0..8 {
        let (status, future) = http.post("/asample", request(seq)).await;
        assert_eq!(status, 200, "{future}");
        accepted.push(future);
    }
    let path = format!("/api/v1/samplers/{sampler}");
    for _ in 0..2 {
        let (status, body) = http.send("DELETE", &path, &[], Vec::new()).await;
        assert_eq!(status, 200, "{body}");
    }
    for (seq, future) in (0..).zip(&accepted) {
        let retried = http.post("/asample", request(seq)).await;
        assert_eq!(retried, (200, future.clone()), "a retry gets the same request id");
    }
    let (status, body) = http.post("/asample", request(8)).await;
    assert_eq!(status, 400, "{body}");
    let detail = body["detail"].as_str().unwrap();
    assert!(detail.contains("has ended: its client closed it"), "{detail}");
    for future in &accepted {
        assert_eq!(http.sampled(future).await.len(), 60);
    }
    let join = json!({"sampling_session_id": sampler});
    assert_eq!(http.post("/join_sampling_session", join).await.0, 400);
    assert_eq!(http.get(&path).await.0, 400);
    let completion = json!({"model": sampler, "prompt": [5], "max_tokens": 1});
    let completion = completion.to_string().into_bytes();
    let json_type = [("content-type", "application/json")];
    let (status, _) = http.send("POST", "/oai/api/v1/completions", &json_type, completion).await;
    assert_eq!(status, 400);
    while !unnamed_weights(test_server.data.path()).is_empty() {
        tokio::task::yield_now().await;
    }
    let unknown = "/api/v1/samplers/unknown";
    assert_eq!(http.send("DELETE", unknown, &[], Vec::new()).await.0, 404);
}

/// The samples of a closed sampling session are executed after the restart, and then its weights
/// are deleted.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_remembers_that_a_sampling_session_was_closed() {
    let data = tempfile::tempdir().unwrap();
    let process = Process::start(data.path());
    let service = client(&process.url);
    let model = training_client(&service).await;
    let closed = model.save_weights_and_get_sampling_client().await.unwrap();
    let open = model.save_weights_and_get_sampling_client().await.unwrap();
    let expected = sample(&open).await.unwrap();
    let request = json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
        "sampling_params": {"max_tokens": 200, "stop": [], "seed": 1},
        "sampling_session_id": closed.sampler_id(), "seq_id": 0,
    });
    let (_, accepted) = Http::new(&process.url).post("/asample", request).await;
    closed.close().await.unwrap();
    let port = process.port();
    process.kill();
    assert_eq!(unnamed_weights(data.path()).len(), 2);
    // The expiry task of a new server runs once when the server has started, and then every 30 s.
    let process = Process::with(data.path(), port, crate::child_server::ChildOptions::default());
    let http = Http::new(&process.url);
    assert_eq!(http.sampled(&accepted).await.len(), 200);
    assert_eq!(sample(&open).await.unwrap(), expected);
    let handle = service.restore_sampling_client(&closed.handle()).unwrap();
    let error = sample(&handle).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Rejected);
    assert!(error.to_string().contains("has ended: its client closed it"), "{error}");
    process.kill();
    let process = Process::with(data.path(), port, crate::child_server::ChildOptions::default());
    assert_eq!(unnamed_weights(data.path()).len(), 1);
    assert_eq!(sample(&open).await.unwrap(), expected);
    drop(process);
}
