//! Reinforcement learning: rewards completions that contain one token, with importance sampling.
//!
//! `TINKER_API_KEY=tml-… cargo run -p tinkex --example rl -- Qwen/Qwen3-8B`

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use tinkex::{AdamParams, Datum, LossFn, SampledSequence, SamplingParams, ServiceClient, Tokens};

/// Token whose presence is rewarded.
const TARGET_TOKEN: u32 = 42;
/// Completions per prompt.
const GROUP_SIZE: u16 = 8;

fn reward(completion: &SampledSequence) -> f32 {
    if completion.tokens.contains(&TARGET_TOKEN) { 1.0 } else { 0.0 }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let base_model = std::env::args().nth(1).ok_or("usage: rl BASE_MODEL")?;
    let service = ServiceClient::from_env()?;
    let model = service.create_lora_training_client(base_model).rank(8).await?;
    let prompt = Tokens::from([1, 2, 3]);

    for round in 0..10 {
        let sampler = model.save_weights_and_get_sampling_client().await?;
        let params = SamplingParams::new().max_tokens(16);
        let response =
            sampler.sample(prompt.clone(), params).num_samples(GROUP_SIZE.into()).await?;
        let mean = response.sequences.iter().map(reward).sum::<f32>() / f32::from(GROUP_SIZE);
        println!("round {round}: mean reward {mean:.2}");

        let mut batch = Vec::new();
        for sequence in &response.sequences {
            // A completion with the mean reward has zero advantage, hence no gradient.
            let (Some(logprobs), advantage) = (&sequence.logprobs, reward(sequence) - mean) else {
                continue;
            };
            if advantage != 0.0 {
                batch.push(Datum::rollout(&prompt, &sequence.tokens, logprobs, advantage)?);
            }
        }
        if !batch.is_empty() {
            let adam = AdamParams::with_learning_rate(1e-4);
            model.step(batch, LossFn::ImportanceSampling, adam).await?;
        }
    }
    Ok(())
}
