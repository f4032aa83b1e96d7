//! As in the crate.

#[path = "../../src/transport/pause.rs"]
pub(crate) mod pause;
