//! Loss inputs that a loss does not read.

use serde_json::Value;
use tinkex_wire::{Datum, ForwardBackward, ForwardBackwardOutput, LossFn, Seq};

use crate::child_server::{ChildOptions, start};
use crate::harness::{Http, MODEL, TestServer, golden};
use crate::process::SERVE;

const PROTO: &[(&str, &str)] = &[("content-type", "application/x-protobuf")];

/// Returns a pass whose datum has the additional input `name`, if any. The weights exclude the first
/// position.
fn pass(model: &str, seq: u64, name: Option<&str>) -> Vec<u8> {
    let mut datum = Datum::builder([5, 6])
        .loss_input("target_tokens", vec![6_i64, 7])
        .loss_input("weights", vec![0.0, 1.0]);
    if let Some(name) = name {
        datum = datum.loss_input(name.to_owned(), vec![0.0, 1.0]);
    }
    let data = vec![datum.build().unwrap()];
    let request = ForwardBackward::new(model, data, LossFn::CrossEntropy).seq_id(Seq::new(seq));
    request.to_proto().unwrap().to_vec()
}

async fn send(http: &Http, pass: Vec<u8>) -> (u16, Value) {
    http.send("POST", "/api/v1/forward_backward", PROTO, pass).await
}

async fn loss(http: &Http, future: &Value) -> u64 {
    let body = http.proto_result(future).await;
    ForwardBackwardOutput::from_proto(&body).unwrap().metrics["loss:sum"].to_bits()
}

/// Bug: the server ignored `weight`, and trained the prompt too.
#[tokio::test(flavor = "multi_thread")]
async fn a_misspelt_input_is_rejected() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    for (name, meant) in
        [("weight", "weights"), ("Weights", "weights"), ("target_token", "target_tokens")]
    {
        let (status, body) = send(&http, pass(&model, 1, Some(name))).await;
        assert_eq!(status, 400, "{body}");
        let expected = format!(
            "data[0].loss_fn_inputs[{name:?}]: cross_entropy has no such input; did you mean \
             {meant:?}?"
        );
        assert_eq!(body["detail"], expected);
    }
    // The model goes on with the next number.
    let (status, accepted) = send(&http, pass(&model, 2, None)).await;
    assert_eq!(status, 200, "{accepted}");
    loss(&http, &accepted).await;
}

/// The protocol accepts inputs that a loss does not read.
#[tokio::test(flavor = "multi_thread")]
async fn other_inputs_are_ignored_with_one_warning() {
    let data = tempfile::tempdir().unwrap();
    let log_file = data.path().join("log");
    let options = ChildOptions {
        data_dir: data.path().join("data"),
        threads: 1,
        models: vec![(MODEL.to_owned(), golden("qwen3"))],
        log: Some("warn".to_owned()),
        ..ChildOptions::default()
    };
    let mut command = options.command(&SERVE);
    command.stderr(std::fs::File::create(&log_file).unwrap());
    let (mut child, url) = start(command);
    let http = Http::new(&url);
    let session = http.session().await;
    let model = http.model(&session).await;
    let mut losses = Vec::new();
    // `advantages` is an input of other losses.
    for (seq, name) in (1..).zip([None, Some("mask"), Some("mask"), Some("advantages")]) {
        let (status, accepted) = send(&http, pass(&model, seq, name)).await;
        assert_eq!(status, 200, "{accepted}");
        losses.push(loss(&http, &accepted).await);
    }
    assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    let log = std::fs::read_to_string(&log_file).unwrap();
    let events: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let message = "the loss has no such input; its values are ignored";
    let ignored = events.iter().filter(|event| event["message"] == message);
    let names: Vec<_> = ignored.map(|event| event["input"].as_str().unwrap()).collect();
    assert_eq!(names, ["mask", "advantages"], "{log}");
}
