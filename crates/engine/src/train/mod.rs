//! Training: what batches and steps do to an adapter.

mod datum;
mod full;
#[cfg(test)]
pub(crate) mod golden;
mod objective;
mod pass;
mod run;
#[cfg(test)]
mod tests;
mod trainer;

pub use datum::Datum;
pub(crate) use datum::check_tokens;
pub use full::FullTrainer;
pub use objective::{Objective, Output};
pub use trainer::Trainer;
