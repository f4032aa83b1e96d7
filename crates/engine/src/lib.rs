//! LoRA training and sampling of language models on the CPU.
//!
//! No network, nothing asynchronous: numbers and files in, numbers and files out. Who may ask for
//! what, and in which order, is for the server to decide.

#![deny(unsafe_code)]

pub mod corpus;
mod error;
pub mod file;
mod kernel;
mod lora;
pub mod loss;
mod model;
mod noise;
pub mod optim;
pub mod pick;
pub mod tokenizer;
mod train;

pub use error::{Error, ErrorKind, Result};
