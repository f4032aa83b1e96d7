//! Servers that implement a part of the protocol: SkyRL 0.3.0, with the first version of the
//! protocol and without protobuf, and servers that refuse protobuf in other ways.

use serde_json::{Value, json};
use tinkex::{Datum, ErrorKind, LoraOptions, LossFn, TensorData};

use crate::scripted_server::ScriptedServer;

const POLL: &str = "POST /api/v1/retrieve_future";
const PASS: &str = "POST /api/v1/forward_backward";

fn not_found() -> Value {
    json!({"detail": "Not Found"})
}

fn submitted(id: &str) -> Value {
    json!({"future_id": id, "status": "pending", "request_id": id})
}

fn tensor(data: [f32; 2]) -> Value {
    json!({"data": data, "dtype": "float32", "shape": [2]})
}

fn pass_output() -> Value {
    let output = json!({
        "elementwise_loss": tensor([-0.0, 8.628_008]),
        "logprobs": tensor([-8.298_051, -8.628_008]),
    });
    json!({"loss_fn_output_type": "scalar", "loss_fn_outputs": [output], "metrics": {}})
}

/// Returns the response of SkyRL 0.3.0 to a body that is not JSON.
fn unreadable_body() -> Value {
    let fault = json!({"type": "missing", "loc": ["body"], "msg": "Field required", "input": null});
    json!({"detail": [fault]})
}

fn batch() -> Vec<Datum> {
    vec![Datum::completion([1, 2], [3]).unwrap()]
}

/// Returns the script of a server without a dynamic configuration, up to the creation of a model.
fn started() -> ScriptedServer {
    starting(404, not_found())
}

/// Returns the script of a server up to the creation of a model, with its response to the request
/// for its dynamic configuration.
fn starting(dynamic_status: u16, dynamic: Value) -> ScriptedServer {
    let session = json!({
        "type": "create_session", "info_message": null, "warning_message": null,
        "error_message": null, "session_id": "session_9dabe5de",
    });
    let submitted = json!({
        "model_id": "model_2f696cd3", "base_model": "base",
        "lora_config": {"rank": 8, "seed": 1}, "status": "created", "request_id": "2",
    });
    let created = json!({
        "model_id": "model_2f696cd3", "base_model": "base",
        "lora_config": {
            "rank": 8, "alpha": 32.0, "seed": 1, "train_attn": true, "train_mlp": true,
            "train_unembed": false,
        },
    });
    ScriptedServer::new()
        .respond("POST /api/v1/client/config", 200, json!({"pjwt_auth_enabled": false}))
        .respond("POST /api/v1/client/dynamic_config", dynamic_status, dynamic)
        .respond("POST /api/v1/create_session", 200, session)
        .respond("POST /api/v1/create_model", 200, submitted)
        .respond(POLL, 200, created)
}

#[tokio::test(start_paused = true)]
async fn a_server_without_protobuf_is_sent_json() {
    let fake = started()
        .respond(PASS, 422, unreadable_body())
        .respond(PASS, 200, submitted("3"))
        .respond(POLL, 200, pass_output())
        .respond("POST /api/v1/forward", 200, submitted("4"))
        .respond(POLL, 200, pass_output())
        .respond("POST /api/v1/sessions/session_9dabe5de/finish", 404, not_found());
    let service = fake.client();
    let model = service
        .create_lora_training_client(LoraOptions::new("base").rank(8).seed(1))
        .await
        .unwrap();
    let pass = model.forward_backward(batch(), LossFn::CrossEntropy).await.unwrap();
    assert_eq!(pass.loss(), Some(f64::from(8.628_008_f32)), "the sum over tokens");
    let forward = model.forward(batch(), LossFn::CrossEntropy).await.unwrap();
    assert_eq!(forward.outputs.get(0).unwrap().f32("logprobs").unwrap().len(), 2);
    service.finish().await;
    fake.finish();

    let received = fake.received();
    let sent = |path: &str| received.iter().find(|received| received.url.ends_with(path)).unwrap();
    let passes: Vec<_> = received.iter().filter(|r| r.url.ends_with("/forward_backward")).collect();
    let [empty, backward] = passes[..] else { panic!("{passes:?}") };
    assert_eq!(empty.header("content-type"), Some("application/x-protobuf"));
    assert!(empty.body.is_empty(), "nothing that the server could train");
    assert_eq!(backward.header("content-type"), Some("application/json"));
    let first = &backward.json()["forward_backward_input"]["data"][0];
    assert_eq!(first["loss_fn_inputs"]["target_tokens"]["data"], json!([2, 3]));
    assert_eq!(sent("/forward").json()["forward_input"]["loss_fn"], "cross_entropy");
}

#[tokio::test(start_paused = true)]
async fn matrices_are_rejected_for_the_first_protocol() {
    let fake = started().respond(PASS, 422, unreadable_body());
    let model =
        fake.client().create_lora_training_client(LoraOptions::new("base").rank(8)).await.unwrap();
    let rows = TensorData::from_rows(&[[2_i64, 3], [3, 4]]).unwrap();
    let weights = TensorData::from_rows(&[[0.5_f32, 0.5], [0.5, 0.5]]).unwrap();
    let datum = Datum::builder([1, 2]).loss_input("target_tokens", rows);
    let datum = datum.loss_input("weights", weights).build().unwrap();
    let error = model.forward_backward(vec![datum], LossFn::CrossEntropy).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error:?}");
    assert!(error.to_string().contains("one number per token"), "{error}");
    fake.finish();
}

#[tokio::test(start_paused = true)]
async fn prompt_logprobs_without_the_first_token_are_aligned() {
    let sampled = json!({
        "sequences": [{"stop_reason": "length", "tokens": [779], "logprobs": [-8.1]}],
        "prompt_logprobs": [-8.1438, -7.418],
    });
    let session = json!({"type": "create_session", "session_id": "session_9dabe5de"});
    let sampler = json!({
        "type": "create_sampling_session", "sampling_session_id": "sampling_5b1e6c27",
    });
    let fake = ScriptedServer::new()
        .respond("POST /api/v1/client/config", 404, not_found())
        .respond("POST /api/v1/client/dynamic_config", 404, not_found())
        .respond("POST /api/v1/create_session", 200, session)
        .respond("POST /api/v1/create_sampling_session", 200, sampler)
        .respond("POST /api/v1/asample", 200, submitted("5"))
        .respond(POLL, 200, sampled);
    let sampler = fake.client().create_sampling_client("base").await.unwrap();
    let scored = sampler.compute_logprobs([3, 4, 5]).await.unwrap();
    assert_eq!(scored.iter().collect::<Vec<_>>(), [None, Some(-8.1438), Some(-7.418)]);
    fake.finish();
}

#[tokio::test(start_paused = true)]
async fn a_sampler_path_without_its_kind_is_completed() {
    let saved = json!({
        "path": "tinker://model_ab5a65ba/step-000004", "type": "save_weights_for_sampler",
    });
    let fake = started()
        .respond("POST /api/v1/save_weights_for_sampler", 200, submitted("6"))
        .respond(POLL, 200, saved);
    let model =
        fake.client().create_lora_training_client(LoraOptions::new("base").rank(8)).await.unwrap();
    let path = model.save_weights_for_sampler("step-000004").await.unwrap();
    assert_eq!(path.to_string(), "tinker://model_ab5a65ba/sampler_weights/step-000004");
    fake.finish();
}

/// Responses that refuse the encoding of a protobuf pass.
fn refusals() -> [(u16, Value); 3] {
    let protobuf = json!({"detail": "forward_backward requires a application/json body"});
    [(415, protobuf), (404, not_found()), (422, unreadable_body())]
}

#[tokio::test(start_paused = true)]
async fn a_pass_refused_as_protobuf_is_sent_once_more_as_json() {
    for (status, refusal) in refusals() {
        let fake = starting(200, json!({}))
            .respond(PASS, status, refusal)
            .respond(PASS, 200, submitted("3"))
            .respond(POLL, 200, pass_output())
            .respond(PASS, 200, submitted("4"))
            .respond(POLL, 200, pass_output());
        let client = fake.client();
        let model =
            client.create_lora_training_client(LoraOptions::new("base").rank(8)).await.unwrap();
        for _ in 0..2 {
            model.forward_backward(batch(), LossFn::CrossEntropy).await.unwrap();
        }
        fake.finish();
        let encodings: Vec<_> = fake
            .received()
            .iter()
            .filter(|received| received.url.ends_with("/forward_backward"))
            .map(|received| received.header("content-type").unwrap().to_owned())
            .collect();
        let json = "application/json";
        assert_eq!(encodings, ["application/x-protobuf", json, json], "after a {status}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pass_rejected_for_its_content_is_not_sent_again() {
    let loss = json!({"loc": ["forward_backward_input", "loss_fn"], "msg": "unknown loss"});
    for (status, rejection) in [
        (404, json!({"detail": "Model not found"})),
        (422, json!({"detail": [loss]})),
        (422, json!({"detail": "Invalid proto forward_backward body"})),
    ] {
        let fake = starting(200, json!({})).respond(PASS, status, rejection);
        let client = fake.client();
        let model =
            client.create_lora_training_client(LoraOptions::new("base").rank(8)).await.unwrap();
        let error = model.forward_backward(batch(), LossFn::CrossEntropy).await.unwrap_err();
        assert_eq!(error.status(), Some(status), "{error}");
        fake.finish();
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_refuses_both_encodings_is_reported_with_its_first_refusal() {
    let protobuf = json!({"detail": "no endpoint for protobuf"});
    let fake = starting(200, json!({})).respond(PASS, 415, protobuf).respond(
        PASS,
        415,
        json!({"detail": "no endpoint for JSON"}),
    );
    let client = fake.client();
    let model = client.create_lora_training_client(LoraOptions::new("base").rank(8)).await.unwrap();
    let error = model.forward_backward(batch(), LossFn::CrossEntropy).await.unwrap_err();
    assert!(error.to_string().contains("no endpoint for protobuf"), "{error}");
    fake.finish();
}

#[tokio::test(start_paused = true)]
async fn a_clone_draws_its_number_if_sampling_sessions_cannot_be_joined() {
    let config = json!({"pjwt_auth_enabled": false, "sample_join_sampling_session": true});
    let session = json!({"type": "create_session", "session_id": "s"});
    let sampler = json!({"type": "create_sampling_session", "sampling_session_id": "s:sample:0"});
    let sampled = json!({
        "type": "sample",
        "sequences": [{"stop_reason": "length", "tokens": [7], "logprobs": [-1.0]}],
    });
    let fake = ScriptedServer::new()
        .respond("POST /api/v1/client/config", 200, config)
        .respond("POST /api/v1/client/dynamic_config", 404, not_found())
        .respond("POST /api/v1/create_session", 200, session)
        .respond("POST /api/v1/create_sampling_session", 200, sampler)
        .respond("POST /api/v1/join_sampling_session", 404, not_found())
        .respond("POST /api/v1/asample", 200, submitted("5"))
        .respond(POLL, 200, sampled);
    let service = fake.client();
    let handle = service.create_sampling_client("base").await.unwrap().handle();
    let clone = service.restore_sampling_client(&handle).unwrap();
    let params = tinkex::SamplingParams::new().max_tokens(1);
    let response = clone.sample([3, 4], params).await.unwrap();
    assert_eq!(&response.sequences[0].tokens[..], [7]);
    fake.finish();
}
