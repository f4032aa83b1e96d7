//! Direct preference optimization compared with recorded results of torch.

use std::path::Path;

use serde_json::Value;
use tinkex::{
    AdamParams, Datum, RestoreMode, ServiceClient, Tokens, TrainingClient, TrainingExample,
};
use tinkex_recipes::dpo::{self, DpoPair};
use tinkex_weights::TensorFile;

use crate::harness::{MODEL, TestServer, golden};

const TENSORS: &str = "adapter_model.safetensors";

/// Recorded run.
struct Recording {
    json: Value,
    pairs: Vec<DpoPair>,
}

impl Recording {
    fn read() -> Self {
        let json: Value =
            serde_json::from_slice(&std::fs::read(golden("qwen3").join("dpo.json")).unwrap())
                .unwrap();
        let pairs = json["pairs"].as_array().unwrap().iter().map(|pair| {
            let prompt = pair["prompt"].as_u64().unwrap();
            let example = |name: &str| {
                let tokens: Vec<u32> = serde_json::from_value(pair[name].clone()).unwrap();
                let weights =
                    (0..tokens.len() as u64).map(|at| f32::from(u8::from(at >= prompt))).collect();
                TrainingExample { tokens: Tokens::from(tokens), weights }
            };
            DpoPair::new(example("chosen"), example("rejected"))
        });
        let pairs = pairs.collect();
        Self { json, pairs }
    }

    fn beta(&self) -> f64 {
        self.json["beta"].as_f64().unwrap()
    }

    fn adam(&self) -> AdamParams {
        serde_json::from_value(self.json["adam"].clone()).unwrap()
    }

    /// Imports the recorded adapter, and returns a model that starts from it and the data of the
    /// pairs.
    async fn start(&self, service: &ServiceClient) -> (TrainingClient, Vec<Datum>) {
        let imported =
            service.rest().import_adapter(golden("qwen3").join("adapter")).base_model(MODEL);
        let path = imported.await.unwrap().weights_path;
        let restore = RestoreMode::WeightsOnly;
        let model = service.create_training_client_from(&path, restore).await.unwrap();
        let reference = dpo::reference_logprobs(&model, &self.pairs).await.unwrap();
        let data = self.pairs.iter().zip(reference).flat_map(|(pair, one)| pair.data(one).unwrap());
        (model, data.collect())
    }
}

/// Downloads the adapter of a model.
async fn adapter(service: &ServiceClient, model: &TrainingClient, folder: &Path) -> TensorFile {
    let path = model.save_state("dpo").await.unwrap();
    service.rest().download(path, folder).await.unwrap();
    TensorFile::open(folder.join(TENSORS)).unwrap()
}

/// Asserts that the norm of the difference of two tensors is less than `tolerance` times the norm of
/// the expected tensor.
fn assert_close(name: &str, found: &[f32], expected: &[f32], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let expected_norm = norm(&mut expected.iter().map(|x| f64::from(*x)));
    let error = norm(&mut expected.iter().zip(found).map(|(x, y)| f64::from(*x) - f64::from(*y)));
    assert!(error < tolerance * expected_norm, "{name}: off by {error} of {expected_norm}");
}

#[tokio::test(flavor = "multi_thread")]
async fn five_steps_of_dpo_match_torch() {
    let test_server = TestServer::new().await;
    let recording = Recording::read();
    let service = test_server.client();
    let (model, data) = recording.start(&service).await;
    for expected in recording.json["steps"].as_array().unwrap() {
        let step = model.step(data.clone(), dpo::loss(recording.beta()), recording.adam());
        let output = step.await.unwrap();
        let found = [
            ("loss", output.loss().unwrap()),
            ("margin", output.pass.metrics["margin:mean"].as_f64()),
        ];
        for (name, found) in found {
            let expected = expected[name].as_f64().unwrap();
            assert!((found - expected).abs() < 2e-4, "{name}: {found} {expected}");
        }
        // At the start all margins are 0, up to rounding.
        if expected["margin"].as_f64().unwrap() != 0.0 {
            let accuracy = output.pass.metrics["accuracy:mean"].as_f64();
            assert!((accuracy - expected["accuracy"].as_f64().unwrap()).abs() < 1e-6);
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let found = adapter(&service, &model, &folder.path().join("a")).await;
    let expected = TensorFile::open(golden("qwen3").join("dpo.safetensors")).unwrap();
    for tensor in found.tensors() {
        let name = tensor.name();
        let expected = expected.tensor(&format!("adam.{name}")).unwrap().to_f32().unwrap();
        assert_close(name, &tensor.to_f32().unwrap(), &expected, 1e-3);
    }
}

/// The API returns no gradients. With β₁ = β₂ = 0 and an ε far above the gradient, the step of Adam
/// is −lr / ε times the gradient.
#[tokio::test(flavor = "multi_thread")]
async fn the_gradient_of_dpo_matches_torch() {
    let test_server = TestServer::new().await;
    let recording = Recording::read();
    let service = test_server.client();
    let (model, data) = recording.start(&service).await;
    for _ in 0..2 {
        let step = model.step(data.clone(), dpo::loss(recording.beta()), recording.adam());
        step.await.unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let before = adapter(&service, &model, &folder.path().join("before")).await;
    let rate = 1e3;
    let eps = 1e4;
    let gradient_step = AdamParams::with_learning_rate(rate).beta1(0.0).beta2(0.0).eps(eps);
    model.step(data, dpo::loss(recording.beta()), gradient_step).await.unwrap();
    let path = model.save_state("after").await.unwrap();
    let after = folder.path().join("after");
    service.rest().download(path, &after).await.unwrap();
    let after = TensorFile::open(after.join(TENSORS)).unwrap();
    let expected = TensorFile::open(golden("qwen3").join("dpo.safetensors")).unwrap();
    for tensor in after.tensors() {
        let name = tensor.name();
        let before = before.tensor(name).unwrap().to_f32().unwrap();
        let after = tensor.to_f32().unwrap();
        #[expect(clippy::cast_possible_truncation, reason = "a power of ten")]
        let scale = (eps / rate) as f32;
        let found: Vec<f32> =
            before.iter().zip(&after).map(|(before, after)| (before - after) * scale).collect();
        let expected = expected.tensor(&format!("grad.{name}")).unwrap().to_f32().unwrap();
        assert_close(name, &found, &expected, 5e-3);
    }
}
