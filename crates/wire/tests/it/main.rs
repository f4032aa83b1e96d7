//! Integration tests of the crate, in one binary.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "a panic fails the test"
)]

mod behaviour;
mod bounds;
mod describe;
mod fixtures;
mod fuzz;
mod fuzz_targets;
mod golden;
mod messages;
mod responses;
mod roundtrip;
mod scenarios;
mod strict;
mod surface;
