//! The built-in model: always there, small, and quick to teach.
//!
//! A Qwen3 model of 0.9 million parameters that learnt short stories, questions and sums from text
//! made by rules (`docs/corpus.md`). It is made by
//! `cargo run --release -p tinkex-engine --example make_tiny` and has the files of any other model,
//! as parts of the program.
//!
//! ```
//! use tinkex_engine::sample::SampleRequest;
//! use tinkex_engine::{Engine, EngineOptions, builtin};
//!
//! let engine = Engine::builtin(EngineOptions::default())?;
//! let tokenizer = builtin::tokenizer()?;
//! let mut sampler = engine.sampler()?;
//! sampler.add(&engine.base_weights(), SampleRequest::new(tokenizer.encode("Once upon a"), 2))?;
//! let answer = loop {
//!     if let Some((_, answer)) = sampler.step().pop() {
//!         break answer?;
//!     }
//! };
//! println!("{}", tokenizer.vocabulary().decode(&answer.samples[0].tokens));
//! # Ok::<_, tinkex_engine::Error>(())
//! ```

use crate::Result;
use crate::file::{ModelConfig, TensorFile};
use crate::tokenizer::Tokenizer;

/// What it is called.
pub const NAME: &str = "tinkex/tiny";
/// Its `config.json`.
pub const CONFIG: &[u8] = include_bytes!("../models/tiny/config.json");
/// Its `tokenizer.json`.
pub const TOKENIZER: &[u8] = include_bytes!("../models/tiny/tokenizer.json");
/// Its `model.safetensors`.
pub const WEIGHTS: &[u8] = include_bytes!("../models/tiny/model.safetensors");

/// What kind of model it is, and how large.
///
/// # Errors
/// Never, unless the program was built with other files.
pub fn config() -> Result<ModelConfig> {
    ModelConfig::parse(CONFIG, "config.json")
}

/// Its tokenizer.
///
/// # Errors
/// Never, unless the program was built with other files.
pub fn tokenizer() -> Result<Tokenizer> {
    Tokenizer::parse(TOKENIZER, "tokenizer.json")
}

pub(crate) fn tensors() -> Result<TensorFile> {
    TensorFile::from_static(WEIGHTS, "model.safetensors")
}
