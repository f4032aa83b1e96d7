//! Tests of model and adapter files.

#![expect(clippy::unwrap_used, reason = "a failed test panics")]

mod configs;
mod export;
mod export_gguf;
mod export_memory;
mod files;
mod folders;
mod gguf;
mod gguf_models;
mod golden;
mod quants;
