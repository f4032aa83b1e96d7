//! Admission control: how many requests, and how many of their bytes, are in flight.

mod admission;
mod limit;

#[cfg(test)]
mod tests;

pub(crate) use admission::Admission;
pub(crate) use limit::{Limit, Permit};
