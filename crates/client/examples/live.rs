//! Prints the client's metrics every second while 1000 samples are generated.
//!
//! `TINKER_API_KEY=tml-… cargo run -p tinkex --example live -- Qwen/Qwen3-8B`

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tinkex::{SamplingParams, ServiceClient};
use tokio::time::sleep;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let base_model = std::env::args().nth(1).ok_or("usage: live BASE_MODEL")?;
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    recorder.install()?;
    let sampler = ServiceClient::from_env()?.create_sampling_client(base_model).await?;
    let params = SamplingParams::new().max_tokens(64);
    let samples = (0..1000).map(|_| sampler.sample([1, 2, 3], &params));
    let mut pending = pin!(join_all(samples));
    while let Either::Right((_, rest)) = select(pending, pin!(sleep(Duration::from_secs(1)))).await
    {
        print_metrics(&snapshotter);
        pending = rest;
    }
    Ok(())
}

/// Prints one row per metric: the count since the last table and the median duration in
/// milliseconds.
fn print_metrics(snapshotter: &Snapshotter) {
    println!("{:<34} {:<24} {:>8} {:>10}", "", "", "count", "median ms");
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let labels: Vec<&str> = key.key().labels().map(|label| label.value()).collect();
        let (count, median) = match value {
            DebugValue::Counter(count) => (count, String::new()),
            DebugValue::Histogram(mut times) => {
                times.sort_unstable();
                let median = times.get(times.len() / 2).map(|time| time.into_inner() * 1000.0);
                (times.len() as u64, median.map_or_else(String::new, |ms| format!("{ms:.2}")))
            }
            DebugValue::Gauge(_) => continue,
        };
        println!("{:<34} {:<24} {count:>8} {median:>10}", key.key().name(), labels.join(" "));
    }
}
