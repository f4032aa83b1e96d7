//! Files of the crate under their module path.

#[path = "../../src/training/call_order.rs"]
pub(crate) mod call_order;
