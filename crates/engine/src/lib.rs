//! LoRA training and sampling of language models on the CPU.
//!
//! No network, nothing asynchronous: numbers and files in, numbers and files out. Who may ask for
//! what, and in which order, is for the server to decide.
//!
//! An [`Engine`] holds a model: a Hugging Face folder of the Llama, Qwen2 or Qwen3 family, or the
//! [built-in](builtin) one. A [`Trainer`] is an adapter in training, a [`Sampler`] writes
//! continuations, with the model as it is or with any adapters.
//!
//! ```
//! use tinkex_engine::loss::Loss;
//! use tinkex_engine::optim::{AdamParams, OptimizerKind, StepParams};
//! use tinkex_engine::train::Datum;
//! use tinkex_engine::{Engine, LoraConfig, EngineOptions, builtin};
//!
//! let engine = Engine::builtin(EngineOptions::default())?;
//! let tokens = builtin::tokenizer()?.encode("A parrot says hello.");
//! let datum = Datum { tokens: &tokens[..tokens.len() - 1], targets: &tokens[1..], ..Datum::default() };
//!
//! let mut trainer = engine.create_trainer(LoraConfig { rank: 8, ..LoraConfig::default() }, OptimizerKind::Adam)?;
//! let params = StepParams::Adam(AdamParams { learning_rate: 3e-3, ..AdamParams::default() });
//! let mut losses = Vec::new();
//! for _ in 0..3 {
//!     let out = trainer.forward_backward(&Loss::CrossEntropy.into(), &[datum])?;
//!     losses.push(out.metrics[0].1);
//!     trainer.optim_step(&params)?;
//! }
//! assert!(losses[2] < losses[0]);
//! # Ok::<_, tinkex_engine::Error>(())
//! ```
//!
//! **The same bits.** A result depends on the weights and on what stands before it in its sequence,
//! never on the number of threads, on what else is in the batch, on what was in the cache, or on how
//! a sequence was cut into steps; and a sampler reports the log-probabilities that training computes.
//!
//! **All or nothing.** Whatever returns an error has changed nothing.

#![deny(unsafe_code)]

pub mod builtin;
pub mod corpus;
pub mod decode;
mod engine;
mod error;
pub mod file;
mod kernel;
mod lora;
pub mod loss;
mod memory;
mod model;
pub mod optim;
mod rng;
pub mod sample;
pub mod tokenizer;
pub mod train;

pub use engine::{Engine, EngineOptions};
pub use error::{Error, ErrorKind, Result};
pub use kernel::Precision;
pub use lora::LoraConfig;
pub use sample::Sampler;
pub use train::Trainer;
