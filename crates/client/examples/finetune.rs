//! Fine-tunes an adapter on one prompt and completion, and saves it.
//!
//! `TINKER_API_KEY=tml-… cargo run -p tinkex --example finetune -- Qwen/Qwen3-8B`

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use tinkex::{AdamParams, Datum, LoraOptions, LossFn, ServiceClient};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let base_model = std::env::args().nth(1).ok_or("usage: finetune BASE_MODEL")?;
    let service = ServiceClient::from_env()?;
    let model = service.create_lora_training_client(LoraOptions::new(base_model).rank(16)).await?;

    let batch = vec![Datum::completion([1, 2, 3], [4, 5, 6])?; 8];
    // Keep up to three steps queued, so that the server never waits for this loop.
    let mut queued = std::collections::VecDeque::new();
    for step in 0..20 {
        let params = AdamParams::with_learning_rate(2e-4);
        queued.push_back((step, model.step(batch.clone(), LossFn::CrossEntropy, params)));
        if queued.len() < 3 {
            continue;
        }
        let Some((step, output)) = queued.pop_front() else { break };
        println!("step {step}: loss {:?}", output.await?.loss());
    }
    for (_, output) in queued {
        output.await?;
    }
    println!("saved {}", model.save_state("example").await?);
    Ok(())
}
