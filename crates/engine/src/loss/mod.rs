//! Losses: from the log-probabilities of targets to a number and its slope.
//!
//! A loss here never sees a model. It gets, for one datum, the log-probability of every target
//! under the current weights, and what the caller sent along; it gives the loss, and how the loss
//! moves with each log-probability. Every loss is a plain sum over tokens: nothing is divided by
//! tokens, data or calls.

mod inputs;
mod metrics;
mod settings;
mod token;

pub use inputs::Inputs;
pub use metrics::Metrics;
pub use settings::{Clip, Guesses, Loss};
pub use token::Evaluated;
