//! Files of the crate under their module path.

#[path = "../../src/transport/backoff.rs"]
pub(crate) mod backoff;

#[path = "../../src/transport/sent_flag.rs"]
pub(crate) mod sent_flag;
