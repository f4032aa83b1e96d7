//! Fine-tunes on a file of conversations, then asks the model something.
//!
//! `cargo run --features chat --example chat -- Qwen/Qwen3-8B talks.jsonl "Name a river."`, with
//! `TINKER_API_KEY` and perhaps `TINKER_BASE_URL`, `HF_TOKEN` and `HF_ENDPOINT` in the environment.

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use tinkex::{AdamParams, Datum, LossFn, Message, SamplingParams, ServiceClient, TooLong, TrainOn};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let base = words.next().ok_or("which model?")?;
    let file = words.next().ok_or("which file of conversations?")?;
    let question = words.next().ok_or("and what to ask?")?;

    let service = ServiceClient::from_env()?;
    let model = service.create_lora_training_client(base).rank(32).create().await?;
    let chat = model.tokenizer().await?.chat()?;

    let lines =
        chat.open_jsonl(file)?.train_on(TrainOn::EachAssistant).max_tokens(8192, TooLong::Truncate);
    let keep = |line| match line {
        Ok(datum) => Some(datum),
        Err(bad) => {
            println!("skipping {bad}");
            None
        }
    };
    let data: Vec<Datum> = lines.filter_map(keep).collect();
    for batch in data.chunks(64) {
        let params = AdamParams::with_learning_rate(1e-4);
        let (pass, step) = model.step(batch.to_vec(), LossFn::CrossEntropy, params);
        println!("{:?}", pass.await?.metrics);
        step.await?;
    }

    let sampler = model.save_weights_and_get_sampling_client().await?;
    let prompt = chat.prompt(&[Message::user(question)])?;
    let params = SamplingParams::new().max_tokens(200).stop(chat.stop()?);
    let answer = sampler.sample(prompt, params).send().await?;
    println!("{}", chat.tokenizer().decode_text(&answer.sequences[0].tokens)?);
    Ok(())
}
