//! Streamed completions: time to the first token, and cost per token with many streams.
//!
//! The model is the built-in one. A step of the model of the other measurements takes less time
//! than sending its tokens, so that events would contain more tokens the fewer streams there are.

use std::time::Instant;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tinkex_engine::sample::SampleRequest;
use tinkex_engine::{Engine, EngineOptions};
use tinkex_server::BUILT_IN;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use crate::Measurement;

/// Number of tokens of each stream.
const STREAM_TOKENS: u32 = 64;
/// Numbers of concurrent streams.
const STREAMS: [u32; 3] = [16, 64, 256];
/// Number of rounds with the same number of streams.
const ROUNDS: u32 = 9;

/// Times of one streamed response, in seconds from the start of the request.
pub(crate) struct StreamTimes {
    pub(crate) first_event: f64,
    pub(crate) end: f64,
    /// Number of events with choices.
    pub(crate) events: u32,
}

/// Sends a request on a new connection and reads its events. Panics if the stream fails.
pub(crate) async fn stream(address: &str, request: &Value) -> StreamTimes {
    let socket = TcpStream::connect(address).await.unwrap();
    socket.set_nodelay(true).unwrap();
    let mut socket = BufReader::new(socket);
    let body = request.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    let start = Instant::now();
    socket.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await.unwrap();
    let mut line = String::new();
    socket.read_line(&mut line).await.unwrap();
    assert!(line.contains(" 200 "), "{line}");
    while !line.trim().is_empty() {
        line.clear();
        socket.read_line(&mut line).await.unwrap();
    }
    let mut first_event = 0.0;
    let mut body = Vec::with_capacity(1 << 16);
    // The chunks of an HTTP body end with an empty one.
    while !body.ends_with(b"0\r\n\r\n") {
        assert!(socket.read_buf(&mut body).await.unwrap() > 0, "the stream was interrupted");
        if first_event == 0.0 && count_events(&body) > 0 {
            first_event = start.elapsed().as_secs_f64();
        }
    }
    let end = start.elapsed().as_secs_f64();
    StreamTimes { first_event, end, events: count_events(&body) }
}

/// Counts the events with choices. Every event is in one chunk.
fn count_events(body: &[u8]) -> u32 {
    let choices = body.windows(9).filter(|part| part == b"\"choices\"");
    u32::try_from(choices.count()).unwrap()
}

/// Sends requests at once, each from a task of its own.
pub(crate) async fn stream_all(address: &str, requests: Vec<Value>) -> Vec<StreamTimes> {
    let tasks = requests.into_iter().map(|request| {
        let address = address.to_owned();
        #[expect(clippy::disallowed_methods, reason = "joined below")]
        tokio::spawn(async move { stream(&address, &request).await })
    });
    join_all(tasks.collect::<Vec<_>>()).await.into_iter().map(Result::unwrap).collect()
}

/// Returns a request for `tokens` tokens; `n` varies prompt and seed.
fn request(n: u32, tokens: u32) -> Value {
    json!({
        "model": BUILT_IN, "prompt": [n % 90 + 1, 5, 7], "max_tokens": tokens, "seed": n,
        "ignore_eos": true, "stream": true, "return_token_ids": true,
    })
}

/// Returns the time in seconds that the engine takes for the tokens of `count` streams.
fn engine_seconds(engine: &Engine, count: u32) -> f64 {
    let mut sampler = engine.sampler().unwrap();
    let start = Instant::now();
    for n in 0..count {
        let mut request = SampleRequest::new(vec![n % 90 + 1, 5, 7], STREAM_TOKENS as usize);
        request.seed = n.into();
        sampler.add(&engine.base_weights(), request).unwrap();
    }
    while !sampler.is_idle() {
        sampler.step();
    }
    start.elapsed().as_secs_f64()
}

/// Returns the median time in seconds that the engine takes for the first token.
fn engine_first_token(engine: &Engine) -> f64 {
    let mut sampler = engine.sampler().unwrap();
    let mut times: Vec<f64> = (0..101)
        .map(|n| {
            let start = Instant::now();
            let request = SampleRequest::new(vec![n % 90 + 1, 5, 7], 1);
            sampler.add(&engine.base_weights(), request).unwrap();
            sampler.step();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[50]
}

/// One round of concurrent streams.
struct Round {
    /// Seconds until all streams have ended.
    seconds: f64,
    /// Seconds that the engine alone takes.
    engine: f64,
    /// Seconds to the first token of the stream that waited longest.
    slowest_first: f64,
    /// Number of events of all streams.
    events: f64,
}

impl Round {
    /// Returns a round that every other one is faster than.
    fn slowest() -> Self {
        let never = f64::INFINITY;
        Self { seconds: never, engine: never, slowest_first: never, events: 0.0 }
    }

    /// Runs `count` streams at once, and their requests on an engine.
    async fn run(address: &str, engine: &Engine, count: u32) -> Self {
        let requests = (0..count).map(|n| request(n, STREAM_TOKENS)).collect();
        let start = Instant::now();
        let times = stream_all(address, requests).await;
        let seconds = start.elapsed().as_secs_f64();
        // A slow reader receives several tokens in one event.
        assert!(times.iter().all(|times| (1..=STREAM_TOKENS).contains(&times.events)));
        Self {
            seconds,
            engine: engine_seconds(engine, count),
            slowest_first: times.iter().map(|times| times.first_event).fold(0.0, f64::max),
            events: times.iter().map(|times| f64::from(times.events)).sum(),
        }
    }
}

/// Measures streams and returns the measurements with a limit.
pub(crate) async fn measure(address: &str) -> Vec<Measurement> {
    // The first request loads the weights.
    stream(address, &request(0, 1)).await;
    let mut first = Vec::new();
    for n in 0..101 {
        first.push(stream(address, &request(n, STREAM_TOKENS)).await.first_event);
    }
    first.sort_by(f64::total_cmp);
    let engine = Engine::builtin(EngineOptions::default()).unwrap();
    let alone = engine_first_token(&engine);
    println!(
        "\nfirst streamed token: {:.2} ms, with the connection; engine alone {:.2} ms",
        1e3 * first[50],
        1e3 * alone
    );
    println!(
        "\n| streams | tokens /s | µs per token | engine alone | events per token | slowest first \
         token |"
    );
    println!("|---|---|---|---|---|---|");
    // The fastest of several rounds: other programs disturb single ones. The rounds alternate
    // between the numbers of streams, so that a slow period disturbs all of them.
    let mut fastest = STREAMS.map(|_| Round::slowest());
    for _ in 0..ROUNDS {
        for (count, fastest) in STREAMS.into_iter().zip(&mut fastest) {
            let round = Round::run(address, &engine, count).await;
            fastest.engine = fastest.engine.min(round.engine);
            if round.seconds < fastest.seconds {
                *fastest = Round { engine: fastest.engine, ..round };
            }
        }
    }
    for (count, round) in STREAMS.into_iter().zip(&fastest) {
        let tokens = f64::from(count * STREAM_TOKENS);
        println!(
            "| {count} | {:.0} | {:.1} | {:.1} | {:.2} | {:.1} ms |",
            tokens / round.seconds,
            1e6 * round.seconds / tokens,
            1e6 * round.engine / tokens,
            round.events / tokens,
            1e3 * round.slowest_first
        );
    }
    let cost = |at: usize| fastest[at].seconds / f64::from(STREAMS[at]);
    let growth = cost(2) / cost(0);
    let overhead = 1e3 * (first[50] - alone);
    vec![
        Measurement("milliseconds of overhead, first streamed token", overhead, 5.0),
        Measurement("growth of the time per token, 16 to 256 streams", growth, 1.3),
    ]
}
