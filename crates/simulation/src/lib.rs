//! Deterministic simulation of Tinkex clients and servers under faults.
//!
//! [`run`] executes one *scenario*: several programs that use the real client (`tinkex`), a
//! simulated network, and the real server with the real engine and a small model. Everything runs
//! on one thread in simulated time, and every choice derives from one seed: what the programs do,
//! how long requests take, which of them are lost, when the server process dies, which writes
//! survive. The same seed gives the same scenario, so every failure can be repeated.
//!
//! * `scenario`: what one run consists of
//! * `program`: what the clients do
//! * `network`: requests and their faults
//! * `host`: the server process, its tasks, its death and its restart
//! * `disk`: what survives the death of the machine
//! * `oracle`: what must hold
//! * `faults`: which faults a run has, chosen from the seed
//! * `trace`: the events of a run, and their hash

#![forbid(unsafe_code)]

mod clocks;
mod disk;
mod faults;
mod host;
mod network;
mod oracle;
mod program;
mod scenario;
mod task;
mod trace;

pub use scenario::{Report, run};
