//! One binary for all integration tests of the crate.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a panic fails the test")]
#![expect(clippy::needless_pass_by_value, reason = "scripts are easier to read without references")]

#[cfg(feature = "export")]
mod adapter_download;
#[cfg(feature = "blocking")]
mod blocking;
mod call_limits;
#[cfg(feature = "chat")]
mod chat;
mod conformance;
mod connect;
#[cfg(feature = "console")]
mod console;
mod custom;
mod custom_http;
mod download;
mod event_log;
#[cfg(feature = "export")]
mod export;
mod finish;
mod handle;
mod http2;
mod instrument;
mod isolation;
mod loopback;
mod network;
mod numbered_server;
mod other_servers;
mod plan;
mod raw_server;
mod recorded_server;
mod replay;
mod request_parity;
mod rest_client;
mod retry;
mod runtimes;
mod sample_stream;
mod sampling;
mod scenarios;
mod scripted_server;
mod session;
mod step;
mod surface;
mod testing;
#[cfg(feature = "tokenizer")]
mod tiny;
#[cfg(feature = "tokenizer")]
mod tokenizer;
#[cfg(feature = "tokenizer")]
mod tokenizer_resolution;
#[cfg(feature = "opentelemetry")]
mod trace_context;
mod training;
