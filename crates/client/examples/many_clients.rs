//! Two services with different keys, side by side: neither waits for the other.
//!
//! `KEY_A=tml-… KEY_B=tml-… cargo run --example many_clients -- Qwen/Qwen3-8B`

#![expect(clippy::print_stdout, reason = "an example shows its results")]

use futures_util::future::try_join_all;
use tinkex::{Env, SamplingParams, ServiceClient};

async fn hundred(service: ServiceClient, model: String) -> tinkex::Result<usize> {
    let sampler = service.create_sampling_client(model).await?;
    let params = SamplingParams::new().max_tokens(16);
    let answers = try_join_all((0..100).map(|_| sampler.sample([1, 2, 3], params.clone()).send()));
    Ok(answers.await?.iter().map(|answer| answer.sequences[0].tokens.len()).sum())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("name a base model")?;
    let env = Env::of_process();
    let service = |variable: &str| {
        let key = env.get(variable).ok_or(format!("{variable} is not set"))?;
        let service = ServiceClient::builder().env(env.clone()).api_key(key).build();
        service.map_err(|error| error.to_string())
    };
    let (a, b) = (service("KEY_A")?, service("KEY_B")?);
    let (a, b) = tokio::try_join!(hundred(a, model.clone()), hundred(b, model))?;
    println!("{a} and {b} tokens");
    Ok(())
}
