//! Invalid training data: rejected at admission if possible, a failed request otherwise. The model
//! stays usable in both cases.

use serde_json::{Value, json};
use tinkex_wire::{
    Datum, ForwardBackward, LossFn, ModelInput, Seq, TensorData, TensorValues, loss_input,
};

use crate::harness::{Http, TestServer, step};

/// Sends a pass with a valid datum and `datum`.
async fn pass(http: &Http, model: &str, seq: u64, datum: Datum, loss: LossFn) -> (u16, Value) {
    let data = vec![Datum::completion([3], [4]).unwrap(), datum];
    let request = ForwardBackward::new(model, data, loss).seq_id(Seq::new(seq));
    let mut body = request.to_proto().unwrap().to_vec();
    for name in [TARGETS, WEIGHTS] {
        let placeholder = format!("?{}", &name[1..]);
        for at in 0..body.len() - name.len() {
            if body[at..].starts_with(placeholder.as_bytes()) {
                body[at] = name.as_bytes()[0];
            }
        }
    }
    http.send("POST", "/api/v1/forward_backward", &[], body).await
}

/// Builds a datum that the client would reject. The client does not validate inputs with unknown
/// names, so the names start with a question mark, which [`pass`] replaces in the encoded request.
fn datum(tokens: &[u32], inputs: &[(&str, TensorData)]) -> Datum {
    let mut builder = Datum::builder(ModelInput::from_tokens(tokens.to_vec()));
    for (name, tensor) in inputs {
        builder = builder.loss_input(format!("?{}", &name[1..]), tensor.clone());
    }
    builder.build().unwrap()
}

const TARGETS: &str = loss_input::TARGET_TOKENS;
const WEIGHTS: &str = loss_input::WEIGHTS;

fn ints(values: &[i64]) -> TensorData {
    TensorData::from(values)
}

fn floats(values: &[f32]) -> TensorData {
    TensorData::from(values)
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_data_is_rejected_at_admission_and_the_model_stays_usable() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let good = ints(&[4, 5]);
    let cross = LossFn::CrossEntropy;
    let long = vec![1_u32; 300];
    let matrix = TensorData::new(TensorValues::Int64(vec![4, 5, 6, 7].into()), [1, 2, 2]).unwrap();
    let cases: Vec<(&str, Datum, LossFn)> = vec![
        ("target_tokens", datum(&[3, 4], &[]), cross.clone()),
        ("target_tokens", datum(&[3, 4], &[(TARGETS, ints(&[4]))]), cross.clone()),
        ("target_tokens", datum(&[3, 4], &[(TARGETS, floats(&[4.0, 5.0]))]), cross.clone()),
        ("target_tokens", datum(&[3, 4], &[(TARGETS, matrix)]), cross.clone()),
        (
            "target_tokens[1] is token -1,",
            datum(&[3, 4], &[(TARGETS, ints(&[4, -1]))]),
            cross.clone(),
        ),
        (
            "target_tokens[0] is token -100,",
            datum(&[3, 4], &[(TARGETS, ints(&[-100, 4]))]),
            cross.clone(),
        ),
        (
            "model_input[0] is token -1,",
            datum(&[u32::MAX, 4], &[(TARGETS, good.clone())]),
            cross.clone(),
        ),
        ("target_tokens", datum(&[3, 4], &[(TARGETS, ints(&[4, 1 << 40]))]), cross.clone()),
        ("model_input", datum(&[3, 1_000_000], &[(TARGETS, good.clone())]), cross.clone()),
        ("model_input", datum(&long, &[(TARGETS, ints(&[1; 300]))]), cross.clone()),
        (
            "weights",
            datum(&[3, 4], &[(TARGETS, good.clone()), (WEIGHTS, ints(&[1, 1]))]),
            cross.clone(),
        ),
        (
            "weights",
            datum(&[3, 4], &[(TARGETS, good.clone()), (WEIGHTS, floats(&[1.0]))]),
            cross.clone(),
        ),
        (
            "NonFiniteInTensor",
            datum(&[3, 4], &[(TARGETS, good.clone()), (WEIGHTS, floats(&[1.0, f32::NAN]))]),
            cross,
        ),
        ("logprobs", datum(&[3, 4], &[(TARGETS, good)]), LossFn::Ppo),
    ];
    let count = cases.len() as u64;
    for (seq, (field, datum, loss)) in (1..).zip(cases) {
        let (status, rejected) = pass(&http, &model, seq, datum, loss).await;
        assert_eq!(status, 400, "{field}: {rejected}");
        let detail = rejected["detail"].as_str().unwrap();
        assert!(detail.contains("data[") && detail.contains(field), "{field}: {detail}");
    }
    // The rejected numbers leave no gap, and the valid datums contributed no gradient.
    let (_, next) = http.post("/optim_step", step(&model, count + 1, 0.1)).await;
    assert_eq!(http.result(&next).await["metrics"]["unclipped_grad_l2:mean"], json!(0.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_numeric_error_fails_the_request_and_the_model_stays_usable() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let data = [-1.0, -1e30].map(|p| Datum::rollout([3], [4], vec![p], 1.0).unwrap()).to_vec();
    let request =
        ForwardBackward::new(model.as_str(), data, LossFn::ImportanceSampling).seq_id(Seq::FIRST);
    let body = request.to_proto().unwrap().to_vec();
    let (status, future) = http.send("POST", "/api/v1/forward_backward", &[], body).await;
    assert_eq!(status, 200, "{future}");
    let result = http.result(&future).await;
    assert_eq!(result["category"], "user", "{result}");
    let (_, next) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    assert_eq!(http.result(&next).await["metrics"]["unclipped_grad_l2:mean"], json!(0.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_negative_seed_is_used_as_its_bit_pattern() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let mut create = crate::harness::create_model(&session, 0);
    create["lora_config"]["seed"] = json!(-7);
    let (status, future) = http.post("/create_model", create).await;
    assert_eq!(status, 200, "{future}");
    let sampler = http.sampler(&session).await;
    let mut futures = Vec::new();
    for (seq, seed) in [(0, json!(-7)), (1, json!(u64::MAX - 6)), (2, json!(7))] {
        let request = json!({
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "seq_id": seq,
            "sampling_params": {"max_tokens": 20, "stop": [], "seed": seed},
            "sampling_session_id": sampler,
        });
        let (status, future) = http.post("/asample", request).await;
        assert_eq!(status, 200, "{future}");
        futures.push(future);
    }
    let mut tokens = Vec::new();
    for future in &futures {
        tokens.push(http.sampled(future).await);
    }
    assert_eq!(tokens[0], tokens[1], "both seeds have the same bits");
    assert_ne!(tokens[0], tokens[2]);
}
