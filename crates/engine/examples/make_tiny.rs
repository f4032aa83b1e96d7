//! Trains the built-in model: `cargo run --release -p tinkex-engine --example make_tiny`.
//!
//! Generates the corpus (see `docs/corpus.md`), trains a tokenizer on it, and trains a small Qwen3
//! model from random weights. The result is deterministic. Takes a few minutes. `-- STEPS FOLDER`
//! sets the number of steps (default 700) and the output folder.

#![expect(clippy::print_stdout, reason = "the example prints its progress")]

use std::path::PathBuf;
use std::time::Instant;

use tinkex_engine::corpus::{END_OF_TEXT, SPECIALS, TURN_END, document};
use tinkex_engine::decode::{DecodingParams, StopConditions};
use tinkex_engine::loss::{Loss, LossInputs};
use tinkex_engine::optim::{AdamParams, StepParams};
use tinkex_engine::sample::SampleRequest;
use tinkex_engine::tokenizer::Tokenizer;
use tinkex_engine::train::{Datum, FullTrainer, TrainingObjective};
use tinkex_engine::{EngineOptions, Result};
use tinkex_weights::ModelConfig;

const SEED: u64 = 1;
/// Maximum size of the vocabulary.
const VOCAB: usize = 1024;
/// Number of documents in the corpus.
const DOCUMENTS: u64 = 40_000;
/// Sequences per training step.
const ROWS: usize = 16;
/// Tokens per sequence.
const LENGTH: usize = 256;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let steps: u32 = arguments.next().map_or(Ok(700), |steps| steps.parse())?;
    let default: PathBuf = [env!("CARGO_MANIFEST_DIR"), "models", "tiny"].iter().collect();
    let folder = arguments.next().map_or(default, PathBuf::from);
    std::fs::create_dir_all(&folder)?;

    let documents: Vec<String> = (0..DOCUMENTS).map(|index| document(SEED, index)).collect();
    let tokenizer_texts = documents.iter().take(4_000).map(String::as_str);
    let tokenizer = Tokenizer::train(tokenizer_texts, VOCAB, &SPECIALS)?;
    let end = tokenizer.special(END_OF_TEXT).ok_or("the tokenizer has no end-of-text token")?;
    let message_end =
        tokenizer.special(TURN_END).ok_or("the tokenizer has no end-of-message token")?;
    let mut stream = Vec::new();
    for document in &documents {
        stream.extend(tokenizer.encode(document));
        stream.push(end);
    }
    let bytes: usize = documents.iter().map(String::len).sum();
    println!("{bytes} bytes of text, {} tokens", stream.len());

    let vocab = tokenizer.vocabulary().len();
    let config = format!(
        r#"{{
  "architectures": ["Qwen3ForCausalLM"],
  "model_type": "qwen3",
  "vocab_size": {vocab},
  "hidden_size": 128,
  "intermediate_size": 384,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 32,
  "rms_norm_eps": 1e-06,
  "hidden_act": "silu",
  "rope_theta": 10000.0,
  "max_position_embeddings": 2048,
  "tie_word_embeddings": true,
  "eos_token_id": [{end}, {message_end}],
  "dtype": "bfloat16"
}}
"#
    );
    std::fs::write(folder.join("config.json"), &config)?;
    tokenizer.write(folder.join("tokenizer.json"))?;
    let config = ModelConfig::parse(config.as_bytes(), "config.json")?;
    let mut trainer = FullTrainer::new(&config, SEED, &EngineOptions::default())?;
    println!("{} parameters, {steps} steps of {} tokens", trainer.parameters(), ROWS * LENGTH);

    let mut random = fastrand::Rng::with_seed(SEED);
    let start_time = Instant::now();
    for step in 0..steps {
        let loss = train(&mut trainer, &stream, step, steps, &mut random)?;
        if step % 50 == 0 || step + 1 == steps {
            println!("step {step}: {loss:.3} nats per token, {:.0?}", start_time.elapsed());
        }
        if step % 300 == 299 {
            trainer.save_bf16(folder.join("model.safetensors"))?;
        }
    }
    trainer.save_bf16(folder.join("model.safetensors"))?;
    show(&trainer, &tokenizer, message_end)?;
    Ok(())
}

/// Takes one training step on random windows of the text. Returns the loss in nats per token.
fn train(
    trainer: &mut FullTrainer,
    stream: &[u32],
    step: u32,
    steps: u32,
    random: &mut fastrand::Rng,
) -> Result<f64> {
    let each = 1.0 / (ROWS * LENGTH) as f32;
    let weights = vec![each; LENGTH];
    let data: Vec<Datum<'_>> = (0..ROWS)
        .map(|_| {
            let start = random.usize(..stream.len() - LENGTH - 1);
            Datum {
                tokens: &stream[start..start + LENGTH],
                targets: &stream[start + 1..start + LENGTH + 1],
                inputs: LossInputs { weights: Some(&weights), ..LossInputs::default() },
                ..Datum::default()
            }
        })
        .collect();
    let out = trainer.forward_backward(&TrainingObjective::Loss(Loss::CrossEntropy), &data)?;
    // Linear warm-up, then cosine decay.
    let warm_up = f64::from(step + 1).min(50.0) / 50.0;
    let cosine = 0.5 + 0.5 * (std::f64::consts::PI * f64::from(step) / f64::from(steps)).cos();
    let learning_rate = 4e-3 * warm_up * (0.05 + 0.95 * cosine);
    trainer.optim_step(&StepParams::Adam(AdamParams {
        learning_rate,
        weight_decay: 0.02,
        grad_clip_norm: 1.0,
        eps: 1e-8,
        ..AdamParams::default()
    }))?;
    Ok(out.metrics[0].1)
}

/// Prints some completions of the model.
fn show(trainer: &FullTrainer, tokenizer: &Tokenizer, message_end: u32) -> Result<()> {
    let engine = trainer.engine(EngineOptions::default())?;
    let mut sampler = engine.sampler()?;
    for prompt in [
        "Once upon a time",
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nWhat does a dog say?<|im_end|>\n<|im_start|>assistant\n",
    ] {
        let mut request = SampleRequest::new(tokenizer.encode(prompt), 60);
        request.decoding = DecodingParams { temperature: 0.7, ..DecodingParams::default() };
        request.stop = StopConditions::new([message_end], [] as [&str; 0])?;
        sampler.add(&engine.base_weights(), request)?;
        while !sampler.is_idle() {
            for (_, output) in sampler.step() {
                let text = tokenizer.vocabulary().decode(&output?.samples[0].tokens);
                println!("--- {prompt}{text}");
            }
        }
    }
    Ok(())
}
