//! Kinds of the client's errors about objects that do not exist, as the SDK documents them.

use tinkex::{AdamParams, Datum, ErrorKind, LoraOptions, LossFn, RestoreMode};

use crate::harness::{MODEL, TestServer};

#[tokio::test]
async fn missing_models_and_checkpoints_are_not_found() {
    let server = TestServer::new().await;
    let service = server.client();
    let rest = service.rest();
    let missing = "tinker://no-such-run/weights/one";
    let restore = RestoreMode::WithOptimizer;
    let model = service.create_lora_training_client(LoraOptions::new(MODEL).rank(4)).await.unwrap();
    let sampler_path = "tinker://no-such-run/sampler_weights/one";
    let errors = [
        ("base model", service.create_lora_training_client("no-such-model").await.unwrap_err()),
        ("sampled base model", service.create_sampling_client("no-such-model").await.unwrap_err()),
        ("sampler", service.create_sampling_client_from(sampler_path).await.unwrap_err()),
        ("restored", service.create_training_client_from(missing, restore).await.unwrap_err()),
        ("loaded", model.load_state(missing, restore).await.unwrap_err()),
        ("info", rest.get_weights_info(missing).await.unwrap_err()),
        ("deleted", rest.delete_checkpoint(missing).await.unwrap_err()),
        ("run", rest.get_training_run("no-such-run", Default::default()).await.unwrap_err()),
    ];
    for (what, error) in errors {
        assert_eq!((error.kind(), error.status()), (ErrorKind::NotFound, Some(404)), "{what}");
    }
    // The failed load has used no sequence number.
    model.optim_step(AdamParams::default()).await.unwrap();

    let odd = service.create_lora_training_client(LoraOptions::new(MODEL).rank(3)).await;
    assert_eq!(odd.unwrap_err().kind(), ErrorKind::Rejected);
    model.save_state("one").await.unwrap();
    assert_eq!(model.save_state("one").await.unwrap_err().kind(), ErrorKind::Conflict);
}

/// The metric exists on this server only; the client computes the same number for every server.
#[tokio::test]
async fn the_weight_of_a_batch_is_the_metric_of_the_server() {
    let server = TestServer::new().await;
    let service = server.client();
    let model = service.create_lora_training_client(LoraOptions::new(MODEL).rank(4)).await.unwrap();
    let data = vec![
        Datum::completion([3, 4], [5, 6]).unwrap(),
        Datum::supervised([3, 4, 5], vec![9.0, 0.5, 0.25]).unwrap(),
    ];
    let supervised = model.forward(data, LossFn::CrossEntropy).await.unwrap();
    let rollout = Datum::rollout([3, 4, 5], [6, 7], vec![-1.0, -2.0], 1.0).unwrap();
    let reinforced = model.forward(vec![rollout], LossFn::ImportanceSampling).await.unwrap();
    for (output, weight) in [(supervised, 2.75), (reinforced, 4.0)] {
        assert_eq!((output.weight, output.metrics["weight:sum"].as_f64()), (weight, weight));
        let loss = output.metrics["loss:sum"].as_f64();
        assert_eq!(output.mean_loss(), Some(loss / weight));
    }
}
