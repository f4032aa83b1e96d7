//! Deterministic simulation of Tinkex clients and servers under faults.
//!
//! [`run`] executes one *scenario*: several programs that use the real client (`tinkex`), a
//! simulated network, and the real server with the real engine and a small model. Everything runs
//! on one thread in simulated time, and every choice derives from one seed: what the programs do,
//! how long requests take, which of them are lost, when the server process dies, which writes
//! survive. The same seed gives the same scenario, so every failure can be repeated.
//!
//! * `scenario`: runs one scenario from start to end
//! * `program`: the actions of the clients
//! * `checkpoints`: checkpoints as their clients know them
//! * `network`: requests and their faults
//! * `host`: the server process, its tasks, its death and its restart
//! * `clocks`: the clocks of the machine
//! * `disk`: faults of file operations, and what survives a power loss
//! * `oracle`: the invariants, and the checks of them
//! * `upstream`: a scripted server in front of which the server is a gateway, in some scenarios, and
//!   its faults; `toy_model` is a model on it
//! * `replay`, `toy_replay`: sequential execution of the accepted requests, for the oracle
//! * `faults`: the kinds and probabilities of the faults of a run, chosen from the seed
//! * `task`: tasks that take simulated time
//! * `trace`: the events of a run, and their hash

#![forbid(unsafe_code)]

mod checkpoints;
mod clocks;
mod disk;
mod faults;
mod host;
mod network;
mod oracle;
mod program;
mod replay;
mod scenario;
mod task;
mod toy_model;
mod toy_replay;
mod trace;
mod upstream;

pub use scenario::{Report, run};
