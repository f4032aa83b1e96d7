//! Reinforcement learning with an explicit training loop and group-relative advantages (GRPO):
//! rewards short answers.
//!
//! `cargo run -p tinkex-examples --bin grpo`

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;

use futures_util::future::try_join_all;
use tinkex::{
    AdamParams, Datum, LoraOptions, LossFn, Message, SampleOptions, SampledSequence,
    SamplingParams, ServiceClient,
};

const STEPS: u64 = 16;
const GROUP: u32 = 16;
const MAX_TOKENS: u32 = 16;
const QUESTIONS: [&str; 3] = ["Who are you?", "What does a cow say?", "What does a dog say?"];

/// Returns the fraction of the allowed tokens that an answer does not use.
fn reward(answer: &SampledSequence) -> f32 {
    1.0 - answer.tokens.len() as f32 / MAX_TOKENS as f32
}

fn mean(values: &[f32]) -> f32 {
    values.iter().sum::<f32>() / values.len() as f32
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let service = ServiceClient::from_env()?; // TINKER_BASE_URL, TINKER_API_KEY
    let adapter = LoraOptions::new("tinkex/tiny").rank(16).seed(1);
    let model = service.create_lora_training_client(adapter).await?;
    let chat = model.tokenizer().await?.chat()?;
    let ask = |question: &&str| chat.prompt(&[Message::user(*question)]);
    let prompts = QUESTIONS.iter().map(ask).collect::<Result<Vec<_>, _>>()?;
    let params = SamplingParams::new().max_tokens(MAX_TOKENS).stop(chat.stop()?);

    let mut history = Vec::new();
    for step in 0..STEPS {
        // Sample a group of answers to each question from the current weights.
        let sampler = model.save_weights_and_get_sampling_client().await?;
        let group = SampleOptions::new(params.clone().seed(step)).num_samples(GROUP);
        let responses = try_join_all(prompts.iter().map(|prompt| sampler.sample(prompt, &group)));

        let mut data = Vec::new();
        let mut all_rewards = Vec::new();
        for (prompt, response) in prompts.iter().zip(responses.await?) {
            let rewards: Vec<f32> = response.sequences.iter().map(reward).collect();
            let distances = rewards.iter().map(|reward| (reward - mean(&rewards)).abs());
            let spread = mean(&distances.collect::<Vec<_>>()).max(1e-6);
            for (sequence, reward) in response.sequences.iter().zip(&rewards) {
                let advantage = (reward - mean(&rewards)) / spread;
                data.push(Datum::from_sample(prompt, sequence, advantage)?);
            }
            all_rewards.extend(rewards);
        }
        let adam = AdamParams::with_learning_rate(3e-3);
        model.step(data, LossFn::ImportanceSampling, adam).await?;
        println!("step {step}: reward {:.3}", mean(&all_rewards));
        history.push(mean(&all_rewards));
    }
    service.finish().await;
    let (first, last) = (history[0], mean(&history[history.len() - 3..]));
    if last < first + 0.3 {
        return Err(format!("the reward rose from {first} to {last} only").into());
    }
    Ok(())
}
