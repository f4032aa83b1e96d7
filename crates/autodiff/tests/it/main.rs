//! Integration tests of the loss interpreter.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a panic fails the test")]

mod graphs;
mod json;
mod kinks;
mod random_graphs;
