//! Trains the weights of the built-in model: a small Qwen3 model, from random values.

use std::path::Path;
use std::time::Instant;

use tinkex_engine::EngineOptions;
use tinkex_engine::builtin_model_tools::FullTrainer;
use tinkex_engine::decode::{DecodingParams, StopConditions};
use tinkex_engine::loss::{Loss, LossInputs};
use tinkex_engine::optim::{AdamParams, StepParams};
use tinkex_engine::sample::SampleRequest;
use tinkex_engine::tokenizer::Tokenizer;
use tinkex_engine::train::{Datum, TrainingObjective};
use tinkex_weights::ModelConfig;

use crate::corpus::{END_OF_TEXT, SEED, TURN_END, documents};
use crate::{Result, tokenizer};

/// Number of training steps of the built-in model.
pub(crate) const DEFAULT_STEPS: u32 = 700;
/// Number of documents in the corpus.
const DOCUMENTS: u64 = 40_000;
/// Sequences per training step.
const ROWS: usize = 16;
/// Tokens per sequence.
const LENGTH: usize = 256;

/// Trains the built-in model with `steps` steps and writes its files to `folder`. Prints progress
/// and some completions of the model.
pub(crate) fn make(steps: u32, folder: &Path) -> Result<()> {
    let documents: Vec<String> = documents(DOCUMENTS).collect();
    let start_time = Instant::now();
    let trained = train(&documents, steps, folder, |step, loss| {
        if step % 50 == 0 || step + 1 == steps {
            println!("step {step}: {loss:.3} nats per token, {:.0?}", start_time.elapsed());
        }
    })?;
    show(&trained)
}

/// The built-in model after training.
struct TrainedModel {
    trainer: FullTrainer,
    tokenizer: Tokenizer,
    /// Token that ends a message.
    message_end: u32,
}

/// Trains a tokenizer and a model on `documents` and writes their files to `folder`. Calls
/// `progress` with the index and the loss of every step, in nats per token.
fn train(
    documents: &[String],
    steps: u32,
    folder: &Path,
    mut progress: impl FnMut(u32, f64),
) -> Result<TrainedModel> {
    std::fs::create_dir_all(folder)?;
    let trained_tokenizer = tokenizer::builtin(documents)?;
    trained_tokenizer.write(&folder.join("tokenizer.json"))?;
    let tokenizer = Tokenizer::parse(trained_tokenizer.to_json().as_bytes(), "tokenizer.json")?;
    let end = tokenizer.special(END_OF_TEXT).ok_or("the tokenizer has no end-of-text token")?;
    let message_end =
        tokenizer.special(TURN_END).ok_or("the tokenizer has no end-of-message token")?;
    let mut stream = Vec::new();
    for document in documents {
        stream.extend(tokenizer.encode(document));
        stream.push(end);
    }
    let bytes: usize = documents.iter().map(String::len).sum();
    println!("{bytes} bytes of text, {} tokens", stream.len());

    let config = config_json(tokenizer.vocabulary().len(), [end, message_end]);
    std::fs::write(folder.join("config.json"), &config)?;
    let config = ModelConfig::parse(config.as_bytes(), "config.json")?;
    let mut trainer = FullTrainer::new(&config, SEED, &EngineOptions::default())?;
    println!("{} parameters, {steps} steps of {} tokens", trainer.parameters(), ROWS * LENGTH);
    let mut random = fastrand::Rng::with_seed(SEED);
    for step in 0..steps {
        let loss = train_step(&mut trainer, &stream, step, steps, &mut random)?;
        progress(step, loss);
        if step % 300 == 299 {
            trainer.save_bf16(folder.join("model.safetensors"))?;
        }
    }
    trainer.save_bf16(folder.join("model.safetensors"))?;
    Ok(TrainedModel { trainer, tokenizer, message_end })
}

/// Returns the contents of `config.json`.
fn config_json(vocab: usize, [end, message_end]: [u32; 2]) -> String {
    format!(
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
    )
}

/// Takes one training step on random windows of the text. Returns the loss in nats per token.
fn train_step(
    trainer: &mut FullTrainer,
    stream: &[u32],
    step: u32,
    steps: u32,
    random: &mut fastrand::Rng,
) -> Result<f64> {
    let weight = 1.0 / (ROWS * LENGTH) as f32;
    let weights = vec![weight; LENGTH];
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
fn show(model: &TrainedModel) -> Result<()> {
    let engine = model.trainer.engine(EngineOptions::default())?;
    let mut sampler = engine.sampler()?;
    for prompt in [
        "Once upon a time",
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nWhat does a dog say?<|im_end|>\n<|im_start|>assistant\n",
    ] {
        let mut request = SampleRequest::new(model.tokenizer.encode(prompt), 60);
        request.decoding = DecodingParams { temperature: 0.7, ..DecodingParams::default() };
        request.stop = StopConditions::new([model.message_end], [] as [&str; 0])?;
        sampler.add(&engine.base_weights(), request)?;
        while !sampler.is_idle() {
            for (_, output) in sampler.step() {
                let text = model.tokenizer.vocabulary().decode(&output?.samples[0].tokens);
                println!("--- {prompt}{text}");
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tinkex_engine::{Engine, builtin};

    use super::*;

    /// Runs the procedure that made the built-in model with fewer documents and steps.
    #[test]
    fn the_procedure_makes_a_model_that_the_engine_loads() {
        let folder = tempfile::tempdir().unwrap();
        let documents: Vec<String> = documents(tokenizer::DOCUMENTS).collect();
        let mut losses = Vec::new();
        let trained = train(&documents, 3, folder.path(), |_, loss| losses.push(loss)).unwrap();
        show(&trained).unwrap();
        assert_eq!(losses.len(), 3);
        assert!(losses[2] < losses[0], "{losses:?}");
        let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
        assert_eq!(read("config.json"), builtin::CONFIG);
        assert_eq!(read("tokenizer.json"), builtin::TOKENIZER);
        assert_eq!(read("model.safetensors").len(), builtin::WEIGHTS.len());
        Engine::open(folder.path(), EngineOptions::default()).unwrap();
    }
}
