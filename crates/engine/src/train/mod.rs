//! Training: what batches and steps do to an adapter.

mod datum;
#[cfg(test)]
pub(crate) mod golden;
mod objective;
mod pass;
#[cfg(test)]
mod speed;
mod trainer;

pub use datum::Datum;
pub(crate) use datum::check_tokens;
pub use objective::{Objective, Output};
pub(crate) use pass::Pass;
pub use trainer::Trainer;
