//! LoRA training and sampling of language models on the CPU.
//!
//! No network, nothing asynchronous: numbers and files in, numbers and files out. Who may ask for
//! what, and in which order, is for the server to decide.

#![deny(unsafe_code)]

mod engine;
mod error;
pub mod file;
mod kernel;
mod lora;
pub mod loss;
mod model;
mod noise;
pub mod optim;
pub mod pick;
pub mod sample;
pub mod train;

pub use engine::{Engine, Options};
pub use error::{Error, ErrorKind, Result};
pub use kernel::Precision;
pub use lora::LoraConfig;
pub use sample::Sampler;
pub use train::Trainer;
