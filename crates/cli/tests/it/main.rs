//! Recorded command lines of the reference, run again: same requests, same tables, same facts.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

#[cfg(unix)]
mod attended;
mod capture;
mod compare;
mod home;
mod local;
mod more;
mod outage;
mod replay;
mod script;
#[cfg(unix)]
mod server;
#[cfg(unix)]
mod serving;
mod snapshots;
mod talk;
#[cfg(unix)]
mod terminal;
mod train;
#[cfg(unix)]
mod tty;
