//! Custom losses.
//!
//! There are two kinds:
//!
//! - A *traced* loss, [`CustomLoss`], is described once by combining [`Term`]s. It is
//!   differentiated automatically. The server executes it if it supports custom losses
//!   ([`ServiceClient::create_custom_loss`](crate::ServiceClient::create_custom_loss)); otherwise
//!   the client does, which takes a second pass. Value and gradient are the same on both sides:
//!   client and server run the same interpreter, with PyTorch's subgradients.
//! - A *computed* loss is a Rust function that returns a [`LossValue`], including the gradient. The
//!   client always executes it; see
//!   [`TrainingClient::forward_backward_custom`](crate::TrainingClient::forward_backward_custom).

#[doc(inline)]
pub use tinkex_loss::{CustomLoss, LossValue, Mask, Operand, Term, Trace, regularize};
#[doc(inline)]
pub use tinkex_wire::{GraphArg, GraphInput, GraphNode, LossGraph, NodeOp};
