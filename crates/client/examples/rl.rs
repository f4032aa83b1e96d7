//! Rewards answers that contain one token, with importance sampling.
//!
//! `TINKER_API_KEY=tml-… cargo run --example rl -- Qwen/Qwen3-8B`

#![expect(clippy::print_stdout, reason = "an example shows its results")]

use tinkex::{AdamParams, Datum, LossFn, SampledSequence, SamplingParams, ServiceClient, Tokens};

const WANTED: u32 = 42;
const GROUP: u16 = 8;

fn reward(answer: &SampledSequence) -> f32 {
    if answer.tokens.contains(&WANTED) { 1.0 } else { 0.0 }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let base_model = std::env::args().nth(1).ok_or("name a base model")?;
    let service = ServiceClient::from_env()?;
    let model = service.create_lora_training_client(base_model).rank(8).create().await?;
    let prompt = Tokens::from([1, 2, 3]);

    for round in 0..10 {
        let sampler = model.save_weights_and_get_sampling_client().await?;
        let params = SamplingParams::new().max_tokens(16);
        let answer =
            sampler.sample(prompt.clone(), params).num_samples(GROUP.into()).send().await?;
        let mean = answer.sequences.iter().map(reward).sum::<f32>() / f32::from(GROUP);
        println!("round {round}: mean reward {mean:.2}");

        let mut batch = Vec::new();
        for sequence in &answer.sequences {
            // Only what is better or worse than the group's mean teaches anything.
            let (Some(logprobs), advantage) = (&sequence.logprobs, reward(sequence) - mean) else {
                continue;
            };
            if advantage != 0.0 {
                batch.push(Datum::rollout(&prompt, &sequence.tokens, logprobs, advantage)?);
            }
        }
        if !batch.is_empty() {
            let adam = AdamParams::with_learning_rate(1e-4);
            let (pass, optim) = model.step(batch, LossFn::ImportanceSampling, adam);
            pass.await?;
            optim.await?;
        }
    }
    Ok(())
}
