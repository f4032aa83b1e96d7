//! One piece of work, measured: `engine FOLDER PRECISION WORK [ROUNDS]`.
//!
//! `cargo xtask bench engine` runs this and its peer (`peer.py`) in turns and prints the ratios.
//! Work is `train` (4 × 256 tokens), `ragged` (32 answers to 4 prompts), `decode1` and `decode8`
//! (a prompt of 64 tokens, then 128 more), `adapters1` and `adapters8` (32 continuations with one
//! adapter and with eight), `load`. Prints the best round: seconds on the clock, seconds of CPU,
//! and the peak of memory.

#![expect(clippy::print_stdout, reason = "a measurement is printed")]

use std::time::Instant;

use tinkex_engine::loss::{Inputs, Loss};
use tinkex_engine::optim::{AdamParams, OptimizerKind, StepParams};
use tinkex_engine::sample::{SampleRequest, Weights};
use tinkex_engine::train::{Datum, Objective};
use tinkex_engine::{Engine, LoraConfig, Options, Precision, Sampler, Trainer};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let [folder, precision, work, rest @ ..] = &arguments[..] else {
        println!("usage: engine FOLDER f32|bf16 WORK [ROUNDS]; see cargo xtask bench engine");
        return Ok(());
    };
    let rounds: usize = rest.first().map_or(Ok(3), |rounds| rounds.parse())?;
    let precision = if precision == "bf16" { Precision::Bf16 } else { Precision::F32 };
    let options = Options { precision, ..Options::default() };
    let begun = Instant::now();
    let engine = Engine::open(folder, options)?;
    let loaded = begun.elapsed().as_secs_f64();
    let mut best = (f64::INFINITY, f64::INFINITY);
    let mut bench = Bench::new(&engine, work)?;
    if work == "load" {
        bench.round()?;
        best = (loaded, cpu()?);
    } else {
        for _ in 0..rounds {
            let (begun, cpu_before) = (Instant::now(), cpu()?);
            bench.round()?;
            best.0 = best.0.min(begun.elapsed().as_secs_f64());
            best.1 = best.1.min(cpu()? - cpu_before);
        }
    }
    println!("RESULT wall={:.4} cpu={:.4} peak={:.1}", best.0, best.1, peak()?);
    Ok(())
}

enum Bench {
    Train(Box<Trainer>, Vec<Vec<u32>>),
    Decode {
        sampler: Box<Sampler>,
        weights: Vec<Weights>,
        batch: usize,
        tokens: usize,
        vocab: u32,
        turn: u32,
    },
}

impl Bench {
    fn new(engine: &Engine, work: &str) -> Outcome<Self> {
        let vocab = u32::try_from(engine.config().vocab_size)?;
        let adapter =
            |seed| engine.create(LoraConfig { seed, ..LoraConfig::default() }, OptimizerKind::Adam);
        let decode = |batch: usize, adapters: u64, tokens: usize| -> Outcome<Self> {
            let mut weights = Vec::new();
            for seed in 0..adapters {
                weights.push(engine.snapshot(&adapter(seed)?));
            }
            let sampler = Box::new(engine.sampler()?);
            Ok(Self::Decode { sampler, weights, batch, tokens, vocab, turn: 0 })
        };
        match work {
            "train" => Ok(Self::Train(Box::new(adapter(0)?), uniform(vocab))),
            "ragged" => Ok(Self::Train(Box::new(adapter(0)?), ragged(vocab))),
            "decode1" => decode(1, 1, 128),
            "decode8" => decode(8, 1, 128),
            "adapters1" => decode(32, 1, 32),
            "adapters8" => decode(32, 8, 32),
            "load" => decode(1, 1, 1),
            other => Err(format!("no such work: {other}").into()),
        }
    }

    fn round(&mut self) -> Outcome<()> {
        match self {
            Self::Train(trainer, rows) => {
                let weights = vec![0.001; rows.iter().map(Vec::len).max().unwrap_or(0)];
                let data: Vec<Datum<'_>> = rows
                    .iter()
                    .map(|row| Datum {
                        tokens: &row[..row.len() - 1],
                        targets: &row[1..],
                        inputs: Inputs {
                            weights: Some(&weights[..row.len() - 1]),
                            ..Inputs::default()
                        },
                        ..Datum::default()
                    })
                    .collect();
                trainer.forward_backward(&Objective::Loss(Loss::CrossEntropy), &data)?;
                trainer.optim_step(&StepParams::Adam(AdamParams::default()))?;
            }
            Self::Decode { sampler, weights, batch, tokens, vocab, turn } => {
                *turn += 1;
                for i in 0..*batch {
                    // Other prompts every time: nothing comes from the cache.
                    let mut request = SampleRequest::new(
                        prompt(64, *turn * 1000 + u32::try_from(i)?, *vocab),
                        *tokens,
                    );
                    request.draw.temperature = 0.0;
                    sampler.add(&weights[i % weights.len()], request)?;
                }
                while !sampler.is_idle() {
                    for (_, answer) in sampler.step() {
                        answer?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn prompt(len: usize, salt: u32, vocab: u32) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(u64::from(salt));
    (0..len).map(|_| random.u32(..vocab)).collect()
}

fn uniform(vocab: u32) -> Vec<Vec<u32>> {
    (0..4).map(|i| prompt(257, i, vocab)).collect()
}

/// Eight answers to each of four prompts: lengths as in `peer.py`.
fn ragged(vocab: u32) -> Vec<Vec<u32>> {
    let mut rows = Vec::new();
    for group in 0..4_u32 {
        let shared = prompt([128, 256, 384, 512][group as usize], 100 + group, vocab);
        for answer in 0..8_u32 {
            let len = 16 + (answer * 34 + group * 7) as usize % 241;
            let mut row = shared.clone();
            row.extend(prompt(len, 1000 + group * 8 + answer, vocab));
            rows.push(row);
        }
    }
    rows
}

/// Seconds of CPU that all threads have used.
fn cpu() -> Outcome<f64> {
    let text = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    Ok(ticks / 100.0)
}

/// The most memory that the process had, in MiB.
fn peak() -> Outcome<f64> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find(|line| line.starts_with("VmHWM")).ok_or("no VmHWM")?;
    let kib: f64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kib / 1024.0)
}
