//! Integration tests of the engine, in one binary.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a panic fails the test")]

mod configurations;
mod decoding;
mod fixtures;
mod golden;
mod gradients;
mod hostile;
mod losses;
mod merged;
mod optimizers;
mod quantized;
mod quantized_model;
mod robust;
mod tokenizers;
