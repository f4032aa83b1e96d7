//! Tests of model and adapter files.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed test panics")]

mod export;
mod files;
mod golden;
