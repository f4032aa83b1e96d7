//! Training of LoRA adapters.
//!
//! `trainer` owns an adapter, its gradients and its optimizer. `pass` is the state of a pass between
//! its micro-batches, and `pass_bytes` encodes it. `batch_execution` executes a micro-batch, which
//! `forward_pass` computes forward and backward. `objective` evaluates the loss of each `datum`.
//! `full` trains all weights of a model, for the program that makes the built-in model.

mod batch_execution;
mod datum;
mod forward_pass;
#[cfg(feature = "builtin-model-tools")]
pub(crate) mod full;
#[cfg(test)]
pub(crate) mod golden;
mod objective;
mod pass;
mod pass_bytes;
#[cfg(test)]
mod tests;
mod trainer;

pub use datum::Datum;
pub(crate) use datum::check_tokens;
pub use objective::{TrainingObjective, TrainingOutput};
pub use pass::{MicroBatch, PassProgress};
pub use trainer::Trainer;
