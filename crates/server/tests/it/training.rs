//! Training through the client.

use tinkex::{AdamParams, Datum, LossFn};

use crate::house::{House, MODEL};

#[tokio::test(flavor = "multi_thread")]
async fn the_loss_falls() {
    let house = House::new().await;
    let service = house.client();
    let models = service.server_capabilities().await.unwrap().supported_models;
    assert_eq!(models[0].model_name.as_deref(), Some(MODEL));
    assert_eq!(models[0].max_context_length, Some(256));
    let model = service.create_lora_training_client(MODEL).rank(8).seed(1).create().await.unwrap();
    let batch = vec![Datum::completion([5, 6, 7], [8, 9, 10]).unwrap(); 4];
    let mut losses = Vec::new();
    for _ in 0..8 {
        let (pass, step) =
            model.step(batch.clone(), LossFn::CrossEntropy, AdamParams::with_learning_rate(1e-2));
        let pass = pass.await.unwrap();
        assert_eq!(pass.outputs.len(), 4);
        losses.push(pass.metrics["loss:sum"].as_f64());
        let metrics = step.await.unwrap().metrics.unwrap();
        assert!(metrics["unclipped_grad_l2:mean"] > 0.0);
    }
    assert!(losses[7] < losses[0] * 0.7, "{losses:?}");
}
