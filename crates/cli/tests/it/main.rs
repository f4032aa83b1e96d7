//! Tests of the command line.
//!
//! `replay`, `tty` and `snapshots` run the recorded command lines of the Python CLI (`capture`)
//! against scripted servers and compare requests, tables and messages. The other modules run the
//! program against the local server, in process or as a child process in a terminal.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a panic fails the test")]

mod capture;
mod commands;
mod compare;
#[cfg(unix)]
mod dashboard;
mod dpo;
mod eval;
mod export;
#[cfg(unix)]
mod import;
#[cfg(unix)]
mod interactive;
mod local;
mod local_commands;
#[cfg(unix)]
mod local_key;
mod names;
mod outage;
mod output;
mod push;
mod replay;
mod replay_cases;
mod rl;
mod sandbox;
mod scripted_cli;
mod scripted_server;
#[cfg(unix)]
mod serve;
mod server_check;
#[cfg(unix)]
mod server_commands;
mod sink;
mod snapshots;
#[cfg(unix)]
mod stalled_stream;
#[cfg(unix)]
mod tcp_server;
#[cfg(unix)]
mod terminal;
mod train;
mod train_data;
#[cfg(unix)]
mod tty;
