//! As in the crate.

#[path = "../../src/transport/backoff.rs"]
pub(crate) mod backoff;
