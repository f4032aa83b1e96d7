//! Sampling through the client.

use serde_json::json;
use tinkex::{LoraOptions, SampleOptions, SamplingParams, StopCondition, TensorData};

use crate::harness::{MODEL, TestServer};

fn params(tokens: u32) -> SamplingParams {
    SamplingParams::new().max_tokens(tokens).stop(StopCondition::NEVER)
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_seeds_repeat_and_samples_differ() {
    let test_server = TestServer::new().await;
    let sampler = test_server.client().create_sampling_client(MODEL).await.unwrap();
    let draw = || sampler.sample([3, 4, 5], SampleOptions::new(params(12).seed(7)).num_samples(3));
    let one = draw().await.unwrap();
    let two = draw().await.unwrap();
    assert_eq!(one.sequences.len(), 3);
    for (a, b) in one.sequences.iter().zip(&two.sequences) {
        assert_eq!((a.tokens.len(), &a.tokens, &a.logprobs), (12, &b.tokens, &b.logprobs));
    }
    assert_ne!(one.sequences[0].tokens, one.sequences[1].tokens);
    let other = sampler.sample([3, 4, 5], params(12).seed(8)).await.unwrap();
    assert_ne!(other.sequences[0].tokens, one.sequences[0].tokens);
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_logprobs_equal_those_of_training() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let model =
        service.create_lora_training_client(LoraOptions::new(MODEL).rank(4).seed(3)).await.unwrap();
    let sampler = model.save_weights_and_get_sampling_client().await.unwrap();
    let text = [9_u32, 8, 7, 6, 5];
    let datum = tinkex::Datum::completion([9], [8, 7, 6, 5]).unwrap();
    let trained = model.forward(vec![datum], tinkex::LossFn::CrossEntropy).await.unwrap();
    let trained = trained.outputs.get(0).unwrap().f32("logprobs").unwrap().to_vec();
    let scored = sampler.compute_logprobs(text).await.unwrap();
    assert_eq!(scored.get(0), None);
    assert_eq!(&scored.as_slice()[1..], &trained[..], "bit-identical");

    let targets = TensorData::from_rows(&[[8_i64, -1], [7, 1], [-1, -1], [5, 2]]).unwrap();
    let result = sampler
        .sample(
            text,
            SampleOptions::new(params(2).temperature(0.5))
                .prompt_logprobs_last(2)
                .topk_prompt_logprobs(3)
                .topk_sample_logprobs(2)
                .target_prompt_logprobs(targets)
                .prompt_alt_tokens(4),
        )
        .await
        .unwrap();
    let prompt = result.prompt_logprobs.unwrap();
    assert_eq!((prompt.len(), prompt.get(2)), (5, None));
    assert_eq!(prompt.get(4), scored.get(4));
    let topk = result.topk_prompt_logprobs.unwrap();
    assert_eq!((topk.len(), topk.k()), (5, 3));
    assert!(topk.row(0).is_none());
    let targets = result.target_prompt_logprobs.unwrap();
    assert_eq!(targets.as_f32().unwrap()[0], scored.as_slice()[1]);
    assert_eq!(targets.as_f32().unwrap()[1], 0.0);
    assert_eq!(result.prompt_alt_tokens.unwrap().tokens.shape().dims(), [4, 4]);
    assert_eq!(result.sequences[0].topk_logprobs.as_ref().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_rejected_at_admission() {
    let test_server = TestServer::new().await;
    let sampler = test_server.client().create_sampling_client(MODEL).await.unwrap();
    let rejected = [
        sampler.sample([3], params(1000)).await,
        sampler.sample([1_000_000], params(1)).await,
        sampler.sample([3], params(0)).await,
        sampler.sample([3], SampleOptions::new(params(1)).num_samples(0)).await,
        sampler.sample([3], params(1).temperature(-1.0)).await,
        sampler.sample([3], params(1).stop("text")).await,
        sampler.sample(Vec::<u32>::new(), params(1)).await,
    ];
    for (i, result) in rejected.into_iter().enumerate() {
        let error = result.expect_err("the request is invalid");
        assert_eq!(error.status(), Some(400), "case {i}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_samples_of_two_clients_all_finish() {
    let test_server = TestServer::new().await;
    let sampler = test_server.client().create_sampling_client(MODEL).await.unwrap();
    let clone = test_server.client().restore_sampling_client(&sampler.handle()).unwrap();
    let futures: Vec<_> = (0..100_u32)
        .map(|i| {
            let client = if i % 2 == 0 { &sampler } else { &clone };
            client.sample([i % 100 + 1], params(4).seed(u64::from(i)))
        })
        .collect();
    for (i, future) in futures.into_iter().enumerate() {
        let result = future.await.unwrap();
        assert_eq!(result.sequences[0].tokens.len(), 4, "{i}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_sample_fails_and_a_retry_gets_the_same_id() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let sampler = format!("{session}:sample:0");
    let created = http
        .post(
            "/create_sampling_session",
            json!({"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}),
        )
        .await;
    assert_eq!(
        created,
        (200, json!({"type": "create_sampling_session", "sampling_session_id": sampler}))
    );
    let request = |seq: u64, tokens: u32| {
        json!({
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "num_samples": 2,
            "sampling_params": {"max_tokens": tokens, "stop": []},
            "sampling_session_id": sampler, "seq_id": seq,
        })
    };
    let (_, first) = http.post("/asample", request(0, 3)).await;
    assert_eq!(first["sample_sequence_ids"].as_array().unwrap().len(), 2);
    assert_eq!(http.post("/asample", request(0, 3)).await.1, first);
    let (status, rejected) = http.post("/asample", request(0, 4)).await;
    assert_eq!(status, 400, "{rejected}");

    let mut long = request(1, 250);
    long["num_samples"] = json!(3000);
    let (_, long) = http.post("/asample", long).await;
    let (status, _) = http.post("/cancel_future", json!({"request_id": long["request_id"]})).await;
    assert_eq!(status, 200);
    let result = http.result(&long).await;
    assert!(result["error"].as_str().unwrap().contains("cancelled"), "{result}");

    // One poll returns all completions; acknowledged results are removed.
    let poll = |cursor: u64, acks: Vec<&serde_json::Value>| {
        json!({
            "target": {
                "type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0,
            },
            "prev_cursor": cursor, "retrieved_request_ids": acks,
        })
    };
    let (_, page) = http.post("/retrieve_futures", poll(0, vec![])).await;
    let page = if page["completions"].as_array().unwrap().len() < 2 {
        http.result(&first).await;
        http.post("/retrieve_futures", poll(0, vec![])).await.1
    } else {
        page
    };
    assert_eq!(page["completions"].as_array().unwrap().len(), 2, "{page}");
    let cursor = page["cursor"].as_u64().unwrap();
    let mut request = poll(cursor, vec![&first["request_id"]]);
    request["timeout"] = json!(0.0);
    let (_, page) = http.post("/retrieve_futures", request).await;
    assert_eq!(page, json!({"completions": [], "cursor": cursor}));
    let removed = http.post("/retrieve_future", json!({"request_id": first["request_id"]})).await;
    assert_eq!(removed.0, 410);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_existing_sampling_session_accepts_only_retries() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let save = json!({
        "model_id": model, "path": "a", "seq_id": 1, "type": "save_weights_for_sampler",
    });
    let (_, saved) = http.post("/save_weights_for_sampler", save).await;
    http.result(&saved).await;
    let create = json!({
        "session_id": session, "sampling_session_seq_id": 0,
        "model_path": format!("tinker://{model}/sampler_weights/a"),
    });
    let (status, created) = http.post("/create_sampling_session", create.clone()).await;
    assert_eq!(status, 200, "{created}");
    let checkpoint = format!("/api/v1/training_runs/{model}/checkpoints/sampler_weights/a");
    assert_eq!(http.send("DELETE", &checkpoint, &[], vec![]).await.0, 200);
    assert_eq!(http.post("/create_sampling_session", create).await, (200, created));

    // Sampling session 1 has trained weights without a checkpoint.
    let save = json!({
        "model_id": model, "sampling_session_seq_id": 1, "seq_id": 2,
        "type": "save_weights_for_sampler",
    });
    let (_, saved) = http.post("/save_weights_for_sampler", save).await;
    http.result(&saved).await;
    for n in [0, 1] {
        let create =
            json!({"session_id": session, "sampling_session_seq_id": n, "base_model": MODEL});
        let (status, rejected) = http.post("/create_sampling_session", create).await;
        assert_eq!(status, 400, "{rejected}");
        assert!(rejected["detail"].as_str().unwrap().contains("another model"), "{rejected}");
    }
}
