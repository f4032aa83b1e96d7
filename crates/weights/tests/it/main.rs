//! Tests of model and adapter files.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed test panics")]

mod configs;
mod files;
mod folders;
mod golden;
