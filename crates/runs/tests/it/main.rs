//! Integration tests of the run format.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod golden;
