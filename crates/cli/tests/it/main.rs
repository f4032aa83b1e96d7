//! Recorded command lines of the reference, run again: same requests, same tables, same facts.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

mod capture;
mod compare;
mod more;
mod replay;
mod script;
#[cfg(unix)]
mod server;
mod snapshots;
#[cfg(unix)]
mod terminal;
#[cfg(unix)]
mod tty;
