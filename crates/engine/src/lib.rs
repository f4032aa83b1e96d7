//! LoRA training and sampling of language models on the CPU.
//!
//! The crate has no network and no asynchronous code. Scheduling and access control are the task of
//! its caller, for example `tinkex-server`.
//!
//! An [`Engine`] holds a model of the Llama, Qwen2 or Qwen3 architecture, from a Hugging Face
//! folder or a GGUF file, or the [built-in](builtin) model. A [`Trainer`] trains a LoRA adapter; a
//! [`Sampler`] generates completions with the base model or with any number of adapters.
//!
//! ```
//! use tinkex_engine::loss::Loss;
//! use tinkex_engine::optim::{AdamParams, OptimizerKind, StepParams};
//! use tinkex_engine::train::Datum;
//! use tinkex_engine::{Engine, LoraConfig, EngineOptions, builtin};
//!
//! let engine = Engine::builtin(EngineOptions::default())?;
//! let tokens = builtin::tokenizer()?.encode("A parrot says hello.");
//! let inputs = &tokens[..tokens.len() - 1];
//! let targets = &tokens[1..];
//! let datum = Datum { tokens: inputs, targets, ..Datum::default() };
//!
//! let config = LoraConfig { rank: 8, ..LoraConfig::default() };
//! let mut trainer = engine.create_trainer(config, OptimizerKind::Adam)?;
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
//! # Reproducible bits
//!
//! The logits and log-probabilities of a token depend only on the weights and on the preceding
//! tokens of its sequence. They do not depend on the number of threads, the instruction set, the
//! other sequences of the batch, the contents of the cache, or the division of a sequence into
//! steps. The sampler reports the same log-probabilities, bit for bit, as training computes. The
//! kernels guarantee this by computing every sum in a fixed order.
//!
//! # Errors
//!
//! A method that returns an error leaves weights, gradients and optimizer state unchanged.

#![deny(unsafe_code)]

pub mod builtin;
#[cfg(feature = "builtin-model-tools")]
#[doc(hidden)]
pub mod builtin_model_tools;
pub mod decode;
mod engine;
mod error;
mod kernel;
mod lora;
pub mod loss;
mod memory;
mod model;
pub mod optim;
mod quantization;
mod rng;
pub mod sample;
pub mod tokenizer;
pub mod train;

pub use engine::{Engine, EngineOptions};
pub use error::{Error, ErrorKind, Result};
pub use kernel::Precision;
pub use lora::LoraConfig;
pub use quantization::Quantization;
pub use sample::Sampler;
pub use train::Trainer;

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct EngineReadme;
