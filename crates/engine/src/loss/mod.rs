//! Built-in losses.
//!
//! A loss is a function of the log-probabilities that the current weights give to the target tokens
//! of one datum, and of further inputs such as weights or advantages. A loss returns its value and its
//! derivative with respect to each log-probability. Every loss is a plain sum over tokens: it is
//! not divided by the number of tokens, data or requests.
//!
//! Custom losses are evaluated by the `tinkex-autodiff` crate.

mod inputs;
mod metrics;
mod settings;
mod token;

pub use inputs::LossInputs;
pub use metrics::LossMetrics;
pub use settings::{ClipBounds, Loss, UnverifiedLosses};
pub use token::LossSums;
