//! Teaches a model from a file of conversations, and asks it something.
//!
//! `cargo run -p tinkex --features chat --example teach -- talks.jsonl "Who are you?"`

#![expect(clippy::print_stdout, reason = "an example shows its results")]

use tinkex::{AdamParams, Datum, LossFn, Message, SamplingParams, ServiceClient};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let (file, question) = (words.next().ok_or("a file")?, words.next().ok_or("a question")?);
    let service = ServiceClient::from_env()?; // TINKER_BASE_URL and TINKER_API_KEY
    let model = service.create_lora_training_client("tinkex/tiny").rank(16).create().await?;
    let chat = model.tokenizer().await?.chat()?;
    let data: Vec<Datum> = chat.open_jsonl(&file)?.collect::<Result<_, _>>()?;
    for _ in 0..30 {
        let adam = AdamParams::with_learning_rate(3e-3);
        let (pass, step) = model.step(data.clone(), LossFn::CrossEntropy, adam);
        println!("loss {:?}", pass.await?.loss());
        step.await?;
    }
    let sampler = model.save_weights_and_get_sampling_client().await?;
    let params = SamplingParams::new().max_tokens(64).temperature(0.0).stop(chat.stop()?);
    let answer = sampler.sample(chat.prompt(&[Message::user(question)])?, params).await?;
    println!("{}", chat.tokenizer().decode_text(&answer.sequences[0].tokens)?);
    Ok(())
}
