//! One binary for all integration tests of the crate.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a wrong assumption is a failed test")]

mod decoding;
mod files;
mod fixtures;
mod golden;
mod gradients;
mod hostile;
mod losses;
mod optimizers;
mod robust;
mod tokenizers;
