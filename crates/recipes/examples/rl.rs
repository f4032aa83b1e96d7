//! Reinforcement learning: rewards answers in capital letters. Samples the next batch while it
//! trains on the current one. Ctrl-C saves a checkpoint; the next start resumes from it.
//!
//! Set `TINKER_BASE_URL` and `TINKER_API_KEY` to those of a local server (`tinkex serve`), then run
//! `cargo run -p tinkex --features recipes --example rl -- tinkex/tiny`

#![expect(clippy::print_stdout, reason = "an example prints its results")]
#![expect(clippy::disallowed_methods, reason = "an example spawns its own task")]

use tinkex::ServiceClient;
use tinkex_recipes::rl::{Completion, Rl, RlPrompt};

const QUESTIONS: [&str; 4] = [
    "What does a cow say?",
    "What does a dog say?",
    "Who are you?",
    "Which day comes after Monday?",
];

/// Returns the fraction of the letters that are capital.
fn reward(completion: &Completion) -> f64 {
    let letters: Vec<char> = completion.text.chars().filter(|c| c.is_alphabetic()).collect();
    let capital = letters.iter().filter(|c| c.is_uppercase()).count();
    capital as f64 / letters.len().max(1) as f64
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let base_model = std::env::args().nth(1).ok_or("usage: rl BASE_MODEL")?;
    let service = ServiceClient::from_env()?;
    let mut run = Rl::new(base_model)
        .prompts(QUESTIONS.map(RlPrompt::chat))
        .reward(reward)
        .groups_per_batch(8)
        .max_tokens(24)
        .learning_rate(3e-3)
        .steps(60)
        .off_policy(1)
        .run_folder("capitals-run")
        .start(&service)
        .await?;
    println!("run {} starts at step {}", run.run_id(), run.resumed_from());
    let stop = run.stop_handle();
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            stop.stop();
        }
    });
    while let Some(report) = run.next().await {
        println!("{}", report?);
    }
    println!("{:?}", run.outcome());
    service.finish().await;
    Ok(())
}
