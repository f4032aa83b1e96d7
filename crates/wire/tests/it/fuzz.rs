//! Fuzzing of all decoders with mutated fixtures and random bytes.
//!
//! A decoder may reject its input, but it must not panic, its memory use must be proportional to
//! the input, and accepted values must survive encoding and decoding. The tests include a short
//! run; `cargo xtask fuzz` runs the same code for a given time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fastrand::Rng;

use crate::fixtures::{self, Recorded};
use crate::fuzz_targets::{MAX_DECOMPRESSED, TARGETS, Target};

/// Memory limit of a decoder, in bytes per byte of input.
const BYTES_PER_INPUT_BYTE: u64 = 96;
/// Memory in bytes that a decoder may use in addition, whatever the size of the input.
const CONSTANT_BYTES: u64 = 64 * 1024;

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
                let a = rng.usize(..=bytes.len());
                let b = rng.usize(..=bytes.len());
                let piece = bytes[a.min(b)..a.max(b)].to_vec();
                bytes.splice(at..at, piece);
            }
            // Replace the end by a part of another seed.
            8 => {
                let other = rng.choice(seeds).unwrap();
                let a = rng.usize(..=other.len());
                let b = rng.usize(..=other.len());
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
