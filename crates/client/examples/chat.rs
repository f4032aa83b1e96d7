//! Fine-tunes a model on a file of conversations, then sends it one message.
//!
//! ```sh
//! TINKER_API_KEY=tml-… cargo run -p tinkex --features chat --example chat -- \
//!     Qwen/Qwen3-8B conversations.jsonl "Name a river."
//! ```
//!
//! `TINKER_BASE_URL` selects the server; `HF_TOKEN` and `HF_ENDPOINT` configure the download of the
//! tokenizer.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use tinkex::{
    AdamParams, Datum, LoraOptions, LossFn, Message, SamplingParams, ServiceClient, TooLong,
    TrainOn,
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: chat BASE_MODEL FILE MESSAGE";
    let base_model = args.next().ok_or(usage)?;
    let file = args.next().ok_or(usage)?;
    let message = args.next().ok_or(usage)?;

    let service = ServiceClient::from_env()?;
    let model = service.create_lora_training_client(LoraOptions::new(base_model).rank(32)).await?;
    let chat = model.tokenizer().await?.chat()?;

    let examples =
        chat.open_jsonl(file)?.train_on(TrainOn::EachAssistant).max_tokens(8192, TooLong::Truncate);
    let valid = |example| match example {
        Ok(datum) => Some(datum),
        Err(error) => {
            println!("skipping {error}");
            None
        }
    };
    let data: Vec<Datum> = examples.filter_map(valid).collect();
    for batch in data.chunks(64) {
        let params = AdamParams::with_learning_rate(1e-4);
        let output = model.step(batch.to_vec(), LossFn::CrossEntropy, params).await?;
        println!("{:?}", output.pass.metrics);
    }

    let sampler = model.save_weights_and_get_sampling_client().await?;
    let prompt = chat.prompt(&[Message::user(message)])?;
    let params = SamplingParams::new().max_tokens(200).stop(chat.stop()?);
    let response = sampler.sample(prompt, params).await?;
    println!("{}", chat.tokenizer().decode_text(&response.sequences[0].tokens)?);
    Ok(())
}
