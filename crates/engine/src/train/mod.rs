//! Training of LoRA adapters and of whole models.

mod batch_execution;
mod datum;
mod forward_pass;
mod full;
#[cfg(test)]
pub(crate) mod golden;
mod objective;
#[cfg(test)]
mod tests;
mod trainer;

pub use datum::Datum;
pub(crate) use datum::check_tokens;
pub use full::FullTrainer;
pub use objective::{TrainingObjective, TrainingOutput};
pub use trainer::Trainer;
