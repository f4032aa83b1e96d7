//! Teaches an adapter to answer one prompt, and saves it.
//!
//! `TINKER_API_KEY=tml-… cargo run --example finetune -- Qwen/Qwen3-8B`

#![expect(clippy::print_stdout, reason = "an example shows its results")]

use tinkex::{AdamParams, Datum, LossFn, ServiceClient};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let base_model = std::env::args().nth(1).ok_or("name a base model")?;
    let service = ServiceClient::from_env()?;
    let model = service.create_lora_training_client(base_model).rank(16).create().await?;

    let batch = vec![Datum::completion([1, 2, 3], [4, 5, 6])?; 8];
    // Steps are queued ahead, so that the server never waits for us.
    let mut ahead = std::collections::VecDeque::new();
    for step in 0..20 {
        let params = AdamParams::with_learning_rate(2e-4);
        ahead.push_back((step, model.step(batch.clone(), LossFn::CrossEntropy, params)));
        if ahead.len() < 3 {
            continue;
        }
        let Some((step, (pass, optim))) = ahead.pop_front() else { break };
        let loss = pass.await?.loss();
        optim.await?;
        println!("step {step}: loss {loss:?}");
    }
    for (_, (pass, optim)) in ahead {
        pass.await?;
        optim.await?;
    }
    println!("saved as {}", model.save_state("example").await?);
    Ok(())
}
