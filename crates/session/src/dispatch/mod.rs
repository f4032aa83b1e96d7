//! Admission control: how many requests, and how many of their bytes, are in flight.

mod admission;
mod limit;

#[cfg(test)]
mod tests;

pub use admission::{Admission, SubmitPermit};
pub use limit::{Limit, Permit};
