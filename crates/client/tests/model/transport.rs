//! Files of the crate under their module path.

#[path = "../../src/transport/backoff.rs"]
pub(crate) mod backoff;
