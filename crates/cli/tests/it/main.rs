//! Recorded command lines of the reference, run again: same requests, same tables, same facts.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

mod capture;
mod compare;
mod home;
mod local;
mod more;
#[cfg(unix)]
mod pty;
mod replay;
mod script;
#[cfg(unix)]
mod server;
mod snapshots;
mod talk;
#[cfg(unix)]
mod terminal;
mod train;
#[cfg(unix)]
mod tty;
