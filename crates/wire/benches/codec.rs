//! Benchmarks of the codecs, relative to copying the same bytes and to prost.
//!
//! Run with `cargo xtask bench wire`. Measurements of the implementations alternate, and the
//! minimum of many rounds counts, so that other load affects all of them equally.

#[path = "../tests/it/messages.rs"]
mod messages;

use std::fmt::Write as _;
use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fastrand::Rng;
use prost::Message as _;
use tinkex_wire::{
    ApiRequest, Datum, ForwardBackward, ForwardBackwardOutput, Logprobs, LossFn, LossRecord,
    SampleRequest, SampleResponse, SampledSequence, SamplingParams, Seq, StopReason, codec,
};

const ROUNDS: usize = 60;

fn main() -> ExitCode {
    let mut met = true;
    let request = request();
    let body = request.to_proto().expect("a valid request");
    let peer =
        messages::ForwardBackwardRequest::decode(body.clone()).expect("prost accepts the message");
    met &= compare(
        "encode ForwardBackwardRequest",
        &body,
        Some(2.0),
        vec![
            ("tinkex", Box::new(|| drop(black_box(request.to_proto())))),
            ("prost (from byte arrays)", Box::new(|| drop(black_box(peer.encode_to_vec())))),
        ],
    );
    met &= compare(
        "decode ForwardBackwardRequest",
        &body,
        None,
        vec![
            ("tinkex", Box::new(|| drop(black_box(ForwardBackward::from_proto(&body))))),
            (
                "prost (to byte arrays)",
                Box::new(|| {
                    drop(black_box(messages::ForwardBackwardRequest::decode(body.clone())));
                }),
            ),
        ],
    );

    let response = response();
    let body = response.to_proto();
    let peer = messages::SampleResponse::decode(body.clone()).expect("prost accepts the message");
    met &= compare(
        "decode SampleResponse",
        &body,
        Some(3.0),
        vec![
            ("tinkex", Box::new(|| drop(black_box(SampleResponse::from_proto(&body))))),
            (
                "prost (to byte arrays)",
                Box::new(|| drop(black_box(messages::SampleResponse::decode(body.clone())))),
            ),
            ("prost and typed vectors", Box::new(|| drop(black_box(typed_samples(&body))))),
        ],
    );
    met &= compare(
        "encode SampleResponse",
        &body,
        None,
        vec![
            ("tinkex", Box::new(|| drop(black_box(response.to_proto())))),
            ("prost (from byte arrays)", Box::new(|| drop(black_box(peer.encode_to_vec())))),
        ],
    );

    let output = output();
    let body = output.to_proto();
    let peer =
        messages::ForwardBackwardOutput::decode(body.clone()).expect("prost accepts the message");
    met &= compare(
        "decode ForwardBackwardOutput",
        &body,
        Some(3.0),
        vec![
            ("tinkex", Box::new(|| drop(black_box(ForwardBackwardOutput::from_proto(&body))))),
            (
                "prost (to byte arrays)",
                Box::new(|| {
                    drop(black_box(messages::ForwardBackwardOutput::decode(body.clone())));
                }),
            ),
            ("prost and typed vectors", Box::new(|| drop(black_box(typed_outputs(&body))))),
        ],
    );
    met &= compare(
        "encode ForwardBackwardOutput",
        &body,
        None,
        vec![
            ("tinkex", Box::new(|| drop(black_box(output.to_proto())))),
            ("prost (from byte arrays)", Box::new(|| drop(black_box(peer.encode_to_vec())))),
        ],
    );

    let prompt: Vec<u32> = tokens(&mut Rng::with_seed(4), 512);
    let sample = SampleRequest::new(prompt, SamplingParams::new().max_tokens(256));
    let body = sample.body().expect("a valid request").bytes();
    met &= compare(
        "encode SampleRequest, 512 tokens of JSON",
        &body,
        None,
        vec![("tinkex", Box::new(|| drop(black_box(sample.body()))))],
    );
    met &= compare(
        "decode SampleRequest, 512 tokens of JSON",
        &body,
        None,
        vec![("tinkex", Box::new(|| drop(black_box(codec::json::decode::<SampleRequest>(&body)))))],
    );
    if met { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn tokens(rng: &mut Rng, n: usize) -> Vec<u32> {
    std::iter::repeat_with(|| rng.u32(..150_000)).take(n).collect()
}

fn floats(rng: &mut Rng, n: usize) -> Vec<f32> {
    std::iter::repeat_with(|| -rng.f32()).take(n).collect()
}

/// Returns a request of about 4 MB: 200 rollouts of 1,024 tokens with targets, log-probabilities
/// and advantages.
fn request() -> ForwardBackward {
    let mut rng = Rng::with_seed(1);
    let datum = |_| {
        let prompt = tokens(&mut rng, 512);
        let completion = tokens(&mut rng, 513);
        let logprobs = floats(&mut rng, 513);
        Datum::rollout(prompt, completion, logprobs, 0.5).expect("lengths match")
    };
    ForwardBackward::new("s:train:0", (0..200).map(datum).collect(), LossFn::Ppo).seq_id(Seq::FIRST)
}

/// Returns a response of about 1 MB: 64 samples of 2,048 tokens with log-probabilities.
fn response() -> SampleResponse {
    let mut rng = Rng::with_seed(2);
    let sequence = |_| {
        SampledSequence::default()
            .stop_reason(StopReason::Length)
            .tokens(tokens(&mut rng, 2048))
            .logprobs(Some(Logprobs::from(floats(&mut rng, 2048))))
    };
    SampleResponse::default().sequences((0..64).map(sequence).collect())
}

/// Returns a result of about 4 MB: log-probabilities and losses of 512 datums of 1,024 tokens.
fn output() -> ForwardBackwardOutput {
    let mut rng = Rng::with_seed(3);
    let record = LossRecord::new(512)
        .field("logprobs", floats(&mut rng, 512 * 1024), [1024; 512])
        .and_then(|r| r.field("elementwise_loss", floats(&mut rng, 512 * 1024), [1024; 512]))
        .expect("lengths match");
    ForwardBackwardOutput::default()
        .loss_fn_outputs(record)
        .metrics([("loss:sum".to_owned(), 1.0)].into())
}

fn as_f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect()
}

fn as_i32s(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks().0.iter().map(|chunk| i32::from_le_bytes(*chunk)).collect()
}

fn typed_samples(body: &Bytes) -> Vec<(Vec<i32>, Vec<f32>)> {
    let message = messages::SampleResponse::decode(body.clone()).expect("a valid message");
    let typed = |sequence: messages::SampledSequence| {
        (as_i32s(&sequence.tokens), as_f32s(&sequence.logprobs.unwrap_or_default()))
    };
    message.sequences.into_iter().map(typed).collect()
}

fn typed_outputs(body: &Bytes) -> Vec<Vec<f32>> {
    let message = messages::ForwardBackwardOutput::decode(body.clone()).expect("a valid message");
    let fields = message.loss_fn_outputs.into_iter().flat_map(|record| record.fields.into_values());
    fields.map(|field| as_f32s(&field.data)).collect()
}

/// Name of an implementation, and a closure that runs it once.
type Implementation<'a> = (&'a str, Box<dyn FnMut() + 'a>);

/// Prints the time of each implementation relative to copying `body` into a new buffer. Returns
/// whether this crate's implementation, if it has a `limit`, is at most that many times slower than
/// the copy.
fn compare(
    title: &str,
    body: &Bytes,
    limit: Option<f64>,
    implementations: Vec<Implementation<'_>>,
) -> bool {
    let mut all: Vec<Implementation<'_>> =
        vec![("memcpy", Box::new(|| drop(black_box(body.to_vec()))))];
    all.extend(implementations);

    let mut best = vec![Duration::MAX; all.len()];
    // Repeat small bodies, so that a measurement is long compared with the clock resolution.
    let repeat = (2_000_000 / body.len().max(1)).clamp(1, 2000);
    for _ in 0..ROUNDS {
        for ((_, run), best) in all.iter_mut().zip(&mut best) {
            let start = Instant::now();
            for _ in 0..repeat {
                run();
            }
            let per_run = start.elapsed() / u32::try_from(repeat).expect("at most 2000");
            *best = (*best).min(per_run);
        }
    }

    let mut table = String::new();
    let mut met = true;
    for ((name, run), time) in all.iter_mut().zip(&best) {
        let allocations = allocation_counter::measure(run);
        let ratio = time.as_secs_f64() / best[0].as_secs_f64();
        let rate = body.len() as f64 / time.as_secs_f64() / 1e9;
        let verdict = match limit {
            Some(limit) if *name == "tinkex" => {
                met = ratio <= limit;
                format!("  limit {limit:.0}x: {}", if met { "met" } else { "MISSED" })
            }
            _ => String::new(),
        };
        let micros = time.as_secs_f64() * 1e6;
        let count = allocations.count_total;
        let bytes = allocations.bytes_total;
        let _ = writeln!(
            table,
            "  {name:<26} {micros:>9.1} us  {ratio:>6.2}x  {rate:>6.2} GB/s  \
             {count:>5} allocations of {bytes:>9} bytes{verdict}"
        );
    }
    #[expect(clippy::print_stdout, reason = "the benchmark prints its result")]
    {
        println!("{title}: {} bytes\n{table}", body.len());
    }
    met
}
