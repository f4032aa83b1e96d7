//! Samples with two API keys concurrently. The rate limit of one key does not delay the other.
//!
//! `KEY_A=tml-… KEY_B=tml-… cargo run -p tinkex --example many_clients -- Qwen/Qwen3-8B`

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use futures_util::future::try_join_all;
use tinkex::{Env, SamplingParams, ServiceClient};

/// Generates 100 samples and returns their total number of tokens.
async fn count_tokens(service: ServiceClient, model: String) -> tinkex::Result<usize> {
    let sampler = service.create_sampling_client(model).await?;
    let params = SamplingParams::new().max_tokens(16);
    let responses = try_join_all((0..100).map(|_| sampler.sample([1, 2, 3], &params)));
    Ok(responses.await?.iter().map(|response| response.sequences[0].tokens.len()).sum())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("usage: many_clients BASE_MODEL")?;
    let env = Env::from_process();
    let service = |variable: &str| {
        let key = env.get(variable).ok_or(format!("{variable} is not set"))?;
        let service = ServiceClient::builder().env(env.clone()).api_key(key).build();
        service.map_err(|error| error.to_string())
    };
    let a = service("KEY_A")?;
    let b = service("KEY_B")?;
    let (a, b) = tokio::try_join!(count_tokens(a, model.clone()), count_tokens(b, model))?;
    println!("KEY_A: {a} tokens, KEY_B: {b} tokens");
    Ok(())
}
