//! Custom losses, executed by the client or by the server.

use serde_json::{Value, json};
use tinkex::loss::{CustomLoss, LossValue};
use tinkex::testing::{ForwardBackward, PassMode};
use tinkex::{AdamParams, Datum, ErrorKind, LossFn};

use crate::numbered_server::{NumberedServer, cases, pass_output, passes};

fn datum(tokens: u32) -> Datum {
    Datum::builder((0..tokens).collect::<Vec<_>>())
        .loss_input("target_tokens", vec![5_i64; tokens as usize])
        .loss_input("advantages", vec![2.0_f32; tokens as usize])
        .build()
        .unwrap()
}

fn numbers(value: &Value) -> Vec<Vec<f32>> {
    serde_json::from_value(value.clone()).unwrap()
}

fn weights(pass: &ForwardBackward) -> Vec<Vec<f32>> {
    let weights = |datum: &Datum| datum.loss_input("weights").unwrap().as_f32().unwrap().to_vec();
    pass.data.iter().map(weights).collect()
}

/// Covers R-OLD.
#[tokio::test(start_paused = true)]
async fn a_computed_loss_sends_its_negated_gradient_as_weights() {
    for case in cases("custom_loss.json") {
        if !case["logprobs"].is_array() {
            continue;
        }
        let logprobs = numbers(&case["logprobs"]);
        let server = NumberedServer::new(json!({}));
        let model = server.model().await;
        server.respond("r1", vec![pass_output(&logprobs, &[("loss:sum", 0.0)])]);
        server
            .respond("r2", vec![pass_output(&logprobs, &[("loss:sum", 7.0), ("tokens:sum", 5.0)])]);
        let data = logprobs.iter().map(|l| datum(u32::try_from(l.len()).unwrap())).collect();
        let loss = case["loss_value"].as_f64().unwrap();
        let gradients = numbers(&case["gradient"]);
        let expected = logprobs.clone();
        let pass = model.forward_backward_custom(data, move |data, logprobs| {
            assert_eq!(data[0].loss_input("advantages").unwrap().as_f32().unwrap()[0], 2.0);
            let received: Vec<Vec<f32>> =
                logprobs.iter().map(|tensor| tensor.as_f32().unwrap().to_vec()).collect();
            assert_eq!(received, expected);
            Ok(LossValue::new(loss, gradients).metric("my_metric", 0.5))
        });
        // Sent after both passes.
        let step = model.optim_step(AdamParams::default());
        let output = pass.await.unwrap();
        step.await.unwrap();
        let sent = passes(&server);
        assert_eq!(sent.len(), 2);
        assert_eq!((sent[0].mode, sent[1].mode), (PassMode::Forward, PassMode::ForwardBackward));
        assert!(sent.iter().all(|pass| pass.loss_fn == LossFn::CrossEntropy));
        assert!(
            sent.iter().all(|pass| pass.data[0].loss_inputs().len() == 2),
            "only target tokens and weights are sent"
        );
        assert_eq!(weights(&sent[1]), numbers(&case["weights_sent"]), "{case}");
        let metrics: Value = output
            .metrics
            .iter()
            .map(|(name, value)| (name.clone(), json!(value.as_f64())))
            .collect();
        assert_eq!(
            metrics,
            json!({"loss:sum": loss, "surrogate_loss:sum": 7.0, "tokens:sum": 5.0, "my_metric": 0.5})
        );
        assert_eq!(server.requests("/optim_step")[0].json()["seq_id"], 3, "calls keep their order");
    }
}

/// Returns the negative log-likelihood, weighted by the advantages.
fn weighted_nll() -> CustomLoss {
    CustomLoss::trace("weighted", |trace| {
        let logprobs = trace.input("logprobs", 1);
        let advantages = trace.input("advantages", 1);
        let loss = -(logprobs * advantages).sum();
        trace.metric("custom/total:sum", loss);
        loss
    })
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn the_client_executes_a_traced_loss_if_the_server_does_not() {
    let server = NumberedServer::new(json!({}));
    let service = server.builder().build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    let loss = service.create_custom_loss(&weighted_nll()).await.unwrap();
    assert!(!loss.is_on_server());
    server.respond("r1", vec![pass_output(&[vec![-0.5, -1.0]], &[])]);
    server.respond("r2", vec![pass_output(&[vec![-0.5, -1.0]], &[("loss:sum", 9.0)])]);
    let output = model.forward_backward(vec![datum(2)], &loss).await.unwrap();
    assert_eq!(weights(&passes(&server)[1]), [[2.0, 2.0]]);
    assert_eq!(output.metrics["loss:sum"].as_f64(), 3.0);
    assert_eq!(output.metrics["custom/total:sum"].as_f64(), 3.0);
    server.respond("r3", vec![pass_output(&[vec![-2.0]], &[("loss:sum", 1.0)])]);
    let output = model.forward(vec![datum(1)], &loss).await.unwrap();
    assert_eq!(output.metrics["loss:sum"].as_f64(), 4.0, "a forward pass sends the data once");
    assert_eq!(passes(&server).len(), 3);
}

#[tokio::test(start_paused = true)]
async fn the_server_executes_a_traced_loss_if_it_can() {
    let server = NumberedServer::new(json!({"custom_loss_server_side": true}));
    let service = server.builder().build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    let traced = weighted_nll();
    let loss = service.create_custom_loss(&traced);
    let same = service.create_custom_loss(&traced);
    let (loss, same) = tokio::join!(loss, same);
    let loss = loss.unwrap();
    let same = same.unwrap();
    assert!(loss.is_on_server());
    assert_eq!(loss, same);
    let registrations = server.requests("/create_custom_loss");
    assert_eq!(registrations.len(), 1, "equal losses are registered once");
    let request = registrations[0].json();
    assert_eq!((&request["session_id"], &request["custom_loss_seq_id"]), (&json!("s"), &json!(0)));
    let inputs = json!([{"name": "logprobs", "rank": 1}, {"name": "advantages", "rank": 1}]);
    assert_eq!(request["inputs"], inputs);
    model.forward_backward(vec![datum(2)], &loss).await.unwrap();
    let pass = passes(&server).remove(0);
    assert_eq!(
        (pass.loss_fn, pass.loss_fn_config.text("loss_id")),
        (LossFn::Custom, Some("loss-1"))
    );
    assert_eq!(pass.data[0], datum(2), "the data is sent unchanged");

    let plain = Datum::supervised([1, 2], 1.0).unwrap();
    let error = model.forward_backward(vec![plain], &loss).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("advantages"), "{error}");
    let other = NumberedServer::new(json!({"custom_loss_server_side": true}));
    other.session_id("t");
    let elsewhere = other.model().await.forward_backward(vec![datum(1)], &loss).await.unwrap_err();
    assert!(elsewhere.to_string().contains("registered in session s"), "{elsewhere}");
}

#[tokio::test(start_paused = true)]
async fn a_failing_loss_sends_no_gradient_and_skips_no_sequence_number() {
    type Loss = fn() -> Result<LossValue, Box<dyn std::error::Error + Send + Sync>>;
    let cases: [(Loss, &str); 5] = [
        (|| Err("no idea".into()), "loss function failed: no idea"),
        (|| panic!("scripted"), "loss function panicked"),
        (|| Ok(LossValue::default()), "gradients of 0 data, expected 1"),
        (|| Ok(LossValue::new(0.0, vec![vec![1.0; 5]])), "5 values, expected 2"),
        (|| Ok(LossValue::new(0.0, vec![vec![f32::NAN; 2]])), "not finite"),
    ];
    for (loss, message) in cases {
        let server = NumberedServer::new(json!({}));
        let model = server.model().await;
        server.respond("r1", vec![pass_output(&[vec![-0.5, -1.0]], &[])]);
        let pass = model.forward_backward_custom(vec![datum(2)], move |_, _| loss());
        let step = model.optim_step(AdamParams::default());
        let error = pass.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(message), "{error}");
        step.await.unwrap();
        assert_eq!(passes(&server).len(), 1);
        assert_eq!(server.requests("/optim_step")[0].json()["seq_id"], 2);
    }
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let plain = Datum::builder([1, 2]).build().unwrap();
    let error = model.forward_backward_custom(vec![plain], |_, _| Ok(LossValue::default())).await;
    assert!(error.unwrap_err().to_string().contains("target_tokens"));
    assert!(server.requests("/forward_backward").is_empty());
}
