//! A load generator: samples with several API keys on several servers at once, and reports latency
//! and throughput. The rate limit of one key does not delay the other keys.
//!
//! ```sh
//! cargo run -p tinkex-examples --bin load -- --samples 200 \
//!     --server http://127.0.0.1:8000 --server http://127.0.0.1:8001 \
//!     --key tml-a --key tml-b --key tml-c
//! ```

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::time::Instant;

use futures_util::future::try_join_all;
use tinkex::{Lane, LaneStats, SamplingParams, ServiceClient, Tokens};

const MODEL: &str = "tinkex/tiny";
const TOKENS: u32 = 8;

/// Arguments of the program.
#[derive(Default)]
struct Arguments {
    servers: Vec<String>,
    keys: Vec<String>,
    samples: usize,
}

impl Arguments {
    fn parse() -> Result<Self, String> {
        let mut arguments = Self::default();
        let mut words = std::env::args().skip(1);
        while let Some(name) = words.next() {
            let value = words.next().ok_or(format!("{name} needs a value"))?;
            match name.as_str() {
                "--server" => arguments.servers.push(value),
                "--key" => arguments.keys.push(value),
                "--samples" => {
                    arguments.samples = value.parse().map_err(|_| "--samples needs a number")?;
                }
                _ => return Err(format!("unknown argument {name}")),
            }
        }
        Ok(arguments)
    }
}

/// Samples with one key on one server.
async fn run(service: ServiceClient, samples: usize) -> tinkex::Result<Vec<Tokens>> {
    let sampler = service.create_sampling_client(MODEL).await?;
    // The client sends the samples as fast as the server and the limits allow.
    let pending = (0..samples as u64).map(|seed| {
        let params = SamplingParams::new().max_tokens(TOKENS).seed(seed);
        sampler.sample([1, 2, 3], params)
    });
    let responses = try_join_all(pending).await?;
    service.finish().await;
    Ok(responses.iter().map(|response| response.sequences[0].tokens.clone()).collect())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let Arguments { servers, keys, samples } = Arguments::parse()?;
    let mut services = Vec::new();
    for server in &servers {
        for key in &keys {
            services.push(ServiceClient::builder().base_url(server).api_key(key).build()?);
        }
    }
    let start = Instant::now();
    let runs = services.iter().map(|service| run(service.clone(), samples));
    let results = try_join_all(runs).await?;
    let seconds = start.elapsed().as_secs_f64();

    for (service, sampled) in services.iter().zip(&results) {
        let stats = service.stats();
        let submitted = stats.lane(Lane::Sample).ok_or("no sample was submitted")?;
        let LaneStats { ok, refused, lost, p50, p99, .. } = submitted;
        let server = service.base_url();
        println!(
            "{server}: {ok} accepted, {refused} refused, {lost} lost, p50 {p50:?}, p99 {p99:?}"
        );
        // With a seed, a sample depends neither on the key nor on the server.
        if sampled.len() != samples || *sampled != results[0] {
            return Err(format!("{server} returned other samples than {}", servers[0]).into());
        }
    }
    let count = results.iter().map(Vec::len).sum::<usize>();
    let tokens: usize = results.iter().flatten().map(|tokens| tokens.len()).sum();
    println!("{count} samples, {tokens} tokens in {seconds:.2} s");
    Ok(())
}
