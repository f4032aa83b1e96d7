//! Training: what one batch does to an adapter.

#[cfg(test)]
pub(crate) mod golden;
mod pass;
#[cfg(test)]
mod speed;

pub(crate) use pass::{Pass, Passed, Sequence};
