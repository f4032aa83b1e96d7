//! As in the crate.

#[path = "../../src/training/call_order.rs"]
pub(crate) mod call_order;
