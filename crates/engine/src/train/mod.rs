//! Training: what one batch does to an adapter.

mod pass;

pub(crate) use pass::{Pass, Passed, Sequence};
