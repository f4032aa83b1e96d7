//! One binary for all integration tests of the crate.

mod behaviour;
mod bounds;
mod describe;
mod fixtures;
mod fuzz;
mod golden;
mod messages;
mod roundtrip;
mod scenarios;
mod strict;
