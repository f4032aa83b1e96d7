//! A training run of the Python SDK, repeated with this client on the same server.

use serde_json::{Value, json};
use tinkex::{
    AdamParams, BatchOutput, Datum, Env, LoraOptions, LossFn, SamplingParams, ServiceClient,
    StopCondition,
};

fn setting(name: &str) -> String {
    #[expect(clippy::disallowed_methods, reason = "cargo xtask conformance passes settings")]
    std::env::var(name).unwrap_or_else(|_| panic!("cargo xtask conformance sets {name}"))
}

/// Returns the metrics and log-probabilities of a pass in the form of the Python SDK.
///
/// JSON has the shortest text of a double, so equal numbers have equal forms. Log-probabilities
/// are widened to doubles, as numpy does.
fn numbers(output: &BatchOutput) -> Value {
    let metrics: serde_json::Map<String, Value> =
        output.metrics.iter().map(|(name, value)| (name.clone(), json!(value.as_f64()))).collect();
    let logprobs: Vec<Vec<f64>> = output
        .outputs
        .iter()
        .map(|datum| datum.f32("logprobs").unwrap().iter().map(|value| (*value).into()).collect())
        .collect();
    json!({"metrics": metrics, "logprobs": logprobs})
}

/// The server computes the same bits for the same requests, so all numbers are equal.
#[tokio::test]
#[ignore = "needs a server that the Python SDK trained on; cargo xtask conformance runs it"]
async fn the_client_and_the_python_sdk_train_to_the_same_numbers() {
    let text = std::fs::read(setting("TINKEX_CONFORMANCE_NUMBERS")).unwrap();
    let expected: Value = serde_json::from_slice(&text).unwrap();
    let service = ServiceClient::builder()
        .env(Env::empty())
        .base_url(setting("TINKEX_CONFORMANCE_URL"))
        .api_key("tml-local")
        .without_telemetry()
        .build()
        .unwrap();
    let options = LoraOptions::new(setting("TINKEX_CONFORMANCE_MODEL")).rank(4).seed(11);
    let model = service.create_lora_training_client(options).await.unwrap();
    let data = || {
        vec![
            Datum::completion([5, 6, 7], [8, 9, 10]).unwrap(),
            Datum::completion([11], [12, 13]).unwrap(),
        ]
    };
    let mut steps = Vec::new();
    for _ in 0..3 {
        let output = model.forward_backward(data(), LossFn::CrossEntropy).await.unwrap();
        model.optim_step(AdamParams::with_learning_rate(1e-2)).await.unwrap();
        steps.push(numbers(&output));
    }
    let after = model.forward(data(), LossFn::CrossEntropy).await.unwrap();
    steps.push(numbers(&after));
    let sampler = model.save_weights_and_get_sampling_client().await.unwrap();
    let params = SamplingParams::new().max_tokens(8).seed(3).stop(StopCondition::NEVER);
    let response = sampler.sample([5, 6], params).await.unwrap();
    let sequence = &response.sequences[0];
    let logprobs: Vec<f64> =
        sequence.logprobs.as_ref().unwrap().iter().flatten().map(f64::from).collect();
    let sample = json!({"tokens": sequence.tokens.to_vec(), "logprobs": logprobs});
    assert_eq!(json!({"steps": steps, "sample": sample}), expected);
}
