//! Custom losses have the same value and the same gradient on the client and on the server.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;

use serde_json::{Value, json};
use tinkex::loss::CustomLoss;
use tinkex::{AdamParams, Datum, LoraOptions, LossFn, TensorData, TrainingClient};
use tinkex_autodiff::{GraphArg, GraphInput, GraphNode, LossGraph};
use tinkex_files::FileOperation;
use tinkex_server::Server;

use crate::harness::{Http, MODEL, TestServer, options};

/// Returns the cases of `crates/autodiff/tests/golden/kinks.json`: losses at points where they have
/// no unique gradient.
fn kinks() -> Vec<Value> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let path = crates.join("autodiff/tests/golden/kinks.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    serde_json::from_value(file["cases"].take()).unwrap()
}

/// Reads numbers, of which some are strings: `"inf"`, `"-inf"` and `"nan"`.
fn numbers(value: &Value) -> Vec<f64> {
    let number = |value: &Value| value.as_f64().or_else(|| value.as_str()?.parse().ok()).unwrap();
    value.as_array().map_or_else(|| vec![number(value)], |all| all.iter().map(number).collect())
}

#[expect(clippy::cast_possible_truncation, reason = "the recorded points are f32")]
fn floats(value: &Value) -> Vec<f32> {
    numbers(value).into_iter().map(|number| number as f32).collect()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * (1.0 + b.abs())
}

/// Returns the log-probabilities that the model gives to the targets of `datum`.
async fn logprobs(model: &TrainingClient, datum: &Datum) -> Vec<f32> {
    let pass = model.forward(vec![datum.clone()], LossFn::CrossEntropy).await.unwrap();
    pass.outputs.get(0).unwrap().tensor("logprobs").unwrap().as_f32().unwrap().to_vec()
}

/// Trains two models with every kink: one computes the loss on the server, the other on the client.
/// A gradient that differed in one bit would make their weights, and so their log-probabilities,
/// differ after the next optimizer step.
#[tokio::test(flavor = "multi_thread")]
async fn every_kink_trains_the_same_on_client_and_server() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let create = || service.create_lora_training_client(LoraOptions::new(MODEL).rank(4).seed(3));
    let on_server = create().await.unwrap();
    let on_client = create().await.unwrap();
    let inputs = ["logprobs", "base", "at", "y"].map(|name| GraphInput::new(name, 1));
    for case in kinks() {
        let name = case["name"].as_str().unwrap();
        let graph: LossGraph = serde_json::from_value(case["graph"].clone()).unwrap();
        let loss = CustomLoss::from_graph(name, inputs.to_vec(), graph).unwrap();
        let uploaded = service.create_custom_loss(&loss).await.unwrap();
        assert!(uploaded.is_on_server());

        let at = floats(&case["at"]);
        let y = floats(&case["y"]);
        let tokens: Vec<u32> = (5..).take(at.len()).collect();
        let builder = || {
            let targets: Vec<i64> = (6..).take(at.len()).collect();
            Datum::builder(tokens.clone()).loss_input("target_tokens", targets)
        };
        let plain = builder().build().unwrap();
        let base = logprobs(&on_server, &plain).await;
        assert_eq!(base, logprobs(&on_client, &plain).await, "the models differ before {name}");
        // The loss computes the point as logprobs - base + at, which is exactly `at`.
        let datum = builder().loss_input("base", base.clone());
        let datum = datum.loss_input("at", at).loss_input("y", y).build().unwrap();

        let value = numbers(&case["loss"])[0];
        let gradient = numbers(&case["gradient"]);
        let computed = loss.evaluate(std::slice::from_ref(&datum), &[TensorData::from(base)]);
        let server = on_server.forward_backward(vec![datum.clone()], &uploaded).await;
        let client = on_client.forward_backward(vec![datum], &loss).await;
        if !(value.is_finite() && gradient.iter().all(|slope| slope.is_finite())) {
            for error in [computed.unwrap_err(), server.unwrap_err(), client.unwrap_err()] {
                assert!(error.to_string().contains("of the custom loss is"), "{name}: {error}");
            }
            continue;
        }
        let computed = computed.unwrap();
        let loss_of = |pass: &tinkex::BatchOutput| pass.metrics["loss:sum"].as_f64();
        let server = loss_of(&server.unwrap());
        let client = loss_of(&client.unwrap());
        assert_eq!((server, client), (computed.loss, computed.loss), "{name}");
        assert!(close(computed.loss, value), "{name}: {} instead of {value}", computed.loss);
        for (got, want) in computed.gradients[0].iter().zip(&gradient) {
            assert!(close(f64::from(*got), *want), "{name}: {got} instead of {want}");
        }
        for model in [&on_server, &on_client] {
            model.optim_step(AdamParams::with_learning_rate(1e-3)).await.unwrap();
        }
    }
}

/// A read error at the start made the server forget a custom loss.
#[tokio::test]
async fn a_custom_loss_survives_transient_read_errors_at_the_start() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let graph = LossGraph::new(vec![
        GraphNode::placeholder("logprobs"),
        GraphNode::method("total", "sum", [GraphArg::node("logprobs")]),
        GraphNode::output(GraphArg::node("total"), [("custom/total:sum", GraphArg::node("total"))]),
    ]);
    let create = json!({
        "session_id": session, "custom_loss_seq_id": 0, "name": "total",
        "type": "create_custom_loss",
        "inputs": [{"name": "logprobs", "rank": 1}], "graph": graph,
    });
    let (status, future) = http.post("/create_custom_loss", create).await;
    assert_eq!(status, 200, "{future}");
    let loss = http.result(&future).await["loss_id"].as_str().unwrap().to_owned();
    let TestServer { server, data } = test_server;
    server.stop().await;

    // The server starts on this thread, so its reads can be observed.
    let failures = Rc::new(Cell::new(3));
    let left = Rc::clone(&failures);
    let observer = tinkex_files::observe_thread(move |operation| match operation {
        FileOperation::Read(path) if path.ends_with("payloads") && left.get() > 0 => {
            left.set(left.get() - 1);
            Err(std::io::Error::other("EIO"))
        }
        _ => Ok(()),
    });
    let server = Server::start(options(data.path())).await.unwrap();
    drop(observer);
    assert_eq!(failures.get(), 0, "the read was repeated");
    let http = Http::new(&server.base_url());
    let batch = vec![Datum::completion([3, 4], [5]).unwrap()];
    let pass = tinkex_wire::ForwardBackward::new(model.as_str(), batch, LossFn::Custom)
        .seq_id(tinkex_wire::Seq::FIRST)
        .loss_fn_config(tinkex_wire::LossConfig::custom(&loss.as_str().into()));
    let body = pass.to_proto().unwrap().to_vec();
    let (status, future) = http.send("POST", "/api/v1/forward_backward", &[], body).await;
    assert_eq!(status, 200, "{future}");
    assert!(!http.proto_result(&future).await.is_empty());
}
