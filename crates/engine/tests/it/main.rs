//! One binary for all integration tests of the crate.

#![expect(clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

mod files;
mod golden;
