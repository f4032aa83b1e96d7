//! Training: what one batch does to an adapter.

#[cfg(test)]
pub(crate) mod golden;
mod pass;

pub(crate) use pass::{Pass, Passed, Sequence};
