//! One binary for all integration tests of the crate.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a panic fails the test")]

// The scripted server of the SDK's tests, of which these tests use a part.
#[allow(dead_code, reason = "the tests of the SDK use the rest")]
#[path = "../../../client/tests/it/event_log.rs"]
mod event_log;
mod push;
#[allow(
    dead_code,
    clippy::needless_pass_by_value,
    reason = "the tests of the SDK use the rest, and pass values that they build in place"
)]
#[path = "../../../client/tests/it/scripted_server.rs"]
mod scripted_server;
