//! The server, driven by the client over loopback.

#![expect(clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

mod checkpoint;
mod closed;
mod crash;
mod disk;
mod faults;
mod house;
mod idle;
mod order;
mod process;
mod restart;
mod sampling;
mod training;
