//! Custom losses: tracing, evaluation, and the data of the passes that train with them.
//!
//! Do not depend on this crate directly: its API may change in any release. Use the module `loss`
//! of the SDK, the crate `tinkex`, which re-exports the public types. The SDK and the gateway share
//! this crate, because both compute losses that a server cannot compute.
//!
//! | Item | Content |
//! |---|---|
//! | [`CustomLoss`], [`Trace`], [`Term`], [`Mask`] | A loss that is traced once; its value and gradient |
//! | [`regularize`] | Terms that a traced loss can add |
//! | [`LocalLoss`], [`forward_data`] | A loss that is computed from the log-probabilities of a forward pass |

#![forbid(unsafe_code)]

mod custom_loss;
mod local_loss;
pub mod regularize;
mod trace;

#[cfg(test)]
#[path = "../../transport/src/fixture.rs"]
mod fixture;

pub use custom_loss::{CustomLoss, LossValue};
pub use local_loss::{LocalLoss, LossResult, forward_data, token_loss};
pub use trace::{Mask, Operand, Term, Trace};
