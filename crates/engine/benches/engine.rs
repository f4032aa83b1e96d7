//! Measures one workload: `engine MODEL PRECISION WORKLOAD [ROUNDS]`.
//!
//! `cargo xtask bench engine` runs this program and its peer (`peer.py` or `peer_llama.py`)
//! alternately and prints the ratios. MODEL is a Hugging Face folder or a GGUF file. Workloads:
//!
//! - `train`: a training step on 4 × 256 tokens
//! - `ragged`: a training step on 32 completions of 4 prompts
//! - `decodeN`: N prompts of 64 tokens, 128 new tokens each, with the base model
//! - `loraN`: the same with an adapter on all linear layers but the unembedding
//! - `adaptersN`: 32 completions with N adapters
//! - `liveN`: N adapters that sample one after the other
//! - `contextN`: tokens after a context of N tokens
//! - `load`, `coldload`: opening the model, with its file in the page cache or not
//! - `read`, `coldread`: reading the model's file into memory, in the same two cases
//!
//! Prints the best round: wall-clock seconds, CPU seconds, the peak memory in MiB, and the size of
//! the file and of the KV cache in MiB.

#![expect(clippy::print_stdout, reason = "the benchmark prints its result")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tinkex_engine::loss::{Loss, LossInputs};
use tinkex_engine::optim::{AdamParams, OptimizerKind, StepParams};
use tinkex_engine::sample::{ModelWeights, SampleRequest, SampledToken, TokenObserver};
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
    let (precision, quantization) = match precision.as_str() {
        "f32" => (Precision::F32, None),
        "bf16" => (Precision::Bf16, None),
        "q8_0" => (Precision::F32, Some(Quantization::Q8)),
        "q4_k" => (Precision::F32, Some(Quantization::Q4)),
        other => {
            return Err(
                format!("unknown precision {other}, expected f32, bf16, q8_0 or q4_k").into()
            );
        }
    };
    let files = weight_files(Path::new(model))?;
    let cold = workload.starts_with("cold");
    if cold {
        files.iter().try_for_each(|file| evict(file))?;
    }
    let start = Instant::now();
    if workload.ends_with("read") {
        read_files(&files)?;
        let seconds = start.elapsed().as_secs_f64();
        println!("RESULT wall={seconds:.4} cpu={:.4} peak={:.1}", cpu()?, peak()?);
        return Ok(());
    }
    // The weights of a GGUF file keep their formats.
    let is_gguf = Path::new(model).extension().is_some_and(|extension| extension == "gguf");
    let quantization = quantization.filter(|_| !is_gguf);
    let options = EngineOptions { precision, quantization, ..EngineOptions::default() };
    let engine = Engine::open(model, options)?;
    let loaded = start.elapsed().as_secs_f64();
    let sizes =
        format!("file={:.1} cache={:.1}", mib(file_bytes(&files)?), mib(cache_bytes(&engine)));
    let mut bench = Bench::new(&engine, workload)?;
    if workload.ends_with("load") {
        let start = Instant::now();
        bench.round()?;
        let first = start.elapsed().as_secs_f64();
        let cpu = cpu()?;
        let peak = peak()?;
        println!("RESULT wall={loaded:.4} cpu={cpu:.4} peak={peak:.1} first={first:.4} {sizes}");
        return Ok(());
    }
    let mut best = (f64::INFINITY, f64::INFINITY);
    for _ in 0..rounds {
        let cpu_before = cpu()?;
        best.0 = best.0.min(bench.round()?);
        best.1 = best.1.min(cpu()? - cpu_before);
    }
    println!("RESULT wall={:.6} cpu={:.4} peak={:.1} {sizes}", best.0, best.1, peak()?);
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
    /// Base model or adapters to sample with.
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
    /// Whether a token was sampled.
    has_token: Arc<AtomicBool>,
}

/// Records that a token was sampled.
#[derive(Debug)]
struct FirstToken(Arc<AtomicBool>);

impl TokenObserver for FirstToken {
    fn token(&mut self, _: SampledToken<'_>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Bench {
    fn new(engine: &Engine, workload: &str) -> BenchResult<Self> {
        let vocab = u32::try_from(engine.config().vocab_size)?;
        let adapter = |seed| {
            engine.create_trainer(LoraConfig { seed, ..LoraConfig::default() }, OptimizerKind::Adam)
        };
        let base = || vec![engine.base_weights()];
        // llama.cpp has no adapters on an unembedding that is tied to the embedding.
        let lora = || -> BenchResult<Vec<ModelWeights>> {
            let config = LoraConfig { unembedding: false, ..LoraConfig::default() };
            Ok(vec![engine.snapshot(&engine.create_trainer(config, OptimizerKind::Adam)?)])
        };
        let adapters = |count: usize| -> BenchResult<Vec<ModelWeights>> {
            (0..count as u64).map(|seed| Ok(engine.snapshot(&adapter(seed)?))).collect()
        };
        let decode = |batch, weights, prompt, tokens| -> BenchResult<Box<Decode>> {
            let sampler = engine.sampler()?;
            let has_token = Arc::default();
            let requests = 0;
            Ok(Box::new(Decode {
                sampler,
                weights,
                batch,
                prompt,
                tokens,
                vocab,
                requests,
                has_token,
            }))
        };
        let (name, number) =
            workload.split_at(workload.find(char::is_numeric).unwrap_or(workload.len()));
        let number = if number.is_empty() { 0 } else { number.parse::<usize>()? };
        Ok(match name {
            "train" => Self::Train(Box::new(adapter(0)?), uniform(vocab)),
            "ragged" => Self::Train(Box::new(adapter(0)?), ragged(vocab)),
            "decode" => Self::Decode(decode(number, base(), 64, 128)?),
            "lora" => Self::Decode(decode(number, lora()?, 64, 128)?),
            "adapters" => Self::Decode(decode(32, adapters(number)?, 64, 32)?),
            "live" => Self::Live(decode(1, adapters(number)?, 16, 16)?),
            "context" => Self::Context(decode(1, adapters(1)?, number, 32)?),
            "load" | "coldload" => Self::Decode(decode(1, base(), 64, 1)?),
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
                while !decode.has_token.swap(false, Ordering::Relaxed) {
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
            let weights = &self.weights[adapter % self.weights.len()];
            let observer = FirstToken(Arc::clone(&self.has_token));
            self.sampler.add_observed(weights, request, Box::new(observer))?;
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

/// Returns the files with the weights of a model.
fn weight_files(model: &Path) -> BenchResult<Vec<PathBuf>> {
    if model.is_file() {
        return Ok(vec![model.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(model)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(path);
        }
    }
    Ok(files)
}

fn file_bytes(files: &[PathBuf]) -> BenchResult<u64> {
    let lengths: Result<Vec<u64>, std::io::Error> =
        files.iter().map(|file| Ok(std::fs::metadata(file)?.len())).collect();
    Ok(lengths?.into_iter().sum())
}

/// Reads files into memory, as loading a model does.
fn read_files(files: &[PathBuf]) -> BenchResult<()> {
    for file in files {
        std::hint::black_box(std::fs::read(file)?);
    }
    Ok(())
}

/// Removes a file from the page cache of the system.
fn evict(file: &Path) -> BenchResult<()> {
    let file = File::open(file)?;
    // Only pages that are on the disk are removed.
    file.sync_all()?;
    Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?)
}

/// Returns the size in bytes of the KV cache of a sequence of 192 tokens.
fn cache_bytes(engine: &Engine) -> u64 {
    let config = engine.config();
    let floats = 2 * config.layers * config.kv_heads * config.head_dim * 192;
    4 * floats as u64
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
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
