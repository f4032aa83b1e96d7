//! Integration tests: clients send requests over loopback to a server in this process or in a
//! process of its own.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a wrong assumption is a failed test")]
#![expect(clippy::disallowed_methods, reason = "tests compare the server with the real time")]

mod access;
mod adapter_files;
mod attack;
mod backup;
mod browser;
mod chat;
mod checkpoint;
mod child_server;
mod completions;
mod connections;
mod contract;
mod crash;
mod custom_loss;
mod damage;
mod dashboard;
mod dashboard_login;
mod disk;
#[cfg(unix)]
mod dpo;
mod drain;
mod error_kinds;
mod fairness;
mod fault;
mod fuzz;
mod gateway;
mod gguf;
mod gguf_tokenizer;
mod golden_gguf;
mod gradient;
mod harness;
mod hidden_paths;
mod idle;
mod import;
mod inference;
mod invalid_data;
mod logging;
mod loss_inputs;
mod messages;
mod metrics;
mod model_folders;
mod order;
mod passes;
mod poison;
mod process;
mod raw;
mod records;
mod restart;
mod retention;
mod sample_stream;
mod sampler_end;
mod sampling;
mod soak;
mod sse;
mod stop;
mod taught;
mod tls;
mod training;
mod upgrade;
mod user_limits;
mod users;
