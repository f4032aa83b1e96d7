//! Deterministic simulation of Tinkex clients and servers under faults.
//!
//! [`run`] executes one *scenario*: several programs that use the real client (`tinkex`), a
//! simulated network, and the real server with the real engine and a small model. Everything runs
//! on one thread in simulated time. Every choice derives from one seed: the actions of the
//! programs, the durations and losses of requests, the deaths of the server process, and the writes
//! that survive a power loss. The same seed gives the same scenario, so every failure can be
//! repeated.
//!
//! * `scenario`: runs one scenario from start to end
//! * `program`: the actions of the clients
//! * `checkpoints`: checkpoints as their clients know them
//! * `network`: requests and their faults
//! * `host`: the server process, its tasks, its death and its restart
//! * `clocks`: the clocks of the machine
//! * `disk`: faults of file operations, and the writes that survive a power loss
//! * `oracle`: checks the invariants of the server
//! * `upstream`: a scripted server with faults, to which the server forwards requests as a gateway
//!   in some scenarios; `toy_model` is a model of the scripted server
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
mod upstream_faults;
pub use scenario::{Report, run};
