//! Reinforcement learning by hand with group-relative advantages (GRPO): rewards answers in capital
//! letters.
//!
//! `cargo run -p tinkex-examples --bin grpo`

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;

use futures_util::future::try_join_all;
use tinkex::{
    AdamParams, Datum, LoraOptions, LossFn, Message, SampleOptions, SamplingParams, ServiceClient,
};

const STEPS: u64 = 24;
const GROUP: u32 = 16;
const QUESTIONS: [&str; 4] = [
    "Who are you?",
    "What does a cow say?",
    "What does a dog say?",
    "Which day comes after Monday?",
];

/// Returns the fraction of the letters that are capital.
fn reward(text: &str) -> f32 {
    let letters: Vec<char> = text.chars().filter(|c| c.is_alphabetic()).collect();
    let capital = letters.iter().filter(|c| c.is_uppercase()).count();
    capital as f32 / letters.len().max(1) as f32
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
    let params = SamplingParams::new().max_tokens(16).stop(chat.stop()?);

    let mut history = Vec::new();
    for step in 0..STEPS {
        // Sample a group of answers to each question from the current weights.
        let sampler = model.save_weights_and_get_sampling_client().await?;
        let group = SampleOptions::new(params.clone().seed(step)).num_samples(GROUP);
        let responses = try_join_all(prompts.iter().map(|prompt| sampler.sample(prompt, &group)));

        let mut data = Vec::new();
        let mut all_rewards = Vec::new();
        for (prompt, response) in prompts.iter().zip(responses.await?) {
            let text = |tokens: &[u32]| chat.tokenizer().decode_text(tokens);
            let texts = response.sequences.iter().map(|sequence| text(&sequence.tokens));
            let rewards: Vec<f32> =
                texts.map(|text| Ok(reward(&text?))).collect::<tinkex::Result<_>>()?;
            for (sequence, reward) in response.sequences.iter().zip(&rewards) {
                let advantage = reward - mean(&rewards);
                if advantage != 0.0 {
                    data.push(Datum::from_sample(prompt, sequence, advantage)?);
                }
            }
            all_rewards.extend(rewards);
        }
        if !data.is_empty() {
            let adam = AdamParams::with_learning_rate(3e-3);
            model.step(data, LossFn::ImportanceSampling, adam).await?;
        }
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
