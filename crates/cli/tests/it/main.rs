//! Recorded command lines of the reference, run again: same requests, same tables, same exit.

#![expect(clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

mod home;
mod local;
#[cfg(unix)]
mod pty;
mod replay;
mod talk;
mod train;
