//! Accumulated gradients: parameters of optimizer steps that are refused, and discarded gradients.

use std::time::Duration;

use serde_json::json;
use tinkex::{AdamParams, Datum, LossFn, StepOptions, TrainingClient};
use tinkex_engine::optim::{self, Optimizer, OptimizerKind, Parameter, StepParams};
use tinkex_wire::{DimuonParams, ForwardBackward, OptimParams, Seq};

use crate::child_server::ChildOptions;
use crate::harness::{Http, TestServer, client, create_model, step, training_client};
use crate::process::Process;

fn batch(first: u32) -> Vec<Datum> {
    vec![Datum::completion([first, 6, 7], [8, 9]).unwrap(); 2]
}

fn adam() -> AdamParams {
    AdamParams::with_learning_rate(1e-2)
}

/// Takes two steps and returns the bits of their losses.
async fn train(model: &TrainingClient) -> Vec<u64> {
    let mut losses = Vec::new();
    for n in 0..2 {
        let output = model.step(batch(20 + n), LossFn::CrossEntropy, adam()).await.unwrap();
        losses.push(output.loss().unwrap().to_bits());
    }
    losses
}

/// The server refuses the same values as the client, before it queues the step. Bug: it refused
/// them when it executed the step.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_with_parameters_out_of_range_is_rejected_when_it_arrives() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    for (params, field) in [
        (json!({"learning_rate": -1.0}), "learning_rate"),
        (json!({"beta1": 2.0}), "beta1"),
        (json!({"beta2": -0.1}), "beta2"),
        (json!({"eps": 1e300}), "eps"),
        (json!({"weight_decay": -1.0}), "weight_decay"),
    ] {
        let mut request = step(&model, 1, 0.1);
        request["adam_params"] = params;
        let (status, body) = http.post("/optim_step", request).await;
        assert_eq!(status, 400, "{body}");
        let detail = body["detail"].as_str().unwrap();
        assert!(detail.starts_with(&format!("optim_params.{field}: ")), "{detail}");
    }
    let (status, body) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    assert_eq!(status, 200, "{body}");
    assert!(http.result(&body).await["metrics"].is_object());
}

/// A value that the check accepts but the engine refuses would fail a step after its pass.
#[test]
fn the_engine_accepts_the_parameters_that_the_check_accepts() {
    let values = [
        f64::NEG_INFINITY,
        -1.0,
        -f64::MIN_POSITIVE,
        -0.0,
        0.0,
        1e-12,
        0.5,
        0.999_999,
        1.0,
        2.0,
        f64::from(f32::MAX),
        f64::from(f32::MAX) * 1.01,
        f64::INFINITY,
        f64::NAN,
    ];
    // A learning rate of 0, so that a large value of another parameter gives a finite update.
    let params = tinkex_wire::AdamParams::with_learning_rate(0.0);
    type SetAdam = fn(tinkex_wire::AdamParams, f64) -> tinkex_wire::AdamParams;
    let setters: [SetAdam; 4] = [
        |params, value| params.beta1(value),
        |params, value| params.beta2(value),
        |params, value| params.eps(value),
        |params, value| params.weight_decay(value),
    ];
    for value in values {
        for set in setters {
            let adam = set(params, value);
            let engine = StepParams::Adam(optim::AdamParams {
                learning_rate: adam.learning_rate,
                beta1: adam.beta1,
                beta2: adam.beta2,
                eps: adam.eps,
                weight_decay: adam.weight_decay,
                grad_clip_norm: adam.grad_clip_norm,
            });
            let accepted = OptimParams::from(adam).validate().is_ok();
            assert_eq!(engine_accepts(OptimizerKind::Adam, &engine), accepted, "{adam:?}");
        }
        let dimuon = DimuonParams::with_learning_rate(0.0).beta1(value);
        let engine = StepParams::Dimuon(optim::DimuonParams {
            learning_rate: dimuon.learning_rate,
            beta1: dimuon.beta1,
            grad_clip_norm: dimuon.grad_clip_norm,
        });
        let accepted = OptimParams::from(dimuon).validate().is_ok();
        let kind = OptimizerKind::Dimuon { rank: 1 };
        assert_eq!(engine_accepts(kind, &engine), accepted, "{dimuon:?}");
    }
}

/// Returns whether an optimizer takes a step.
fn engine_accepts(kind: OptimizerKind, params: &StepParams) -> bool {
    let mut weights = [0.0];
    let tensor =
        Parameter { name: "w", rows: 1, columns: 1, weights: &mut weights, gradient: &[1.0] };
    Optimizer::new(kind, &[1]).step(params, &mut [tensor]).is_ok()
}

/// A step with a learning rate of 0 would change the moments of the optimizer.
#[tokio::test(flavor = "multi_thread")]
async fn a_discarded_gradient_leaves_no_trace() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let expected = {
        let model = training_client(&service).await;
        let first = model.step(batch(5), LossFn::CrossEntropy, adam()).await.unwrap();
        assert!(first.loss().is_some());
        train(&model).await
    };
    let model = training_client(&service).await;
    model.step(batch(5), LossFn::CrossEntropy, adam()).await.unwrap();
    model.forward_backward(batch(11), LossFn::CrossEntropy).detach();
    model.forward_backward(batch(12), LossFn::CrossEntropy).await.unwrap();
    model.discard_gradient().await.unwrap();
    assert_eq!(train(&model).await, expected);
    // Without a gradient, discarding changes nothing.
    let model = training_client(&service).await;
    model.discard_gradient().await.unwrap();
    model.step(batch(5), LossFn::CrossEntropy, adam()).await.unwrap();
    assert_eq!(train(&model).await, expected);
}

/// An optimizer of another kind is the remaining reason for which the server refuses a step.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_refused_step_the_gradient_can_be_discarded() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let expected = train(&training_client(&service).await).await;
    let model = training_client(&service).await;
    let dimuon = StepOptions::new(tinkex::DimuonParams::with_learning_rate(0.1)).fenced();
    let error = model.step(batch(5), LossFn::CrossEntropy, dimuon).await.unwrap_err();
    assert_eq!(error.accumulated_datums(), std::slice::from_ref(&(0..2)));
    assert_eq!(error.hint(), Some(tinkex::Hint::DiscardGradient));
    model.discard_gradient().await.unwrap();
    assert_eq!(train(&model).await, expected);
}

const PROTO: &[(&str, &str)] = &[("content-type", "application/x-protobuf")];

/// Sends passes, discards their gradients, trains further, and kills the server after the requests
/// with the given sequence numbers. Returns the saved weights with the optimizer state.
async fn run(kills: &[u64]) -> Vec<u8> {
    let data = tempfile::tempdir().unwrap();
    // No snapshot: after a kill, all requests are executed again.
    let options = ChildOptions {
        snapshot_after: Some(Duration::from_secs(3_600)),
        ..ChildOptions::default()
    };
    let mut process = Process::with(data.path(), 0, options.clone());
    let mut http = Http::new(&process.url);
    let session = http.session().await;
    let model = format!("{session}:train:0");
    assert_eq!(http.post("/create_model", create_model(&session, 0)).await.0, 200);
    let pass = |seq: u64| {
        let data = batch(u32::try_from(seq).unwrap() + 5);
        let request = ForwardBackward::new(model.as_str(), data, LossFn::CrossEntropy);
        request.seq_id(Seq::new(seq)).to_proto().unwrap().to_vec()
    };
    // p: pass, s: step, d: discard.
    for (seq, kind) in (1_u64..).zip("psppdpdpsps".chars()) {
        let send = async |http: &Http| match kind {
            'p' => http.send("POST", "/api/v1/forward_backward", PROTO, pass(seq)).await,
            's' => http.post("/optim_step", step(&model, seq, 1e-2)).await,
            _ => {
                let discard = json!({"model_id": model, "seq_id": seq});
                http.post("/discard_gradient", discard).await
            }
        };
        let (status, accepted) = send(&http).await;
        assert_eq!(status, 200, "{accepted}");
        if kills.contains(&seq) {
            process.kill();
            process = Process::with(data.path(), 0, options.clone());
            http = Http::new(&process.url);
            assert_eq!(send(&http).await, (200, accepted), "a retry gets the same request id");
        }
    }
    http.save(&model, 12, "end").await;
    let folder = std::fs::read_dir(data.path().join("weights"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_string_lossy().contains("-weights-end-"))
        .unwrap();
    let mut bytes = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    bytes.extend(std::fs::read(folder.join("optimizer.safetensors")).unwrap());
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_discards_the_same_gradients() {
    let uninterrupted = run(&[]).await;
    assert!(uninterrupted == run(&[4, 5, 6, 7, 10]).await, "the weights differ");
}

/// A model that is restored later must not contain the gradient.
#[tokio::test(flavor = "multi_thread")]
async fn a_restored_model_has_no_discarded_gradient() {
    let expected = {
        let test_server = TestServer::new().await;
        train(&training_client(&test_server.client()).await).await
    };
    let data = tempfile::tempdir().unwrap();
    let options = ChildOptions {
        snapshot_after: Some(Duration::from_secs(3_600)),
        ..ChildOptions::default()
    };
    let mut process = Process::with(data.path(), 0, options.clone());
    let port = process.port();
    let model = training_client(&client(&process.url)).await;
    model.forward_backward(batch(5), LossFn::CrossEntropy).await.unwrap();
    model.discard_gradient().await.unwrap();
    process.kill_now();
    let _process = Process::with(data.path(), port, options);
    assert_eq!(train(&model).await, expected);
}
