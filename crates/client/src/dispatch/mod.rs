//! When a request may leave, and how much may be on its way at once.

mod bytes;
mod gate;

pub(crate) use bytes::ByteBudget;
pub(crate) use gate::Gate;
