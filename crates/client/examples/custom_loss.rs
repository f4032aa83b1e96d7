//! Trains with a custom loss: prefers some completions over others, similar to DPO.
//!
//! `TINKER_API_KEY=tml-… cargo run -p tinkex --example custom_loss -- Qwen/Qwen3-8B`

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;

use tinkex::loss::{CustomLoss, regularize};
use tinkex::{AdamParams, Datum, LoraOptions, ServiceClient};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let base_model = std::env::args().nth(1).ok_or("usage: custom_loss BASE_MODEL")?;
    let service = ServiceClient::from_env()?;
    let model = service.create_lora_training_client(LoraOptions::new(base_model).rank(16)).await?;

    // A function of each datum's log-probabilities. It is traced once and differentiated
    // automatically; the server executes it if it supports custom losses.
    let loss = CustomLoss::trace("preference", |trace| {
        let logprobs = trace.input("logprobs", 1);
        let reference = trace.input("reference", 1);
        let sign = trace.input("sign", 1);
        let margin = ((logprobs - reference) * sign).sum();
        trace.metric("custom/margin:mean", margin);
        let distance = regularize::l2(logprobs - reference).mean();
        regularize::add(trace, -margin.log_sigmoid(), &[("distance", 0.01, distance)])
    })?;
    let loss = service.create_custom_loss(&loss).await?;
    println!("executed by the {}", if loss.is_on_server() { "server" } else { "client" });

    for step in 1..=10 {
        let data = vec![example([1, 2, 3], [4, 5], 1.0)?, example([1, 2, 3], [6], -1.0)?];
        let output = model.step(data, &loss, AdamParams::with_learning_rate(1e-4)).await?;
        println!("step {step}: loss {:?}", output.loss());
    }
    service.finish().await;
    Ok(())
}

/// Creates a datum for a preferred (`sign` 1) or rejected (-1) completion.
///
/// Prompt tokens have sign 0, so they do not contribute to the margin. The log-probabilities of the
/// reference model are assumed to be -2.
fn example<const P: usize, const C: usize>(
    prompt: [u32; P],
    completion: [u32; C],
    sign: f32,
) -> Result<Datum, Box<dyn Error>> {
    let tokens: Vec<u32> = prompt.into_iter().chain(completion).collect();
    let len = tokens.len() - 1;
    let completion_only =
        |value: f32| (0..len).map(|i| if i + 1 < P { 0.0 } else { value }).collect();
    let reference: Vec<f32> = completion_only(-2.0);
    let sign: Vec<f32> = completion_only(sign);
    Ok(Datum::builder(tokens[..len].to_vec())
        .loss_input("target_tokens", tokens[1..].iter().map(|t| i64::from(*t)).collect::<Vec<_>>())
        .loss_input("reference", reference)
        .loss_input("sign", sign)
        .build()?)
}
