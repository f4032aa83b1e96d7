//! Training: order, sums, states, losses.

use tinkex::loss::{CustomLoss, LossValue};
use tinkex::{
    AdamParams, BatchOutput, Datum, ErrorKind, LossFn, RestoreMode, SaveOptions, TrainingClient,
};

use super::Any;

fn batch() -> Vec<Datum> {
    vec![
        Datum::completion([5, 6, 7], [8, 9, 10]).unwrap(),
        Datum::completion([11], [12, 13]).unwrap(),
    ]
}

pub(super) async fn model(any: &Any) -> TrainingClient {
    any.service.create_lora_training_client(&*any.model).rank(8).seed(1).create().await.unwrap()
}

fn adam() -> AdamParams {
    AdamParams::with_learning_rate(1e-2)
}

fn loss(pass: &BatchOutput) -> f64 {
    pass.loss().expect("the server says what the loss was")
}

pub(super) async fn train(model: &TrainingClient, steps: usize) -> Vec<f64> {
    let mut losses = Vec::new();
    for _ in 0..steps {
        let (pass, step) = model.step(batch(), LossFn::CrossEntropy, adam());
        losses.push(loss(&pass.await.unwrap()));
        step.await.unwrap();
    }
    losses
}

/// As equal as two machines that compute in another order.
fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 2e-2 * a.abs().max(b.abs()).max(1e-3)
}

pub(super) async fn the_loss_falls(any: Any) {
    let model = model(&any).await;
    let losses = train(&model, 8).await;
    assert!(losses[7] < 0.8 * losses[0], "{losses:?}");
    let info = model.get_info().await.unwrap();
    assert_eq!(info.model_data.model_name.as_deref(), Some(&*any.model));
    let pass = model.forward(batch(), LossFn::CrossEntropy).await.unwrap();
    let lengths: Vec<usize> =
        pass.outputs.iter().map(|datum| datum.f32("logprobs").unwrap().len()).collect();
    assert_eq!(lengths, [5, 2]);
}

pub(super) async fn calls_run_in_the_order_they_are_made(any: Any) {
    let model = model(&any).await;
    let mut calls = Vec::new();
    for _ in 0..4 {
        let before = model.forward(batch(), LossFn::CrossEntropy);
        let (pass, step) = model.step(batch(), LossFn::CrossEntropy, adam());
        calls.push((before, pass, step));
    }
    // Not whether it falls: that depends on how a server scales gradients.
    let one_by_one = train(&self::model(&any).await, 4).await;
    for ((before, pass, step), expected) in calls.into_iter().zip(one_by_one) {
        let (before, pass) = (loss(&before.await.unwrap()), loss(&pass.await.unwrap()));
        step.await.unwrap();
        assert!(close(before, pass), "nothing came between: {before} {pass}");
        assert!(close(before, expected), "as if each was waited for: {before} {expected}");
    }
}

pub(super) async fn a_forward_pass_changes_nothing(any: Any) {
    let model = model(&any).await;
    let before = loss(&model.forward(batch(), LossFn::CrossEntropy).await.unwrap());
    // It left no gradient, so there is nothing to step by.
    model.optim_step(adam()).await.unwrap();
    let after = loss(&model.forward(batch(), LossFn::CrossEntropy).await.unwrap());
    assert!(close(before, after), "{before} {after}");
}

pub(super) async fn gradients_of_a_batch_are_the_sum_of_its_parts(any: Any) {
    let (whole, parts) = (model(&any).await, model(&any).await);
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

pub(super) async fn every_documented_loss_runs(any: Any) {
    let model = model(&any).await;
    for function in [LossFn::ImportanceSampling, LossFn::Ppo, LossFn::Cispo, LossFn::Dro] {
        let data = vec![Datum::rollout([5, 6], [7, 8], vec![-4.0, -4.5], 1.0).unwrap()];
        let name = function.as_str().to_owned();
        let pass = model.forward_backward(data, function).await.unwrap();
        assert!(loss(&pass).is_finite(), "{name}");
    }
    model.optim_step(AdamParams { grad_clip_norm: 1.0, ..adam() }).await.unwrap();
}

pub(super) async fn losses_of_ones_own_train_like_the_built_in_one(any: Any) {
    let traced = CustomLoss::trace("likelihood", |trace| {
        let logprobs = trace.input("logprobs", 1);
        let weights = trace.input("weights", 1);
        -(logprobs * weights).sum()
    })
    .unwrap();
    let traced = any.service.create_custom_loss(&traced).await.unwrap();
    let (built_in, own, computed) = (model(&any).await, model(&any).await, model(&any).await);
    for _ in 0..3 {
        let expected = built_in.forward_backward(batch(), LossFn::CrossEntropy).await.unwrap();
        let given = own.forward_backward(batch(), &traced).await.unwrap();
        let by_hand = computed.forward_backward_custom(batch(), |data, logprobs| {
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
        for model in [&built_in, &own, &computed] {
            model.optim_step(adam()).await.unwrap();
        }
    }
}

pub(super) async fn a_saved_state_is_gone_on_from(any: Any) {
    let whole = train(&model(&any).await, 5).await;
    let first = model(&any).await;
    train(&first, 3).await;
    let ttl = std::time::Duration::from_secs(3_600);
    let path = first.save_state(SaveOptions::new("contract-state").ttl(ttl)).await.unwrap();
    for (restore, steps) in [(RestoreMode::WithOptimizer, 2), (RestoreMode::WeightsOnly, 1)] {
        let resumed =
            any.service.create_training_client_from(&path, restore).create().await.unwrap();
        let losses = train(&resumed, steps).await;
        for (a, b) in losses.iter().zip(&whole[3..]) {
            assert!(close(*a, *b), "{losses:?} {whole:?}");
        }
    }
    any.forget(&path).await;
}

pub(super) async fn bad_data_fails_and_the_model_goes_on(any: Any) {
    let model = model(&any).await;
    let bad = vec![Datum::completion([5], [u32::MAX - 1]).unwrap()];
    let error = model.forward_backward(bad, LossFn::CrossEntropy).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Rejected | ErrorKind::WorkFailed), "{error:?}");
    assert_eq!(train(&model, 1).await.len(), 1);
}
