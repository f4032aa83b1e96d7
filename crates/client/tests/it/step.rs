//! Training steps: when the optimizer step is sent, and what a failed pass leaves behind.

use std::time::Duration;

use serde_json::{Value, json};
use tinkex::loss::CustomLoss;
use tinkex::testing::PassMode;
use tinkex::{
    AdamParams, ApiFuture, CallOptions, Datum, ErrorKind, Hint, LossFn, StepOptions, StepOutput,
    TrainingClient,
};
use tokio::time::sleep;

use crate::numbered_server::{ACCEPTING, NumberedServer, passes};

fn batch(n: usize) -> Vec<Datum> {
    vec![Datum::completion([1, 2], [3]).unwrap(); n]
}

fn step(model: &TrainingClient, data: Vec<Datum>) -> ApiFuture<StepOutput> {
    model.step(data, LossFn::CrossEntropy, AdamParams::default())
}

/// Parameters of a step whose optimizer step waits for the result of the pass.
fn fenced() -> StepOptions {
    StepOptions::new(AdamParams::default()).fenced()
}

/// Server configuration with two examples per chunk.
fn two_per_chunk(parallel: bool) -> Value {
    json!({"fwdbwd_max_chunk_len": 2, "parallel_fwdbwd_chunks": parallel})
}

fn failed(message: &str) -> Value {
    json!({"error": message, "category": "user"})
}

#[tokio::test(start_paused = true)]
async fn a_step_starts_when_it_is_called_and_continues_when_its_futures_are_dropped() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let unpolled = step(&model, batch(1));
    drop(model.split_step(batch(1), LossFn::CrossEntropy, AdamParams::default()));
    step(&model, batch(1)).detach();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(server.requests("/forward_backward").len(), 3);
    assert_eq!(server.requests("/optim_step").len(), 3);
    unpolled.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_step_returns_the_outputs_of_the_pass_and_of_the_optimizer() {
    let server = NumberedServer::new(two_per_chunk(false));
    let model = server.model().await;
    server.respond("r3", vec![json!({"metrics": {"grad:mean": 0.5}})]);
    let output = step(&model, batch(3)).await.unwrap();
    assert_eq!(output.pass.outputs.len(), 3);
    assert_eq!(output.optim.metrics["grad:mean"].as_f64(), 0.5);
    assert_eq!(output.loss(), output.pass.loss());
}

/// The optimizer step does not wait for the result of the pass, unless the step is fenced.
#[tokio::test(start_paused = true)]
async fn the_optimizer_step_is_sent_once_the_pass_is_accepted() {
    let accepted = StepOptions::new(AdamParams::default());
    let after_result = ACCEPTING + Duration::from_secs(3);
    for (options, sent_after) in [(accepted, ACCEPTING), (fenced(), after_result)] {
        let server = NumberedServer::new(json!({}));
        let model = server.model().await;
        // The result of the pass takes three seconds of polling.
        let slow = vec![json!("conn"), json!("conn"), json!({"loss_fn_outputs": []})];
        server.respond("r1", slow);
        let start = server.now();
        let queued = model.step(batch(1), LossFn::CrossEntropy, options.clone());
        let later = model.forward(batch(1), LossFn::CrossEntropy);
        queued.await.unwrap();
        later.await.unwrap();
        let optim = server.requests("/optim_step").pop().unwrap();
        assert_eq!(optim.at - start, sent_after, "{options:?}");
        assert_eq!(optim.json()["seq_id"], 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_chunk_keeps_the_optimizer_step_from_being_sent() {
    for parallel in [false, true] {
        let server = NumberedServer::new(two_per_chunk(parallel));
        let model = server.model().await;
        server.reject(2);
        let (pass, optim) = model.split_step(batch(5), LossFn::CrossEntropy, AdamParams::default());
        let later = step(&model, batch(1));
        let error = pass.await.unwrap_err();
        assert_eq!((error.kind(), error.status()), (ErrorKind::Rejected, Some(422)));
        assert_eq!(error.accumulated_datums(), [0..2, 4..5]);
        assert_eq!(error.hint(), Some(Hint::DiscardGradient));
        let text = error.to_string();
        assert!(
            text.ends_with(
                "the optimizer step was not sent; the server holds the gradients of \
                 data[0..2], data[4..5]"
            ),
            "{text}"
        );
        assert_eq!(optim.await.unwrap_err().to_string(), text);
        later.await.unwrap();
        // The second step uses the next numbers: the step that was not sent leaves no gap.
        let numbers: Vec<u64> =
            passes(&server).iter().map(|pass| pass.seq_id.unwrap().get()).collect();
        assert_eq!(*numbers.last().unwrap(), 4, "parallel: {parallel}");
        assert_eq!(server.sequence_numbers("/optim_step"), [5], "parallel: {parallel}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_pass_keeps_a_fenced_optimizer_step_from_being_sent() {
    let server = NumberedServer::new(two_per_chunk(false));
    let model = server.model().await;
    server.respond("r2", vec![failed("data[1]: importance ratio overflow")]);
    let error = model.step(batch(5), LossFn::CrossEntropy, fenced()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WorkFailed);
    assert_eq!(error.accumulated_datums(), [0..2, 4..5]);
    assert!(error.to_string().contains("data[3]: importance ratio overflow"), "{error}");
    assert!(error.to_string().contains("the optimizer step was not sent"), "{error}");
    assert!(server.requests("/optim_step").is_empty());
    // Later calls go on without a gap.
    model.optim_step(AdamParams::default()).await.unwrap();
    assert_eq!(server.requests("/optim_step")[0].json()["seq_id"], 4);
}

/// Without a fence the optimizer step is sent before the result is known. The error says so.
#[tokio::test(start_paused = true)]
async fn a_pass_that_fails_after_it_was_accepted_reports_that_the_step_was_sent() {
    let server = NumberedServer::new(two_per_chunk(false));
    let model = server.model().await;
    server.respond("r1", vec![failed("out of memory")]);
    let error = step(&model, batch(3)).await.unwrap_err();
    assert!(error.to_string().contains("the optimizer step was already sent"), "{error}");
    assert_eq!(error.accumulated_datums(), std::slice::from_ref(&(2..3)));
    assert_eq!(server.requests("/optim_step").len(), 1);
}

/// Bug: the index was relative to the chunk.
#[tokio::test(start_paused = true)]
async fn datum_indices_in_errors_refer_to_the_batch() {
    let server = NumberedServer::new(json!({"fwdbwd_max_chunk_len": 1024}));
    let model = server.model().await;
    server.reject_with(3, json!([400, {"detail": "data[952]: weights: expected 2 values"}]));
    let error = step(&model, batch(3001)).await.unwrap_err();
    assert!(error.to_string().contains("data[3000]: weights"), "{error}");
    assert!(error.body().unwrap().contains("data[952]"), "the server's own words are kept");
    assert_eq!(error.accumulated_datums(), std::slice::from_ref(&(0..2048)));
    assert!(server.requests("/optim_step").is_empty());
}

/// Bug: a NaN advantage failed one chunk, and the optimizer step moved the weights.
#[tokio::test(start_paused = true)]
async fn a_batch_with_a_number_that_is_not_finite_is_not_sent() {
    let rollout = |logprob: f32, advantage: f32| {
        Datum::builder([1, 2])
            .loss_input("target_tokens", vec![2_i64, 3])
            .loss_input("logprobs", vec![-1.0, logprob])
            .loss_input("advantages", vec![0.0, advantage])
            .build()
            .unwrap()
    };
    let server = NumberedServer::new(two_per_chunk(false));
    let model = server.model().await;
    for (bad, input, value) in [
        (rollout(-1.0, f32::NAN), "advantages", "NaN"),
        (rollout(-1.0, f32::INFINITY), "advantages", "inf"),
        (rollout(f32::NAN, 1.0), "logprobs", "NaN"),
        (rollout(f32::INFINITY, 1.0), "logprobs", "inf"),
    ] {
        let mut data = vec![rollout(-1.0, 1.0); 4];
        data[3] = bad;
        let error = model
            .step(data.clone(), LossFn::ImportanceSampling, AdamParams::default())
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        let text = error.to_string();
        let expected = format!("data[3].loss_fn_inputs[{input:?}]: element 1 is {value}");
        assert!(text.contains(&expected), "{text}");
        let pass = model.forward_backward(data, LossFn::ImportanceSampling).await;
        assert_eq!(pass.unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    assert!(server.log().is_empty(), "nothing is sent");
    // A token that the sampler excluded has no probability, and no advantage.
    let excluded = vec![rollout(f32::NEG_INFINITY, 0.0)];
    model.forward_backward(excluded, LossFn::ImportanceSampling).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_step_with_invalid_input_queues_nothing() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let (pass, optim) = model.split_step(Vec::new(), LossFn::CrossEntropy, AdamParams::default());
    assert_eq!(pass.await.unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(optim.await.unwrap_err().kind(), ErrorKind::InvalidInput);
    let nan = AdamParams::with_learning_rate(f64::NAN);
    let error = model.step(batch(1), LossFn::CrossEntropy, nan).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(server.log().is_empty());
}

/// A loss that the client computes needs two passes. The optimizer step follows the second.
#[tokio::test(start_paused = true)]
async fn a_step_trains_with_a_loss_that_the_client_computes() {
    let traced = CustomLoss::trace("sum", |trace| -trace.input("logprobs", 1).sum()).unwrap();
    let server = NumberedServer::new(two_per_chunk(false));
    let model = server.model().await;
    let data: Vec<Datum> = (0..3)
        .map(|_| Datum::builder([1]).loss_input("target_tokens", vec![2_i64]).build().unwrap())
        .collect();
    let output = model.step(data.clone(), &traced, AdamParams::default()).await.unwrap();
    // The server returns the negative sequence number as log-probability of each datum.
    assert_eq!(output.loss(), Some(1.0 + 1.0 + 2.0));
    let modes: Vec<PassMode> = passes(&server).iter().map(|pass| pass.mode).collect();
    use PassMode::{Forward, ForwardBackward};
    assert_eq!(modes, [Forward, Forward, ForwardBackward, ForwardBackward]);
    assert_eq!(server.requests("/optim_step")[0].json()["seq_id"], 5);
    // A failed forward pass accumulates nothing.
    server.reject(6);
    let error = model.step(data, &traced, AdamParams::default()).await.unwrap_err();
    assert_eq!(error.status(), Some(422));
    assert!(error.accumulated_datums().is_empty(), "{error}");
    assert_eq!(server.requests("/optim_step").len(), 1);
}

/// Bug: the server refused the parameters after the pass. The gradient stayed on the server, and the
/// next step trained on both batches.
#[tokio::test(start_paused = true)]
async fn a_step_with_parameters_out_of_range_sends_nothing() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let adam = AdamParams::default();
    for (params, field) in [
        (adam.learning_rate(-1.0), "learning_rate"),
        (adam.learning_rate(f64::INFINITY), "learning_rate"),
        (adam.beta1(2.0), "beta1"),
        (adam.beta2(1.0), "beta2"),
        (adam.eps(-1e-8), "eps"),
        (adam.weight_decay(-0.1), "weight_decay"),
        (adam.grad_clip_norm(f64::NAN), "grad_clip_norm"),
    ] {
        let options = StepOptions::new(params);
        for options in [options.clone(), options.fenced()] {
            let error = model.step(batch(1), LossFn::CrossEntropy, options).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains(&format!("optim_params.{field}: ")), "{error}");
        }
        let alone = model.optim_step(params).await.unwrap_err();
        assert_eq!(alone.kind(), ErrorKind::InvalidInput);
    }
    assert!(server.log().is_empty(), "nothing is sent");
    step(&model, batch(1)).await.unwrap();
    assert_eq!(server.sequence_numbers("/optim_step"), [2]);
}

/// Bug: the error said that nothing was accumulated.
#[tokio::test(start_paused = true)]
async fn a_failed_optimizer_step_names_the_gradients_that_stay_on_the_server() {
    for options in [StepOptions::new(AdamParams::default()), fenced()] {
        for fails_later in [false, true] {
            let server = NumberedServer::new(two_per_chunk(false));
            let model = server.model().await;
            if fails_later {
                server.respond("r4", vec![failed("the update is not finite")]);
            } else {
                server.reject(4);
            }
            let (pass, optim) = model.split_step(batch(5), LossFn::CrossEntropy, options.clone());
            pass.await.unwrap();
            let error = optim.await.unwrap_err();
            assert_eq!(error.accumulated_datums(), std::slice::from_ref(&(0..5)));
            assert_eq!(error.hint(), Some(Hint::DiscardGradient));
            let stays =
                "the gradient of 1 pass with 5 datums was not applied and stays on the server";
            assert!(error.to_string().ends_with(stays), "{error}");
            // The next step fails too: it would have applied the gradients of both batches.
            server.reject(6);
            let error = step(&model, batch(1)).await.unwrap_err();
            assert_eq!(error.accumulated_datums(), std::slice::from_ref(&(0..1)));
            let stay =
                "the gradients of 2 passes with 6 datums were not applied and stay on the server";
            assert!(error.to_string().ends_with(stay), "{error}");
            // A successful step applies them.
            model.optim_step(AdamParams::default()).await.unwrap();
            server.reject(8);
            let error = model.optim_step(AdamParams::default()).await.unwrap_err();
            assert!(!error.to_string().contains("stay"), "{error}");
            assert_eq!(error.hint(), None);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_optimizer_step_does_not_count_failed_passes() {
    let server = NumberedServer::new(two_per_chunk(false));
    let model = server.model().await;
    // The second chunk of the pass fails, and the optimizer step too.
    server.respond("r2", vec![failed("importance ratio overflow")]);
    server.reject(4);
    let (pass, optim) = model.split_step(batch(5), LossFn::CrossEntropy, AdamParams::default());
    assert_eq!(pass.await.unwrap_err().accumulated_datums(), [0..2, 4..5]);
    let error = optim.await.unwrap_err();
    assert_eq!(error.accumulated_datums(), [0..2, 4..5]);
    assert!(error.to_string().contains("the gradient of 1 pass with 3 datums"), "{error}");
    // A pass without gradient accumulates nothing.
    model.optim_step(AdamParams::default()).await.unwrap();
    model.forward(batch(1), LossFn::CrossEntropy).await.unwrap();
    server.reject(7);
    let error = model.optim_step(AdamParams::default()).await.unwrap_err();
    assert!(!error.to_string().contains("gradient"), "{error}");
}

/// It is not known whether the server has applied the gradient.
#[tokio::test(start_paused = true)]
async fn a_lost_optimizer_step_does_not_claim_that_the_gradient_stays() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    model.forward_backward(batch(1), LossFn::CrossEntropy).await.unwrap();
    server.fail("/optim_step", json!("timeout"));
    let without_retries = model.with_options(CallOptions::without_retries());
    let error = without_retries.optim_step(AdamParams::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(!error.to_string().contains("stays on the server"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_gradient_is_discarded_in_call_order() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    server.reject(2);
    let failing = step(&model, batch(3));
    let discarded = model.discard_gradient();
    let next = step(&model, batch(1));
    assert!(failing.await.unwrap_err().to_string().contains("1 pass with 3 datums"));
    discarded.await.unwrap();
    next.await.unwrap();
    assert_eq!(server.sequence_numbers("/discard_gradient"), [3]);
    assert_eq!(server.sequence_numbers("/optim_step"), [2, 5]);
    // The discarded gradient is not counted any more.
    server.reject(7);
    let error = step(&model, batch(1)).await.unwrap_err();
    assert!(error.to_string().contains("1 pass with 1 datum was"), "{error}");
}

/// Such a server would wait for the sequence number.
#[tokio::test(start_paused = true)]
async fn a_server_that_cannot_discard_a_gradient_loses_no_sequence_number() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    model.forward_backward(batch(1), LossFn::CrossEntropy).await.unwrap();
    server.fail("/discard_gradient", json!([404, {"detail": "Not Found"}]));
    let error = model.discard_gradient().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("this server cannot discard a gradient"), "{error}");
    let hint = error.hint().unwrap().as_str();
    assert!(hint.contains("create_training_client_from"), "{hint}");
    // The gradient is still on the server.
    server.reject(2);
    let error = model.optim_step(AdamParams::default()).await.unwrap_err();
    assert!(error.to_string().contains("1 pass with 1 datum was"), "{error}");
}
