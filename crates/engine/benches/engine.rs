//! Measures one workload: `engine MODEL PRECISION WORKLOAD [ROUNDS]`.
//!
//! `cargo xtask bench engine` runs this program and its peer (`peer.py` or `peer_llama.py`)
//! alternately and prints the ratios. MODEL is a Hugging Face folder or a GGUF file. Workloads:
//! `train` (4 × 256 tokens), `ragged` (32 completions of 4 prompts), `decodeN` (N prompts of 64
//! tokens, 128 new tokens each), `adaptersN` (32 completions with N adapters), `liveN` (N adapters
//! that sample one after the other), `contextN` (tokens after a context of N tokens), `load`.
//! Prints the best round: wall-clock seconds, CPU seconds, and the peak memory in MiB.

#![expect(clippy::print_stdout, reason = "the benchmark prints its result")]

use std::path::Path;
use std::time::Instant;

use tinkex_engine::loss::{Loss, LossInputs};
use tinkex_engine::optim::{AdamParams, OptimizerKind, StepParams};
use tinkex_engine::sample::{ModelWeights, SampleRequest};
use tinkex_engine::train::{Datum, TrainingObjective};
use tinkex_engine::{Engine, EngineOptions, LoraConfig, Precision, Quantization, Sampler, Trainer};

type BenchResult<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> BenchResult<()> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let [model, precision, workload, rest @ ..] = &arguments[..] else {
        println!(
            "usage: engine MODEL f32|bf16|q8_0|q4_k WORKLOAD [ROUNDS]; see cargo xtask bench engine"
        );
        return Ok(());
    };
    let rounds: usize = rest.first().map_or(Ok(3), |rounds| rounds.parse())?;
    let quantization = match precision.as_str() {
        // The weights of a GGUF file keep their formats.
        _ if Path::new(model).extension().is_some_and(|extension| extension == "gguf") => None,
        "q8_0" => Some(Quantization::Q8),
        "q4_k" => Some(Quantization::Q4),
        _ => None,
    };
    let precision = if precision == "bf16" { Precision::Bf16 } else { Precision::F32 };
    let options = EngineOptions { precision, quantization, ..EngineOptions::default() };
    let start = Instant::now();
    let engine = Engine::open(model, options)?;
    let loaded = start.elapsed().as_secs_f64();
    let mut bench = Bench::new(&engine, workload)?;
    if workload == "load" {
        let start = Instant::now();
        bench.round()?;
        let first = start.elapsed().as_secs_f64();
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

/// A workload and its inputs.
enum Bench {
    Train(Box<Trainer>, Vec<Vec<u32>>),
    Decode(Box<Decode>),
    /// Samples with each adapter, one after the other.
    Live(Box<Decode>),
    /// Samples after a long prompt, whose computation is not measured.
    Context(Box<Decode>),
}

/// A sampler and the requests of one round.
struct Decode {
    sampler: Sampler,
    /// Adapters to sample with.
    weights: Vec<ModelWeights>,
    /// Number of requests per round.
    batch: usize,
    /// Length of a prompt in tokens.
    prompt: usize,
    /// Number of tokens to sample per request.
    tokens: usize,
    vocab: u32,
    /// Number of requests so far, from which prompts are generated.
    requests: u32,
}

impl Bench {
    fn new(engine: &Engine, workload: &str) -> BenchResult<Self> {
        let vocab = u32::try_from(engine.config().vocab_size)?;
        let adapter = |seed| {
            engine.create_trainer(LoraConfig { seed, ..LoraConfig::default() }, OptimizerKind::Adam)
        };
        let decode = |batch, adapters: u64, prompt, tokens| -> BenchResult<Box<Decode>> {
            let mut weights = Vec::new();
            for seed in 0..adapters {
                weights.push(engine.snapshot(&adapter(seed)?));
            }
            let sampler = engine.sampler()?;
            Ok(Box::new(Decode { sampler, weights, batch, prompt, tokens, vocab, requests: 0 }))
        };
        let (name, number) =
            workload.split_at(workload.find(char::is_numeric).unwrap_or(workload.len()));
        let number = if number.is_empty() { 0 } else { number.parse::<usize>()? };
        Ok(match name {
            "train" => Self::Train(Box::new(adapter(0)?), uniform(vocab)),
            "ragged" => Self::Train(Box::new(adapter(0)?), ragged(vocab)),
            "decode" => Self::Decode(decode(number, 1, 64, 128)?),
            "adapters" => Self::Decode(decode(32, number as u64, 64, 32)?),
            "live" => Self::Live(decode(1, number as u64, 16, 16)?),
            "context" => Self::Context(decode(1, 1, number, 32)?),
            "load" => Self::Decode(decode(1, 1, 64, 1)?),
            other => return Err(format!("unknown workload: {other}").into()),
        })
    }

    /// Runs the workload once. Returns the measured seconds.
    fn round(&mut self) -> BenchResult<f64> {
        let start = Instant::now();
        match self {
            Self::Train(trainer, rows) => train(trainer, rows)?,
            Self::Decode(decode) => {
                decode.add_requests()?;
                decode.finish()?;
            }
            Self::Live(decode) => {
                for _ in 0..64 {
                    decode.add_requests()?;
                    decode.finish()?;
                }
                return Ok(start.elapsed().as_secs_f64() / 64.0);
            }
            Self::Context(decode) => {
                decode.add_requests()?;
                // A prompt is computed in chunks; the last chunk yields the first token.
                for _ in 0..decode.prompt.div_ceil(512) {
                    decode.sampler.step();
                }
                let start = Instant::now();
                let steps = decode.finish()?;
                return Ok(start.elapsed().as_secs_f64() / f64::from(steps.max(1)));
            }
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

impl Decode {
    /// Adds requests with new prompts, so that no prefix is in the cache.
    fn add_requests(&mut self) -> BenchResult<()> {
        for i in 0..self.batch {
            self.requests += 1;
            let prompt = prompt(self.prompt, 1000 + self.requests, self.vocab);
            let mut request = SampleRequest::new(prompt, self.tokens);
            request.decoding.temperature = 0.0;
            // A single request uses the next adapter; a batch cycles through all adapters.
            let adapter = if self.batch == 1 { self.requests as usize } else { i };
            self.sampler.add(&self.weights[adapter % self.weights.len()], request)?;
        }
        Ok(())
    }

    /// Runs steps until all requests are finished. Returns the number of steps.
    fn finish(&mut self) -> BenchResult<u32> {
        let mut steps = 0;
        while !self.sampler.is_idle() {
            steps += 1;
            for (_, output) in self.sampler.step() {
                output?;
            }
        }
        Ok(steps)
    }
}

/// Takes one training step.
fn train(trainer: &mut Trainer, rows: &[Vec<u32>]) -> BenchResult<()> {
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

/// Returns `len` random tokens, determined by `seed`.
fn prompt(len: usize, seed: u32, vocab: u32) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(u64::from(seed));
    (0..len).map(|_| random.u32(..vocab)).collect()
}

/// Returns four sequences of 257 tokens.
fn uniform(vocab: u32) -> Vec<Vec<u32>> {
    (0..4).map(|i| prompt(257, i, vocab)).collect()
}

/// Returns eight completions of each of four prompts, with the lengths of `peer.py`.
fn ragged(vocab: u32) -> Vec<Vec<u32>> {
    let mut rows = Vec::new();
    for group in 0..4_u32 {
        let shared = prompt([128, 256, 384, 512][group as usize], 100 + group, vocab);
        for completion in 0..8_u32 {
            let len = 16 + (completion * 34 + group * 7) as usize % 241;
            let mut row = shared.clone();
            row.extend(prompt(len, 1000 + group * 8 + completion, vocab));
            rows.push(row);
        }
    }
    rows
}

/// Returns the CPU seconds of all threads of the process.
fn cpu() -> BenchResult<f64> {
    let text = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    // User and kernel time in clock ticks, of which Linux has 100 per second.
    let ticks: f64 = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    Ok(ticks / 100.0)
}

/// Returns the peak resident memory of the process in MiB.
fn peak() -> BenchResult<f64> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let line = text
        .lines()
        .find(|line| line.starts_with("VmHWM"))
        .ok_or("/proc/self/status has no VmHWM line")?;
    let kib: f64 = line.split_whitespace().nth(1).ok_or("VmHWM has no value")?.parse()?;
    Ok(kib / 1024.0)
}
