//! Samples two completions of a tokenized prompt from a base model.
//!
//! `TINKER_API_KEY=tml-… cargo run -p tinkex --example sample -- Qwen/Qwen3-8B 9906 1917`

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use tinkex::{SampleOptions, SamplingParams, ServiceClient};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("usage: sample BASE_MODEL TOKEN_ID...")?;
    let prompt: Vec<u32> = args.map(|token| token.parse()).collect::<Result<_, _>>()?;

    let service = ServiceClient::from_env()?;
    let sampler = service.create_sampling_client(model).await?;
    let params = SamplingParams::new().max_tokens(32).temperature(0.7).seed(1);
    let response = sampler.sample(prompt, SampleOptions::new(params).num_samples(2)).await?;
    for sequence in &response.sequences {
        println!("{:?} {:?}", sequence.stop_reason, &sequence.tokens[..]);
    }
    Ok(())
}
