//! Fine-tunes the small built-in model `tinkex/tiny` on a file of conversations, then sends it one
//! message.
//!
//! Set `TINKER_BASE_URL` and `TINKER_API_KEY` to the values that `tinkex serve` prints, then run
//! `cargo run -p tinkex --features chat --example teach -- conversations.jsonl "Who are you?"`

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use tinkex::{AdamParams, Datum, LoraOptions, LossFn, Message, SamplingParams, ServiceClient};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: teach FILE MESSAGE";
    let file = args.next().ok_or(usage)?;
    let message = args.next().ok_or(usage)?;
    let service = ServiceClient::from_env()?;
    let model =
        service.create_lora_training_client(LoraOptions::new("tinkex/tiny").rank(16)).await?;
    let chat = model.tokenizer().await?.chat()?;
    let data: Vec<Datum> = chat.open_jsonl(&file)?.collect::<Result<_, _>>()?;
    for _ in 0..30 {
        let adam = AdamParams::with_learning_rate(3e-3);
        let output = model.step(data.clone(), LossFn::CrossEntropy, adam).await?;
        println!("loss {:?}", output.mean_loss());
    }
    let sampler = model.save_weights_and_get_sampling_client().await?;
    let params = SamplingParams::new().max_tokens(64).temperature(0.0).stop(chat.stop()?);
    let response = sampler.sample(chat.prompt(&[Message::user(message)])?, params).await?;
    println!("{}", chat.tokenizer().decode_text(&response.sequences[0].tokens)?);
    Ok(())
}
