//! How much may be on its way at once.

mod bytes;

pub(crate) use bytes::ByteBudget;
