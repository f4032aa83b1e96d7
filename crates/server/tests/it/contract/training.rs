//! Training: order, gradients, saved states, losses.

use tinkex::loss::{CustomLoss, LossValue};
use tinkex::{
    AdamParams, BatchOutput, Datum, ErrorKind, LoraOptions, LossFn, RestoreMode, SaveOptions,
    TrainingClient,
};

use super::Subject;

fn batch() -> Vec<Datum> {
    vec![
        Datum::completion([5, 6, 7], [8, 9, 10]).unwrap(),
        Datum::completion([11], [12, 13]).unwrap(),
    ]
}

pub(super) async fn model(subject: &Subject) -> TrainingClient {
    subject
        .service
        .create_lora_training_client(LoraOptions::new(&*subject.model).rank(8).seed(1))
        .await
        .unwrap()
}

fn adam() -> AdamParams {
    AdamParams::with_learning_rate(1e-2)
}

fn loss(pass: &BatchOutput) -> f64 {
    pass.loss().expect("the server reports the loss")
}

pub(super) async fn train(model: &TrainingClient, steps: usize) -> Vec<f64> {
    let mut losses = Vec::new();
    for _ in 0..steps {
        let step = model.step(batch(), LossFn::CrossEntropy, adam()).await.unwrap();
        losses.push(loss(&step.pass));
    }
    losses
}

/// Compares with a tolerance for different reduction orders.
fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 2e-2 * a.abs().max(b.abs()).max(1e-3)
}

pub(super) async fn the_loss_decreases(subject: Subject) {
    let model = model(&subject).await;
    let losses = train(&model, 8).await;
    assert!(losses[7] < 0.8 * losses[0], "{losses:?}");
    let info = model.get_info().await.unwrap();
    assert_eq!(info.model_data.model_name.as_deref(), Some(&*subject.model));
    let pass = model.forward(batch(), LossFn::CrossEntropy).await.unwrap();
    let lengths: Vec<usize> =
        pass.outputs.iter().map(|datum| datum.f32("logprobs").unwrap().len()).collect();
    assert_eq!(lengths, [5, 2]);
}

pub(super) async fn requests_run_in_call_order(subject: Subject) {
    let model = model(&subject).await;
    let mut calls = Vec::new();
    for _ in 0..4 {
        let before = model.forward(batch(), LossFn::CrossEntropy);
        calls.push((before, model.step(batch(), LossFn::CrossEntropy, adam())));
    }
    // Do not require a decrease: that depends on how a server scales gradients.
    let sequential = train(&self::model(&subject).await, 4).await;
    for ((before, step), expected) in calls.into_iter().zip(sequential) {
        let before = loss(&before.await.unwrap());
        let pass = loss(&step.await.unwrap().pass);
        assert!(close(before, pass), "both passes see the same state: {before} {pass}");
        assert!(close(before, expected), "differs from sequential execution: {before} {expected}");
    }
}

pub(super) async fn a_forward_pass_changes_nothing(subject: Subject) {
    let model = model(&subject).await;
    let before = loss(&model.forward(batch(), LossFn::CrossEntropy).await.unwrap());
    // The forward pass left no gradient, so the step changes nothing.
    model.optim_step(adam()).await.unwrap();
    let after = loss(&model.forward(batch(), LossFn::CrossEntropy).await.unwrap());
    assert!(close(before, after), "{before} {after}");
}

pub(super) async fn batch_gradients_are_the_sum_over_datums(subject: Subject) {
    let whole = model(&subject).await;
    let parts = model(&subject).await;
    whole.forward_backward(batch(), LossFn::CrossEntropy).await.unwrap();
    for datum in batch() {
        parts.forward_backward(vec![datum], LossFn::CrossEntropy).await.unwrap();
    }
    let mut after = Vec::new();
    for model in [whole, parts] {
        model.optim_step(adam()).await.unwrap();
        after.push(loss(&model.forward(batch(), LossFn::CrossEntropy).await.unwrap()));
    }
    assert!(close(after[0], after[1]), "{after:?}");
}

pub(super) async fn every_documented_loss_runs(subject: Subject) {
    let model = model(&subject).await;
    for function in [LossFn::ImportanceSampling, LossFn::Ppo, LossFn::Cispo, LossFn::Dro] {
        let data = vec![Datum::rollout([5, 6], [7, 8], vec![-4.0, -4.5], 1.0).unwrap()];
        let name = function.as_str().to_owned();
        let pass = model.forward_backward(data, function).await.unwrap();
        assert!(loss(&pass).is_finite(), "{name}");
    }
    model.optim_step(adam().grad_clip_norm(1.0)).await.unwrap();
}

pub(super) async fn custom_losses_train_like_the_built_in_one(subject: Subject) {
    let traced = CustomLoss::trace("likelihood", |trace| {
        let logprobs = trace.input("logprobs", 1);
        let weights = trace.input("weights", 1);
        -(logprobs * weights).sum()
    })
    .unwrap();
    let traced = subject.service.create_custom_loss(&traced).await.unwrap();
    let built_in = model(&subject).await;
    let on_server = model(&subject).await;
    let on_client = model(&subject).await;
    for _ in 0..3 {
        let expected = built_in.forward_backward(batch(), LossFn::CrossEntropy).await.unwrap();
        let given = on_server.forward_backward(batch(), &traced).await.unwrap();
        let by_hand = on_client.forward_backward_custom(batch(), |data, logprobs| {
            let mut value = LossValue::default();
            for (datum, logprobs) in data.iter().zip(logprobs) {
                let weights = datum.loss_input("weights").unwrap().as_f32().unwrap();
                let logprobs = logprobs.as_f32().unwrap();
                let terms = weights.iter().zip(logprobs);
                value.loss -= terms.map(|(w, p)| f64::from(w * p)).sum::<f64>();
                value.gradients.push(weights.iter().map(|w| -w).collect());
            }
            Ok(value)
        });
        let by_hand = by_hand.await.unwrap();
        let all = [&expected, &given, &by_hand].map(loss);
        assert!(close(all[0], all[1]) && close(all[0], all[2]), "{all:?}");
        for model in [&built_in, &on_server, &on_client] {
            model.optim_step(adam()).await.unwrap();
        }
    }
}

pub(super) async fn training_continues_from_a_saved_state(subject: Subject) {
    let whole = train(&model(&subject).await, 5).await;
    let first = model(&subject).await;
    train(&first, 3).await;
    let ttl = std::time::Duration::from_secs(3_600);
    let path = first.save_state(SaveOptions::new("contract-state").ttl(ttl)).await.unwrap();
    for (restore, steps) in [(RestoreMode::WithOptimizer, 2), (RestoreMode::WeightsOnly, 1)] {
        let resumed = subject.service.create_training_client_from(&path, restore).await.unwrap();
        let losses = train(&resumed, steps).await;
        for (a, b) in losses.iter().zip(&whole[3..]) {
            assert!(close(*a, *b), "{losses:?} {whole:?}");
        }
    }
    subject.delete(&path).await;
}

pub(super) async fn invalid_data_fails_and_the_model_stays_usable(subject: Subject) {
    let model = model(&subject).await;
    let bad = vec![Datum::completion([5], [u32::MAX - 1]).unwrap()];
    let error = model.forward_backward(bad, LossFn::CrossEntropy).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Rejected | ErrorKind::WorkFailed), "{error:?}");
    assert_eq!(train(&model, 1).await.len(), 1);
}
