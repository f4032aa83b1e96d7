//! When a request may leave, and how much may be on its way at once.

mod gate;
mod limit;

#[cfg(test)]
mod tests;

pub(crate) use gate::Gate;
pub(crate) use limit::{Limit, Permit};
