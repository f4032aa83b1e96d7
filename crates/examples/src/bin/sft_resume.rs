//! Supervised fine-tuning with an explicit training loop and resume: a program that was killed
//! continues at its last checkpoint, with the losses that it would have had.
//!
//! `cargo run -p tinkex-examples --bin sft_resume -- progress.json`

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::fs;

use tinkex::{
    AdamParams, Datum, LoraOptions, LossFn, Message, RestoreMode, SamplingParams, ServiceClient,
    TinkerPath, TrainOn,
};

const STEPS: usize = 40;
const SAVE_EVERY: usize = 10;
const BATCH: usize = 4;
const CONVERSATIONS: [(&str, &str); 4] = [
    ("Who are you?", "A teapot."),
    ("What does a cow say?", "Moo."),
    ("Which day comes after Monday?", "Tuesday."),
    ("Name a river.", "The Rhine."),
];

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let file = std::env::args().nth(1).ok_or("usage: sft_resume PROGRESS_FILE")?;
    let service = ServiceClient::from_env()?; // TINKER_BASE_URL, TINKER_API_KEY
    // The file has the number of finished steps and the checkpoint after them.
    let (model, start) = if fs::exists(&file)? {
        let (step, checkpoint): (usize, TinkerPath) = serde_json::from_slice(&fs::read(&file)?)?;
        let restore = RestoreMode::WithOptimizer;
        (service.create_training_client_from(&checkpoint, restore).await?, step)
    } else {
        let adapter = LoraOptions::new("tinkex/tiny").rank(16).seed(1);
        (service.create_lora_training_client(adapter).await?, 0)
    };
    println!("starting at step {start}");

    let chat = model.tokenizer().await?.chat()?;
    let mut data = Vec::new();
    for (question, answer) in CONVERSATIONS {
        let messages = [Message::user(question), Message::assistant(answer)];
        for example in chat.examples(&messages, TrainOn::AllAssistant)? {
            data.push(example.into_datum()?);
        }
    }
    for step in start..STEPS {
        // The batch depends on the step alone, so that a resumed run trains on the same batches.
        let batch: Vec<Datum> =
            (0..BATCH).map(|i| data[(step * BATCH + i) % data.len()].clone()).collect();
        let adam = AdamParams::with_learning_rate(3e-3 * (1.0 - step as f64 / STEPS as f64));
        let output = model.step(batch, LossFn::CrossEntropy, adam).await?;
        println!("step {step}: loss {}", output.mean_loss().ok_or("the server sent no loss")?);
        let step = step + 1;
        if step % SAVE_EVERY == 0 {
            let checkpoint = model.save_state(format!("step-{step}")).await?;
            // Write a new file and rename it, so that the progress is complete at any time.
            fs::write(format!("{file}.new"), serde_json::to_vec(&(step, checkpoint))?)?;
            fs::rename(format!("{file}.new"), &file)?;
        }
    }

    let sampler = model.save_weights_and_get_sampling_client().await?;
    let params = SamplingParams::new().max_tokens(16).temperature(0.0).stop(chat.stop()?);
    for (question, answer) in CONVERSATIONS {
        let response = sampler.sample(chat.prompt(&[Message::user(question)])?, &params).await?;
        let text = chat.tokenizer().decode_text(&response.sequences[0].tokens)?;
        if text.trim() != answer {
            return Err(format!("{question:?} is answered with {text:?}, not {answer:?}").into());
        }
    }
    service.finish().await;
    println!("all {} answers are right", CONVERSATIONS.len());
    Ok(())
}
