//! Recorded command lines of the reference, run again: same requests, same tables, same facts.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

mod capture;
mod commands;
mod compare;
#[cfg(unix)]
mod interactive;
mod local;
mod local_commands;
mod outage;
mod replay;
mod sandbox;
mod scripted_server;
#[cfg(unix)]
mod serve;
mod snapshots;
#[cfg(unix)]
mod tcp_server;
#[cfg(unix)]
mod terminal;
mod train;
#[cfg(unix)]
mod tty;
