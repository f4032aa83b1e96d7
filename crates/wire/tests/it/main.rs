//! One binary for all integration tests of the crate.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "a wrong assumption is a failed test"
)]

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
mod surface;
