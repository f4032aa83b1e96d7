//! Files of the crate `tinkex_session` under their module path.

#[path = "../../../session/src/dispatch/admission.rs"]
pub(crate) mod admission;
#[path = "../../../session/src/dispatch/limit.rs"]
pub(crate) mod limit;
