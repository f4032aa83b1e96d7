//! Fuzzing of all decoders with mutated fixtures and random bytes.
//!
//! A decoder may reject its input, but it must not panic, its memory use must be proportional to
//! the input, and accepted values must survive encoding and decoding. The tests include a short
//! run; `cargo xtask fuzz` runs the same code for a given time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fastrand::Rng;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tinkex_wire::rest::*;
use tinkex_wire::*;

use crate::fixtures::{self, Recorded};

/// Memory limit of a decoder, in bytes per byte of input.
const BYTES_PER_INPUT_BYTE: u64 = 96;
/// Memory in bytes that a decoder may use in addition, whatever the size of the input.
const CONSTANT_BYTES: u64 = 64 * 1024;
/// Limit of decompression, in bytes.
const MAX_DECOMPRESSED: usize = 1 << 16;

/// A decoder under test. Returns an error if it violates a rule.
type Target = fn(&Bytes) -> Result<(), String>;

fn json<T: DeserializeOwned + Serialize>(bytes: &Bytes) -> Result<(), String> {
    let Ok(value) = codec::json::decode::<T>(bytes) else {
        return Ok(());
    };
    let encoded = codec::json::encode(&value)
        .map_err(|error| format!("the decoded value cannot be encoded: {error}"))?;
    let again = codec::json::decode::<T>(&encoded)
        .map_err(|error| format!("the encoded value cannot be decoded: {error}"))?;
    same(&encoded, &codec::json::encode(&again).map_err(|error| error.to_string())?)
}

fn same<T: PartialEq + std::fmt::Debug>(one: &T, other: &T) -> Result<(), String> {
    if one == other { Ok(()) } else { Err(format!("{one:?} became {other:?}")) }
}

fn request_proto(bytes: &Bytes) -> Result<(), String> {
    let Ok(request) = ForwardBackward::from_proto(bytes) else {
        return Ok(());
    };
    let encoded = request
        .to_proto()
        .map_err(|error| format!("the decoded request cannot be encoded: {error}"))?;
    let again = ForwardBackward::from_proto(&encoded).map_err(|error| error.to_string())?;
    // Compare bytes: a setting may be NaN, which is not equal to itself.
    same(&again.to_proto().map_err(|error| error.to_string())?, &encoded)
}

fn output_proto(bytes: &Bytes) -> Result<(), String> {
    let Ok(output) = ForwardBackwardOutput::from_proto(bytes) else {
        return Ok(());
    };
    let encoded = output.to_proto();
    let again = ForwardBackwardOutput::from_proto(&encoded).map_err(|error| error.to_string())?;
    same(&again.to_proto(), &encoded)?;
    for datum in again.loss_fn_outputs.iter().take(100) {
        for name in datum.names() {
            datum.tensor(name).ok_or("the tensor of a listed name is missing")?;
        }
    }
    Ok(())
}

fn sample_proto(bytes: &Bytes) -> Result<(), String> {
    let Ok(response) = SampleResponse::from_proto(bytes) else {
        return Ok(());
    };
    let again =
        SampleResponse::from_proto(&response.to_proto()).map_err(|error| error.to_string())?;
    same(&again, &response)?;
    for topk in response.sequences.iter().filter_map(|s| s.topk_logprobs.as_ref()) {
        topk.rows().take(100).for_each(|row| drop(row.map(Iterator::collect::<Vec<_>>)));
    }
    Ok(())
}

fn zstd(bytes: &Bytes) -> Result<(), String> {
    match codec::compress::decompress(bytes, MAX_DECOMPRESSED) {
        Ok(body) if body.len() > MAX_DECOMPRESSED => {
            Err("the decompressed body exceeds the limit".to_owned())
        }
        _ => Ok(()),
    }
}

fn poll_response(bytes: &Bytes) -> Result<(), String> {
    let _ = PollResponse::decode_timeout(bytes);
    let _ = ErrorBody::message(bytes);
    let Ok(response) = PollResponse::decode("application/json", bytes) else {
        return Ok(());
    };
    let (content_type, body) = response.encode(&"r".into());
    match (&response, PollResponse::decode(content_type, &body)) {
        // A missing queue state is encoded as active, and the content of a wrapper may be any JSON,
        // including another wrapper.
        (PollResponse::TryAgain(_), Ok(PollResponse::TryAgain(_)))
        | (PollResponse::Ready(_), Ok(_)) => Ok(()),
        (_, again) => same(&again, &Ok(response)),
    }
}

fn text(bytes: &Bytes) -> Result<(), String> {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(path) = text.parse::<TinkerPath>() {
        same(&path.to_string().parse(), &Ok(path))?;
    }
    if let Ok(time) = text.parse::<Timestamp>() {
        same(&time.to_string().parse(), &Ok(time))?;
    }
    if let Ok(handle) = SamplerHandle::from_text(&text) {
        same(&SamplerHandle::from_text(&handle.to_text()), &Ok(handle))?;
    }
    for method in ["GET", "POST", "PUT", "DELETE"] {
        if let Some(found) = Route::find(method, &text) {
            let params: Vec<&str> = found.params.iter().map(String::as_str).collect();
            let path = found.route.path(&params);
            let Ok(path) = path else { continue };
            same(&Route::find(method, &path), &Some(found))?;
        }
    }
    let dmel = InputChunk::Dmel { dmel: bytes.clone() };
    let _ = dmel.token_count();
    Ok(())
}

/// Decodes queries, as a server does.
fn queries(bytes: &Bytes) -> Result<(), String> {
    fn one<T: DeserializeOwned + Serialize>(text: &str) -> Result<(), String> {
        let Ok(query) = codec::query::decode::<T>(text) else { return Ok(()) };
        let encoded = codec::query::encode(&query).map_err(|error| error.to_string())?;
        let again = codec::query::decode::<T>(&encoded).map_err(|error| error.to_string())?;
        same(&codec::query::encode(&again).map_err(|error| error.to_string())?, &encoded)
    }

    let text = String::from_utf8_lossy(bytes);
    let text = text.split_once('?').map_or(&*text, |(_, query)| query);
    one::<ListTrainingRuns>(text)?;
    one::<ListUserCheckpoints>(text)?;
    one::<ListSessions>(text)?;
    one::<ScopeQuery>(text)?;
    one::<BillingUsageRequest>(text)?;
    one::<StorageUsageRequest>(text)?;
    one::<AuditLogRequest>(text)
}

/// Decodes responses and results, as a client does.
fn responses(bytes: &Bytes) -> Result<(), String> {
    for payload in [ResultPayload::Json(bytes.clone()), ResultPayload::Proto(bytes.clone())] {
        let _ = CreateModel::decode_output(&payload);
        let _ = ForwardBackward::decode_output(&payload);
        let _ = LoadWeights::decode_output(&payload);
        let _ = SampleRequest::decode_output(&payload);
    }
    let _ = SessionCreated::from_body(bytes);
    let _ = ModelInfo::from_body(bytes);
    Ok(())
}

macro_rules! targets {
    ($($type:ty),* $(,)?) => {
        &[
            ("request_proto", request_proto as Target),
            ("output_proto", output_proto),
            ("sample_proto", sample_proto),
            ("zstd", zstd),
            ("poll_response", poll_response),
            ("text", text),
            ("queries", queries),
            ("responses", responses),
            $((stringify!($type), json::<$type>),)*
        ]
    };
}

const TARGETS: &[(&str, Target)] = targets![
    ApiKeyInfo,
    AuditLog,
    AuthToken,
    AuthTokenRequest,
    BillingUsage,
    CancelFuture,
    CheckpointTtl,
    CheckpointPage,
    ClientConfig,
    ClientConfigRequest,
    CopyWeights,
    CreateCustomLoss,
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    CustomLossCreated,
    DimuonParams,
    DynamicConfig,
    DynamicConfigRequest,
    ErrorBody,
    ExternalWeightsSaved,
    ExternalWeightsUrls,
    FinishDetails,
    ForwardBackwardOutput,
    FuturesRetrieved,
    GetInfo,
    Health,
    HeartbeatAcknowledged,
    JoinSamplingSession,
    LoadWeights,
    ModelCreated,
    ModelInfo,
    OptimStep,
    OptimStepOutput,
    OptimizerConfig,
    RetrieveFuture,
    RetrieveFutures,
    SampleRequest,
    SampleResponse,
    SamplerInfo,
    SamplerWeightsSaved,
    SamplingSessionCreated,
    SamplingSessionJoined,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    SearchSessions,
    ServerCapabilities,
    SessionCreated,
    SessionHeartbeat,
    SessionInfo,
    SessionProject,
    SessionPage,
    SessionSearchPage,
    StorageUsage,
    TelemetryBatch,
    TelemetryResponse,
    TensorData,
    SubmitResponse,
    TraceExport,
    TrainingRun,
    TrainingRunPage,
    WeightsCopied,
    WeightsInfo,
    WeightsInfoRequest,
    WeightsLoaded,
    WeightsSaved,
];

/// Returns all recorded bodies and paths as seeds.
fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = vec![
        b"2026-01-02T03:04:05.678901+02:00".to_vec(),
        b"tinker://s:train:0/weights/a".to_vec(),
        br#"{"data":[1,2],"dtype":"int64","shape":[1,2]}"#.to_vec(),
        br#"{"status":"completed","result":{"path":"p"}}"#.to_vec(),
    ];
    for file in fixtures::files("wire") {
        let recorded = Recorded(fixtures::load("wire", &file));
        if let Some(path) = recorded.0["path"].as_str() {
            seeds.push(path.as_bytes().to_vec());
        }
        if file.ends_with(".decoded.json") {
            continue;
        }
        seeds.push(recorded.body().to_vec());
        seeds.push(recorded.plain_body().to_vec());
    }
    let handle = fixtures::load("behaviour", "sampler_handle.json");
    seeds.push(handle["handle"].as_str().unwrap().as_bytes().to_vec());
    seeds.sort();
    seeds.dedup();
    seeds
}

/// Returns a mutated seed or random bytes.
fn mutate(rng: &mut Rng, seeds: &[Vec<u8>]) -> Vec<u8> {
    if rng.u8(..) < 8 {
        let len = rng.usize(..64);
        return std::iter::repeat_with(|| rng.u8(..)).take(len).collect();
    }
    let mut bytes = rng.choice(seeds).unwrap().clone();
    for _ in 0..rng.usize(1..5) {
        let at = rng.usize(..=bytes.len());
        match rng.u8(..10) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, rng.u8(..)),
            2 if at < bytes.len() => drop(bytes.remove(at)),
            3 if at < bytes.len() => bytes[at] ^= 1 << rng.u8(..8),
            4 if at < bytes.len() => bytes[at] = rng.u8(..),
            // Insert boundary values.
            5 if at < bytes.len() => bytes[at] = *rng.choice(&[0, 1, 0x7F, 0x80, 0xFF]).unwrap(),
            6 => {
                let edge: &[u8] = rng
                    .choice(&[
                        &b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"[..],
                        b"\xff\xff\xff\xff\x07",
                        b"\x80\x80\x80\x80\x80\x80\x80\x80\x40",
                        b"-1",
                        b"1e999",
                        b"null",
                        b"99999999999999999999",
                        b"[[[[",
                        b"{}",
                        b"\"\\ud800\"",
                    ])
                    .unwrap();
                bytes.splice(at..at, edge.iter().copied());
            }
            // Insert a copy of a part of the input.
            7 => {
                let (a, b) = (rng.usize(..=bytes.len()), rng.usize(..=bytes.len()));
                let piece = bytes[a.min(b)..a.max(b)].to_vec();
                bytes.splice(at..at, piece);
            }
            // Replace the end by a part of another seed.
            8 => {
                let other = rng.choice(seeds).unwrap();
                let (a, b) = (rng.usize(..=other.len()), rng.usize(..=other.len()));
                bytes.splice(at.., other[a.min(b)..a.max(b)].iter().copied());
            }
            _ => {
                let cut = rng.usize(..=bytes.len());
                bytes.drain(at.min(cut)..at.max(cut));
            }
        }
        bytes.truncate(1 << 14);
    }
    bytes
}

/// Runs one decoder on one input. Returns an error that names the violated rule.
fn attempt(target: Target, input: &Bytes) -> Result<(), String> {
    let mut verdict = Ok(());
    let used = allocation_counter::measure(|| {
        verdict = catch_unwind(AssertUnwindSafe(|| target(input)))
            .unwrap_or_else(|_| Err("the decoder panicked".to_owned()));
    });
    verdict?;
    let allowed =
        CONSTANT_BYTES + BYTES_PER_INPUT_BYTE * input.len() as u64 + 2 * MAX_DECOMPRESSED as u64;
    if used.bytes_max > allowed {
        return Err(format!(
            "the decoder used {} bytes of memory for {} bytes of input",
            used.bytes_max,
            input.len()
        ));
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Runs all selected decoders on generated inputs until `done` returns `true`. Every decoder gets
/// every input: a protobuf message is also malformed JSON.
fn run(seed: u64, only: Option<&str>, mut done: impl FnMut(u64) -> bool) -> u64 {
    let seeds = seeds();
    let selected: Vec<_> =
        TARGETS.iter().filter(|(name, _)| only.is_none_or(|only| only == *name)).collect();
    let names: Vec<_> = TARGETS.iter().map(|(name, _)| *name).collect();
    assert!(!selected.is_empty(), "unknown target; expected one of: {}", names.join(", "));
    let mut inputs = 0;
    // Run the unmodified seeds first.
    for bytes in &seeds {
        try_all(&selected, &Bytes::from(bytes.clone()), seed);
    }
    let mut rng = Rng::with_seed(seed);
    while !done(inputs) {
        try_all(&selected, &mutate(&mut rng, &seeds).into(), seed);
        inputs += 1;
    }
    inputs
}

fn try_all(targets: &[&(&str, Target)], input: &Bytes, seed: u64) {
    for (name, target) in targets {
        if let Err(error) = attempt(*target, input) {
            panic!("{name}: {error}\n  seed {seed}\n  input (hex) {}", hex(input));
        }
    }
}

#[test]
fn a_short_run_finds_nothing() {
    run(0x7469_6e6b, None, |inputs| inputs == 3000);
}

/// Long run of `cargo xtask fuzz`, which sets the environment variables.
#[test]
#[ignore = "long; run by cargo xtask fuzz"]
fn a_long_run_finds_nothing() {
    #[expect(
        clippy::disallowed_methods,
        reason = "`cargo xtask fuzz` passes its options in variables"
    )]
    let variable = |name: &str| std::env::var(name).ok();
    let number = |name: &str| variable(name).map(|text| text.parse::<u64>().unwrap());
    let seconds = number("TINKEX_FUZZ_SECONDS").unwrap_or(10);
    let seed = number("TINKEX_FUZZ_SEED").unwrap_or_else(|| Rng::new().u64(..));
    let only = variable("TINKEX_FUZZ_TARGET");
    println!("fuzzing for {seconds} s with seed {seed}");
    let end = Instant::now() + Duration::from_secs(seconds);
    let inputs = run(seed, only.as_deref(), |_| Instant::now() >= end);
    println!("no decoder failed on {inputs} inputs");
}
