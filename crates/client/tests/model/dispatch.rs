//! Files of the crate under their module path.

#[path = "../../src/dispatch/admission.rs"]
pub(crate) mod admission;
#[path = "../../src/dispatch/limit.rs"]
pub(crate) mod limit;
