//! When a request may leave, and how much may be on its way at once.

mod admission;
mod limit;

#[cfg(test)]
mod tests;

pub(crate) use admission::Admission;
pub(crate) use limit::{Limit, Permit};
