//! One piece of work, measured: `engine FOLDER PRECISION WORK [ROUNDS]`.
//!
//! `cargo xtask bench engine` runs this and its peer (`peer.py`) in turns and prints the ratios.
//! Work is `train` (4 × 256 tokens), `ragged` (32 answers to 4 prompts), `decodeN` (N prompts of 64
//! tokens, then 128 more), `adaptersN` (32 continuations with N adapters among them), `liveN` (N
//! adapters, of which one writes at a time), `contextN` (a token after N others), `load`. Prints the
//! best round: seconds on the clock, seconds of CPU, and the peak of memory.

#![expect(clippy::print_stdout, reason = "a measurement is printed")]

use std::time::Instant;

use tinkex_engine::loss::{Loss, LossInputs};
use tinkex_engine::optim::{AdamParams, OptimizerKind, StepParams};
use tinkex_engine::sample::{SampleRequest, SamplingWeights};
use tinkex_engine::train::{Datum, TrainingObjective};
use tinkex_engine::{Engine, EngineOptions, LoraConfig, Precision, Sampler, Trainer};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let [folder, precision, work, rest @ ..] = &arguments[..] else {
        println!("usage: engine FOLDER f32|bf16 WORK [ROUNDS]; see cargo xtask bench engine");
        return Ok(());
    };
    let rounds: usize = rest.first().map_or(Ok(3), |rounds| rounds.parse())?;
    let precision = if precision == "bf16" { Precision::Bf16 } else { Precision::F32 };
    let options = EngineOptions { precision, ..EngineOptions::default() };
    let begun = Instant::now();
    let engine = Engine::open(folder, options)?;
    let loaded = begun.elapsed().as_secs_f64();
    let mut bench = Bench::new(&engine, work)?;
    if work == "load" {
        let begun = Instant::now();
        bench.round()?;
        let first = begun.elapsed().as_secs_f64();
        println!("RESULT wall={loaded:.4} cpu={:.4} peak={:.1} first={first:.4}", cpu()?, peak()?);
        return Ok(());
    }
    let mut best = (f64::INFINITY, f64::INFINITY);
    for _ in 0..rounds {
        let cpu_before = cpu()?;
        best.0 = best.0.min(bench.round()?);
        best.1 = best.1.min(cpu()? - cpu_before);
    }
    println!("RESULT wall={:.6} cpu={:.4} peak={:.1}", best.0, best.1, peak()?);
    Ok(())
}

enum Bench {
    Train(Box<Trainer>, Vec<Vec<u32>>),
    Decode(Box<Decode>),
    /// A token of every adapter's, one after the other.
    Live(Box<Decode>),
    /// Tokens after many others: what is before them does not count.
    Context(Box<Decode>),
}

struct Decode {
    sampler: Sampler,
    weights: Vec<SamplingWeights>,
    batch: usize,
    prompt: usize,
    tokens: usize,
    vocab: u32,
    turn: u32,
}

impl Bench {
    fn new(engine: &Engine, work: &str) -> Outcome<Self> {
        let vocab = u32::try_from(engine.config().vocab_size)?;
        let adapter = |seed| {
            engine.create_trainer(LoraConfig { seed, ..LoraConfig::default() }, OptimizerKind::Adam)
        };
        let decode = |batch, adapters: u64, prompt, tokens| -> Outcome<Box<Decode>> {
            let mut weights = Vec::new();
            for seed in 0..adapters {
                weights.push(engine.snapshot(&adapter(seed)?));
            }
            let sampler = engine.sampler()?;
            Ok(Box::new(Decode { sampler, weights, batch, prompt, tokens, vocab, turn: 0 }))
        };
        let (name, number) = work.split_at(work.find(char::is_numeric).unwrap_or(work.len()));
        let number = if number.is_empty() { 0 } else { number.parse::<usize>()? };
        Ok(match name {
            "train" => Self::Train(Box::new(adapter(0)?), uniform(vocab)),
            "ragged" => Self::Train(Box::new(adapter(0)?), ragged(vocab)),
            "decode" => Self::Decode(decode(number, 1, 64, 128)?),
            "adapters" => Self::Decode(decode(32, number as u64, 64, 32)?),
            "live" => Self::Live(decode(1, number as u64, 16, 16)?),
            "context" => Self::Context(decode(1, 1, number, 32)?),
            "load" => Self::Decode(decode(1, 1, 64, 1)?),
            other => return Err(format!("no such work: {other}").into()),
        })
    }

    /// Does the work once; returns the seconds that count.
    fn round(&mut self) -> Outcome<f64> {
        let begun = Instant::now();
        match self {
            Self::Train(trainer, rows) => train(trainer, rows)?,
            Self::Decode(decode) => {
                decode.ask()?;
                decode.finish()?;
            }
            Self::Live(decode) => {
                for _ in 0..64 {
                    decode.ask()?;
                    decode.finish()?;
                }
                return Ok(begun.elapsed().as_secs_f64() / 64.0);
            }
            Self::Context(decode) => {
                decode.ask()?;
                // Prompts are read in pieces; the last one gives the first token.
                for _ in 0..decode.prompt.div_ceil(512) {
                    decode.sampler.step();
                }
                let begun = Instant::now();
                let steps = decode.finish()?;
                return Ok(begun.elapsed().as_secs_f64() / f64::from(steps.max(1)));
            }
        }
        Ok(begun.elapsed().as_secs_f64())
    }
}

impl Decode {
    /// Adds requests with other prompts every time, so that nothing comes from the cache.
    fn ask(&mut self) -> Outcome<()> {
        for i in 0..self.batch {
            self.turn += 1;
            let prompt = prompt(self.prompt, 1000 + self.turn, self.vocab);
            let mut request = SampleRequest::new(prompt, self.tokens);
            request.decoding.temperature = 0.0;
            // Alone, it is another adapter's turn; together, they go round.
            let adapter = if self.batch == 1 { self.turn as usize } else { i };
            self.sampler.add(&self.weights[adapter % self.weights.len()], request)?;
        }
        Ok(())
    }

    /// Steps until all is written; says how often.
    fn finish(&mut self) -> Outcome<u32> {
        let mut steps = 0;
        while !self.sampler.is_idle() {
            steps += 1;
            for (_, answer) in self.sampler.step() {
                answer?;
            }
        }
        Ok(steps)
    }
}

fn train(trainer: &mut Trainer, rows: &[Vec<u32>]) -> Outcome<()> {
    let weights = vec![0.001; rows.iter().map(Vec::len).max().unwrap_or(0)];
    let data: Vec<Datum<'_>> = rows
        .iter()
        .map(|row| Datum {
            tokens: &row[..row.len() - 1],
            targets: &row[1..],
            inputs: LossInputs { weights: Some(&weights[1..row.len()]), ..LossInputs::default() },
            ..Datum::default()
        })
        .collect();
    trainer.forward_backward(&TrainingObjective::Loss(Loss::CrossEntropy), &data)?;
    trainer.optim_step(&StepParams::Adam(AdamParams::default()))?;
    Ok(())
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
