//! One binary for all integration tests of the crate.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod rl;
// The tokenizer of the SDK's tests, of which these tests use a part.
#[allow(dead_code, reason = "the tests of the SDK use the rest")]
#[allow(clippy::needless_pass_by_value, reason = "tests are easier to read without references")]
#[path = "../../../client/tests/it/tiny.rs"]
mod tiny;
