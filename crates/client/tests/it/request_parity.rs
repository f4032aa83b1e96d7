//! Requests that the client builds, compared with recordings of the Python SDK (`fixtures/wire`).

use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;
use serde_json::{Value, json};
use tinkex::testing::RecordedCall;
use tinkex::{
    AdamParams, Datum, DimuonParams, LossConfig, LossFn, LossSpec, SampleOptions, SamplingParams,
    StopCondition,
};
use tinkex_wire::ForwardBackward;

use crate::numbered_server::NumberedServer;

/// Session id of the recordings.
const SESSION: &str = "11111111-2222-4333-8444-555555555555";

/// Recorded request of `fixtures/wire`.
struct RecordedRequest(Value);

impl RecordedRequest {
    fn load(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wire");
        let text = std::fs::read(folder.join(format!("{name}.request.json"))).unwrap();
        Self(serde_json::from_slice(&text).unwrap())
    }

    /// Decodes the protobuf body of a training request.
    fn pass(&self) -> ForwardBackward {
        use base64::Engine as _;
        let text = self.0["body_base64"].as_str().unwrap();
        let body = base64::engine::general_purpose::STANDARD.decode(text).unwrap();
        ForwardBackward::from_proto(&Bytes::from(body)).unwrap()
    }

    /// Asserts that the request has the recorded JSON body. `varying` are ids and sequence numbers
    /// that depend on earlier requests; they must be present but may differ.
    fn assert_same_body(&self, sent: &RecordedCall, varying: &[&str]) {
        let mut sent = sent.json();
        let mut recorded = self.0["body"].clone();
        for body in [&mut sent, &mut recorded] {
            for field in varying {
                assert!(body.as_object_mut().unwrap().remove(*field).is_some(), "no {field}");
            }
        }
        assert_eq!(sent, recorded);
    }

    /// Asserts that the request has the recorded values of these headers.
    fn assert_same_headers(&self, sent: &RecordedCall, names: &[&str]) {
        for name in names {
            let recorded = self.0["headers"][name].as_str();
            assert!(recorded.is_some(), "{name} is not recorded");
            assert_eq!(sent.header(name), recorded, "{name}");
        }
    }
}

/// Asserts that two passes have equal fields. The order of loss inputs and of the settings of the
/// loss is not significant.
pub(crate) fn assert_same_pass(sent: &ForwardBackward, recorded: &ForwardBackward, name: &str) {
    assert_eq!(sent.mode, recorded.mode, "{name}");
    assert_eq!(sent.loss_fn, recorded.loss_fn, "{name}");
    let settings: BTreeMap<_, _> = sent.loss_fn_config.iter().collect();
    assert_eq!(settings, recorded.loss_fn_config.iter().collect(), "{name}");
    assert_eq!(sent.data.len(), recorded.data.len(), "{name}");
    for (sent, recorded) in sent.data.iter().zip(&recorded.data) {
        assert_eq!(sent.model_input(), recorded.model_input(), "{name}");
        assert_eq!(sent.provenance(), recorded.provenance(), "{name}");
        let sent: BTreeMap<_, _> = sent.loss_inputs().collect();
        assert_eq!(sent, recorded.loss_inputs().collect(), "{name}");
    }
}

fn datum(tokens: &[u32], targets: &[i64], weights: &[f32]) -> Datum {
    Datum::builder(tokens.to_vec())
        .loss_input("target_tokens", targets.to_vec())
        .loss_input("weights", weights.to_vec())
        .build()
        .unwrap()
}

/// Covers T6.2.
#[tokio::test(start_paused = true)]
async fn passes_equal_those_of_the_python_sdk() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let small = || vec![datum(&[1, 2, 3, 4], &[2, 3, 4, 5], &[0.0, 1.0, 1.0, 0.5])];
    let uploaded = LossSpec::new(LossFn::Custom, LossConfig::custom(&"loss-1".into()));
    let calls = [
        model.forward_backward(small(), LossFn::CrossEntropy),
        model.forward(small(), LossFn::CrossEntropy),
        model.forward_backward(vec![datum(&[1; 50], &[1; 50], &[1.0; 50])], uploaded),
    ];
    let names = ["forward_backward_dense", "forward", "forward_backward_custom_loss"];
    for (i, (call, name)) in calls.into_iter().zip(names).enumerate() {
        call.await.unwrap();
        let request = &server.requests("/forward_backward")[i];
        let recorded = RecordedRequest::load(name);
        recorded.assert_same_headers(request, &["content-type", "accept"]);
        let sent = ForwardBackward::from_proto(&request.body).unwrap();
        let recorded = recorded.pass();
        assert_same_pass(&sent, &recorded, name);
        // The server assigns the model id, and other requests preceded the recorded one.
        assert_eq!(recorded.model_id.to_string(), format!("{SESSION}:train:0"), "{name}");
        assert_eq!(sent.model_id, "s:train:0", "{name}");
        assert_eq!(sent.seq_id.map(|seq| seq.get()), Some(i as u64 + 1), "{name}");
        assert!(recorded.seq_id.is_some(), "{name}");
    }
}

/// Covers T6.2.
#[tokio::test(start_paused = true)]
async fn optimizer_steps_equal_those_of_the_python_sdk() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let rate = 0.0001;
    model.optim_step(AdamParams::with_learning_rate(rate)).await.unwrap();
    model.optim_step(DimuonParams::with_learning_rate(rate)).await.unwrap();
    let sent = server.requests("/optim_step");
    let names = ["optim_step_adam", "optim_step_dimuon"];
    assert_eq!(sent.len(), names.len());
    for (name, sent) in names.into_iter().zip(&sent) {
        let recorded = RecordedRequest::load(name);
        recorded.assert_same_headers(sent, &["content-type", "accept"]);
        recorded.assert_same_body(sent, &["model_id", "seq_id"]);
    }
}

/// Covers T6.2.
#[tokio::test(start_paused = true)]
async fn polls_equal_those_of_the_python_sdk() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let data = || vec![datum(&[1], &[2], &[1.0])];
    model.forward_backward(data(), LossFn::CrossEntropy).await.unwrap();
    model.forward(data(), LossFn::CrossEntropy).await.unwrap();
    model.optim_step(AdamParams::default()).await.unwrap();
    let sampler = server.sampler().await;
    // The server announces the size of the result first; the second poll asks for the result.
    let metadata = json!({"status": "complete_metadata", "response_payload_size": 8});
    let one_token = json!({"proto": b"\x0a\x06\x12\x04\x07\0\0\0"});
    server.respond("q0", vec![metadata, one_token]);
    sampler.sample([1], SamplingParams::new()).await.unwrap();
    let sent = server.requests("/retrieve_future");
    let names = [
        "retrieve_future_create_model",
        "retrieve_future_forward_backward",
        "retrieve_future_forward",
        "retrieve_future_optim_step",
        "retrieve_future_metadata_0",
        "retrieve_future_metadata_1",
    ];
    assert_eq!(sent.len(), names.len());
    for (name, sent) in names.into_iter().zip(&sent) {
        let recorded = RecordedRequest::load(name);
        let headers =
            ["content-type", "accept", "x-tinker-request-type", "x-tinker-request-iteration"];
        recorded.assert_same_headers(sent, &headers);
        recorded.assert_same_body(sent, &["request_id"]);
    }
}

/// Covers T6.2.
#[tokio::test(start_paused = true)]
async fn sampling_sessions_equal_those_of_the_python_sdk() {
    let server = NumberedServer::new(json!({}));
    server.session_id(SESSION);
    let service = server.builder().build().unwrap();
    service.create_sampling_client("Qwen/Qwen3-8B").await.unwrap();
    let path = format!("tinker://{SESSION}:train:0/sampler_weights/s1");
    service.create_sampling_client_from(&path).await.unwrap();
    let sent = server.requests("/create_sampling_session");
    let names = ["create_sampling_session_base_model", "create_sampling_session_model_path"];
    assert_eq!(sent.len(), names.len());
    for (name, sent) in names.into_iter().zip(&sent) {
        RecordedRequest::load(name).assert_same_body(sent, &[]);
    }
}

/// Covers T6.2.
#[tokio::test(start_paused = true)]
async fn sample_requests_equal_those_of_the_python_sdk() {
    let server = NumberedServer::new(json!({}));
    let prompt = || [1, 2, 3, 4];
    let params = SamplingParams::new;
    let one = || params().max_tokens(1);
    for (name, options) in [
        ("asample_minimal", SampleOptions::new(params())),
        (
            "asample_stop_string_seed",
            SampleOptions::new(
                params().max_tokens(16).seed(42).stop("\n\n").temperature(0.7).top_k(50).top_p(0.9),
            )
            .num_samples(2),
        ),
        ("asample_stop_list_str", SampleOptions::new(params().stop(["a", "b"]))),
        ("asample_stop_list_int", SampleOptions::new(params().stop([1, 2]))),
        ("asample_stop_empty_list", SampleOptions::new(params().stop(StopCondition::NEVER))),
        ("asample_prompt_logprobs", SampleOptions::new(one()).prompt_logprobs()),
        ("asample_prompt_logprobs_last_n", SampleOptions::new(one()).prompt_logprobs_last(2)),
        (
            "asample_topk",
            SampleOptions::new(params().max_tokens(3))
                .prompt_logprobs()
                .topk_prompt_logprobs(2)
                .topk_sample_logprobs(2),
        ),
        ("asample_record_stability_info", SampleOptions::new(params()).record_stability_info()),
    ] {
        // The fake response does not match every request; only the request is compared.
        let _ = server.sampler().await.sample(prompt(), options).await;
        let sent = server.requests("/asample").pop().unwrap();
        let recorded = RecordedRequest::load(name);
        let headers = ["content-type", "accept", "x-tinker-sampling-backpressure"];
        recorded.assert_same_headers(&sent, &headers);
        recorded.assert_same_body(&sent, &["seq_id", "sampling_session_id"]);
    }
}
