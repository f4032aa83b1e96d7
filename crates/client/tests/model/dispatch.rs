//! As in the crate.

#[path = "../../src/dispatch/gate.rs"]
pub(crate) mod gate;
#[path = "../../src/dispatch/limit.rs"]
pub(crate) mod limit;
