//! `cargo xtask bench server`: overhead of the server compared with the engine alone, and its
//! growth with the number of samples.
//!
//! The server runs in its own process. This process sends requests over loopback with a minimal
//! HTTP client, and runs the same samples on its own engine to measure the time without a server. A
//! measurement above its limit fails the run. `--streams` measures only streams; `--llama PYTHON`
//! also compares them with the server of llama.cpp's Python bindings.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]
#![expect(clippy::unwrap_used, reason = "an error ends the run")]
#![expect(clippy::disallowed_methods, reason = "a benchmark measures the real time")]

#[path = "../../tests/it/child_server.rs"]
mod child_server;
mod connection;
#[path = "../../tests/it/golden_gguf.rs"]
mod golden_gguf;
mod llama;
mod load;
mod streams;

use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};

use serde_json::json;
use tinkex_engine::Engine;
use tinkex_engine::sample::SampleRequest;

use child_server::ChildOptions;
use connection::{Connection, Pool};
use load::{run_samples, send_bodies, watch_health};

const MODEL: &str = "tiny";
/// Number of tokens per sample.
pub(crate) const TOKENS: u32 = 4;
const CONNECTIONS: usize = 1_000;
/// Number of concurrent large bodies, and the size of each in bytes.
const BODIES: (usize, usize) = (64, 5_000_000);

/// A measurement: its name with the unit, its value, and its maximum.
struct Measurement(&'static str, f64, f64);

/// Speed at one number of outstanding samples.
struct Throughput {
    submissions_per_second: f64,
    seconds_per_sample: f64,
    /// Seconds per sample beyond the time of the engine alone.
    overhead_per_sample: f64,
}

struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// Starts a server with a model, given as `NAME=PATH`. Returns it with the time until it listens.
    fn start(data: &Path, model: &str) -> (Self, Duration) {
        let start = Instant::now();
        let (name, path) = model.split_once('=').unwrap();
        let options = ChildOptions {
            data_dir: data.to_owned(),
            models: vec![(name.to_owned(), path.into())],
            ..ChildOptions::default()
        };
        let (child, url) = child_server::start(options.command(&[]));
        let address = url.strip_prefix("http://").unwrap().to_owned();
        (Self { child, address }, start.elapsed())
    }

    /// Returns the peak resident memory of the server in MiB; `None` on systems without `/proc`.
    fn peak_memory(&self) -> Option<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        let kilobytes: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kilobytes / 1_024.0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/qwen3")
}

/// Returns the time in seconds that an engine takes for `count` samples in one batch.
fn engine_seconds(count: u32) -> f64 {
    let engine = Engine::open(golden(), tinkex_engine::EngineOptions::default()).unwrap();
    let mut sampler = engine.sampler().unwrap();
    let base = engine.base_weights();
    let start = Instant::now();
    for i in 0..count {
        let mut request = SampleRequest::new(vec![i % 90 + 1], TOKENS as usize);
        request.seed = u64::from(i);
        sampler.add(&base, request).unwrap();
    }
    while !sampler.is_idle() {
        sampler.step();
    }
    start.elapsed().as_secs_f64()
}

/// Creates a session and returns its id.
async fn create_session(connection: &Connection) -> String {
    let request = json!({"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"});
    let created = connection.json("/create_session", &request).await;
    created["session_id"].as_str().unwrap().to_owned()
}

/// Creates a sampling session in a session of its own and returns its id.
async fn create_sampler(connection: &Connection) -> String {
    let session = create_session(connection).await;
    let request = json!({"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL});
    let created = connection.json("/create_sampling_session", &request).await;
    created["sampling_session_id"].as_str().unwrap().to_owned()
}

fn main() -> ExitCode {
    child_server::serve_if_child();
    run()
}

#[tokio::main]
async fn run() -> ExitCode {
    let data = tempfile::tempdir().unwrap();
    let (server, started) = Server::start(data.path(), &format!("{MODEL}={}", golden().display()));
    let has_option = |name: &str| std::env::args().any(|argument| argument == name);
    let measurements = if has_option("--streams") {
        streams::measure(&server.address).await
    } else {
        measure_all(&server, started).await
    };
    drop(server);
    if let Some(python) = std::env::args().skip_while(|argument| argument != "--llama").nth(1) {
        llama::compare(Path::new(&python)).await;
    }

    println!("\n| measurement | value | limit |\n|---|---|---|");
    let mut exceeded = false;
    for Measurement(name, value, max) in measurements {
        let within = value <= max;
        exceeded |= !within;
        println!("| {name} | {value:.2}{} | {max} |", if within { "" } else { " EXCEEDED" });
    }
    if exceeded { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Measures a server that took `started` to start: samples, streams and large bodies.
async fn measure_all(server: &Server, started: Duration) -> Vec<Measurement> {
    println!("started in {:.1} ms", 1e3 * started.as_secs_f64());
    let pool = Pool::new(&server.address, CONNECTIONS);
    pool.open().await;
    let (health_task, slowest) = watch_health(&server.address);
    let mut measurements =
        vec![Measurement("milliseconds to start", 1e3 * started.as_secs_f64(), 500.0)];

    let one = &pool.connections[0];
    let calls = 2_000;
    let start = Instant::now();
    for _ in 0..calls {
        one.call("GET", "/api/v1/healthz", b"").await;
    }
    let seconds_per_call = start.elapsed().as_secs_f64() / f64::from(calls);
    println!("empty request: {:.0} µs, sequential", 1e6 * seconds_per_call);

    let sampler = create_sampler(one).await;
    let (_, first) = run_samples(&pool, &sampler, 0, 1).await;
    let mut single = Vec::new();
    for n in 1..=100 {
        single.push(run_samples(&pool, &sampler, n, 1).await.1);
    }
    single.sort_by(f64::total_cmp);
    let engine = engine_seconds(1);
    println!(
        "one sample: {:.2} ms (the first, including loading: {:.2} ms); engine alone {:.2} ms",
        1e3 * single[50],
        1e3 * first,
        1e3 * engine
    );
    let overhead = 1e3 * (single[50] - engine);
    measurements.push(Measurement("milliseconds of overhead, one sample", overhead, 20.0));

    println!(
        "\n| outstanding | submitted /s | finished /s | each | engine alone | overhead each |"
    );
    println!("|---|---|---|---|---|---|");
    let mut throughputs = Vec::new();
    for count in [100_u32, 1_000, 10_000] {
        // The fastest of three rounds: seconds until all are acknowledged, and until all are
        // finished.
        let mut submitted = f64::INFINITY;
        let mut finished = f64::INFINITY;
        for _ in 0..3 {
            let sampler = create_sampler(one).await;
            let round = run_samples(&pool, &sampler, 0, count).await;
            if round.1 < finished {
                (submitted, finished) = round;
            }
        }
        let n = f64::from(count);
        let engine = engine_seconds(count);
        let throughput = Throughput {
            submissions_per_second: n / submitted,
            seconds_per_sample: finished / n,
            overhead_per_sample: (finished - engine).max(0.0) / n,
        };
        println!(
            "| {count} | {:.0} | {:.0} | {:.0} µs | {:.0} µs | {:.0} µs |",
            throughput.submissions_per_second,
            n / finished,
            1e6 * throughput.seconds_per_sample,
            1e6 * engine / n,
            1e6 * throughput.overhead_per_sample
        );
        throughputs.push(throughput);
    }
    let fewest = &throughputs[0];
    let most = &throughputs[2];
    let growth = most.seconds_per_sample / fewest.seconds_per_sample;
    let overhead = 1e6 * most.overhead_per_sample;
    let submission = 1e6 / most.submissions_per_second;
    measurements.push(Measurement("growth of the time per sample, 100 to 10,000", growth, 1.5));
    measurements.push(Measurement("µs of overhead per sample, 10,000 at once", overhead, 400.0));
    measurements.push(Measurement("µs per submission, 10,000 at once", submission, 400.0));
    measurements.extend(streams::measure(&server.address).await);
    let before = server.peak_memory();

    let (count, size) = BODIES;
    let session = create_session(one).await;
    let took = send_bodies(&pool, &session, MODEL, count, size).await;
    println!("\n{count} bodies of {size} bytes at once: {took:.2} s until all are acknowledged");
    health_task.abort();
    let slowest = slowest.lock().map(|slowest| *slowest).unwrap_or_default();
    println!("{CONNECTIONS} connections; slowest health check: {:.0} ms", 1e3 * slowest);
    let slowest = 1e3 * slowest;
    measurements.push(Measurement("milliseconds of the slowest health check", slowest, 1_000.0));
    if let (Some(before), Some(after)) = (before, server.peak_memory()) {
        println!("peak memory: {before:.0} MiB after the samples, {after:.0} MiB after the bodies");
        measurements.push(Measurement("MiB of peak memory, samples", before, 400.0));
        measurements.push(Measurement("MiB of peak memory, bodies", after, 1_400.0));
    }
    measurements
}
