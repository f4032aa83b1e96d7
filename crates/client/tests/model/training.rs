//! As in the crate.

#[path = "../../src/training/turn.rs"]
pub(crate) mod turn;
