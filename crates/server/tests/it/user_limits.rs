//! Limits of users: 429 for what another request relieves, 403 for a spent quota.

use serde_json::{Value, json};

use crate::harness::{Http, TestServer, step};
use crate::users::{administrator, create_key, key_server, user};

/// Sets the limits of a user.
async fn set_limits(test_server: &TestServer, user: &str, limits: Value) {
    let path = format!("/api/v1/users/{user}/limits");
    let body = limits.to_string().into_bytes();
    let (status, body) = administrator(test_server).send("PUT", &path, &[], body).await;
    assert_eq!(status, 200, "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn queued_requests_are_limited_per_user() {
    let test_server = key_server().await;
    let request = json!({"name": "alice", "role": "user", "limits": {"queued": 2}});
    let key = create_key(&test_server, request).await;
    let alice = Http::with_key(&test_server.server.base_url(), &key);
    let bob = user(&test_server, "bob", "bob", "user").await;
    let session = alice.session().await;
    let run = alice.model(&session).await;
    // Requests that wait for number 1.
    let mut waiting = Vec::new();
    for seq in [2, 3] {
        let (status, future) = alice.post("/optim_step", step(&run, seq, 0.1)).await;
        assert_eq!(status, 200, "{future}");
        waiting.push(future);
    }
    let (status, refused) = alice.post("/optim_step", step(&run, 4, 0.1)).await;
    assert_eq!(status, 429, "{refused}");
    let detail = refused["detail"].as_str().unwrap();
    assert!(detail.contains("user alice has 2 requests without a result"), "{detail}");
    // A retry of an accepted request is not a further request.
    assert_eq!(alice.post("/optim_step", step(&run, 3, 0.1)).await, (200, waiting[1].clone()));
    let other = bob.session().await;
    bob.model(&other).await;
    let (_, users) = administrator(&test_server).get("/api/v1/users").await;
    let alice_row = users["users"].as_array().unwrap().iter().find(|row| row["user"] == "alice");
    assert_eq!(alice_row.unwrap()["usage"]["queued"], 2, "{users}");
    assert_eq!(alice_row.unwrap()["limits"], json!({"queued": 2}), "{users}");
    set_limits(&test_server, "alice", json!({"queued": 3})).await;
    assert_eq!(alice.post("/optim_step", step(&run, 1, 0.1)).await.0, 200);
    for future in &waiting {
        alice.result(future).await;
    }
    set_limits(&test_server, "alice", json!({"queued": 1})).await;
    let (status, last) = alice.post("/optim_step", step(&run, 4, 0.1)).await;
    assert_eq!(status, 200, "the results free the limit: {last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_samples_are_limited_per_user() {
    let test_server = key_server().await;
    let alice = user(&test_server, "alice", "alice", "user").await;
    set_limits(&test_server, "alice", json!({"samples": 2})).await;
    let session = alice.session().await;
    let sampler = alice.sampler(&session).await;
    let sample = |seq: u64, count: u32| {
        json!({
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_params": {"max_tokens": 200, "stop": [], "seed": 1}, "num_samples": count,
            "sampling_session_id": sampler, "seq_id": seq,
        })
    };
    let (status, refused) = alice.post("/asample", sample(0, 3)).await;
    assert_eq!(status, 400, "a retry cannot succeed: {refused}");
    let (status, running) = alice.post("/asample", sample(1, 2)).await;
    assert_eq!(status, 200, "{running}");
    let (status, refused) = alice.post("/asample", sample(2, 1)).await;
    assert_eq!(status, 429, "{refused}");
    let completion = json!({"model": crate::harness::MODEL, "prompt": [5], "max_tokens": 1});
    let body = completion.to_string().into_bytes();
    let (status, refused) = alice.send("POST", "/v1/completions", &[], body.clone()).await;
    assert_eq!(status, 429, "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("the limit is 2"), "{refused}");
    alice.proto_result(&running).await;
    let (status, accepted) = alice.post("/asample", sample(2, 1)).await;
    assert_eq!(status, 200, "{accepted}");
    alice.proto_result(&accepted).await;
    assert_eq!(alice.send("POST", "/v1/completions", &[], body).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn spent_quotas_are_refused_for_good() {
    let test_server = key_server().await;
    let alice = user(&test_server, "alice", "alice", "user").await;
    set_limits(&test_server, "alice", json!({"tokens_per_day": 9, "bytes": 1})).await;
    let session = alice.session().await;
    let run = alice.model(&session).await;
    let pass = |seq: u64| {
        let data = vec![tinkex_wire::Datum::completion([5, 6, 7], [8, 9, 10]).unwrap()];
        let loss = tinkex_wire::LossFn::CrossEntropy;
        let pass = tinkex_wire::ForwardBackward::new(run.as_str(), data, loss);
        pass.seq_id(tinkex_wire::Seq::new(seq)).to_proto().unwrap().to_vec()
    };
    let path = "/api/v1/forward_backward";
    // The second pass is refused although the first may not be finished.
    let (status, first) = alice.send("POST", path, &[], pass(1)).await;
    assert_eq!(status, 200, "{first}");
    let (status, refused) = alice.send("POST", path, &[], pass(2)).await;
    assert_eq!(status, 403, "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("training quota of user alice is spent"));
    alice.proto_result(&first).await;
    assert_eq!(alice.send("POST", path, &[], pass(2)).await.0, 403);
    // Number 2 was refused for good, so the model continues with number 3.
    alice.save(&run, 3, "a").await;
    let save = json!({"model_id": run, "path": "b", "seq_id": 4});
    let (status, refused) = alice.post("/save_weights", save).await;
    assert_eq!(status, 403, "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("storage quota of user alice is spent"));
    let delete = format!("/api/v1/training_runs/{run}/checkpoints/weights/a");
    assert_eq!(alice.send("DELETE", &delete, &[], vec![]).await.0, 200);
    alice.save(&run, 5, "c").await;
}
