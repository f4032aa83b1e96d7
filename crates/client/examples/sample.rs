//! Samples from a base model.
//!
//! `TINKER_API_KEY=tml-… cargo run --example sample -- Qwen/Qwen3-8B 9906 1917`

#![expect(clippy::print_stdout, reason = "an example shows its results")]

use tinkex::{SamplingParams, ServiceClient};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().ok_or("name a base model, then the tokens of a prompt")?;
    let prompt: Vec<u32> = arguments.map(|token| token.parse()).collect::<Result<_, _>>()?;

    let service = ServiceClient::from_env()?;
    let sampler = service.create_sampling_client(model).await?;
    let params = SamplingParams::new().max_tokens(32).temperature(0.7).seed(1);
    let answer = sampler.sample(prompt, params).num_samples(2).send().await?;
    for sequence in &answer.sequences {
        println!("{:?} {:?}", sequence.stop_reason, &sequence.tokens[..]);
    }
    Ok(())
}
