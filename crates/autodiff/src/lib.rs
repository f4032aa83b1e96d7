//! Evaluates and differentiates custom training losses.
//!
//! A custom loss is a function of one datum's log-probabilities and of further loss inputs, such as
//! advantages. A [`LossGraph`] describes the loss: a list of tensor operations in the JSON format
//! of the Tinker API. [`LossProgram::new`] validates a graph, and [`LossProgram::evaluate`] runs it
//! for one datum and returns the loss, its gradient with respect to the log-probabilities, and its
//! metrics. The client and the server both use this crate, so that a loss has the same value and
//! the same gradient wherever it is executed.
//!
//! # Arithmetic
//!
//! Values are computed as `f64`, whatever float type the graph declares. Integer and boolean
//! tensors keep their type until an operation combines them with floats. The gradient is rounded to
//! `f32` at the end.
//!
//! # Subgradients
//!
//! Where an operation is not differentiable, it has the slope of PyTorch:
//!
//! | Operation | Slope at the kink |
//! |---|---|
//! | `maximum`, `minimum`, `max` and `min` of two tensors | ½ for each operand at a tie |
//! | `max`, `min` of all elements, `amax`, `amin` | shared evenly by the tied elements |
//! | `max`, `min` along a dimension | 1 for the first of the tied elements |
//! | `relu` at 0, `abs` at 0, `sign` | 0 |
//! | `sqrt` at 0, `log` at 0 | ∞ |
//! | `where`, `masked_fill` | 1 for the selected branch, 0 for the other |
//! | `norm` of a zero vector | 0 |
//!
//! There are two deliberate differences:
//!
//! - In the chain rule 0 · ∞ is 0, where PyTorch computes NaN. The gradient of
//!   `where(mask, log(x), 0)` is 0 outside the mask, even where `x` is 0.
//! - The slope of `clamp` and `clip` on a bound is 1, as in older versions of PyTorch and as in the
//!   built-in losses. In PyTorch 2.15 it is 0, or ½ if the bound is a tensor.
//!
//! The golden file `tests/golden/kinks.json` lists every kink, and marks the cases that differ.
//!
//! # Limits
//!
//! Graphs may come from an untrusted client. A graph has at most [`MAX_INPUTS`] inputs and
//! [`MAX_NODES`] nodes, arguments nest at most 32 levels deep, a tensor has at most 64 dimensions,
//! and one evaluation holds at most 1 GiB or the program's
//! [memory limit](LossProgram::memory_limit). Only operations that the crate implements are accepted.
//!
//! # Example
//!
//! ```
//! use tinkex_autodiff::{GraphArg, GraphInput, GraphNode, LossGraph, LossProgram, TensorView};
//!
//! let graph = LossGraph::new(vec![
//!     GraphNode::placeholder("logprobs"),
//!     GraphNode::function("probs", "torch.exp", [GraphArg::node("logprobs")]),
//!     GraphNode::method("total", "sum", [GraphArg::node("probs")]),
//!     GraphNode::output(GraphArg::node("total"), []),
//! ]);
//! let program = LossProgram::new(vec![GraphInput::new("logprobs", 1)], graph)?;
//! let result = program.evaluate(&[TensorView::f32(&[2], &[0.0, f32::NEG_INFINITY])])?;
//! assert_eq!(result.loss, 1.0);
//! assert_eq!(result.gradient, [1.0, 0.0]);
//! # Ok::<_, tinkex_autodiff::Error>(())
//! ```

#![forbid(unsafe_code)]

mod arg;
mod array;
mod call;
mod elementwise;
mod error;
mod graph;
mod index;
mod inspect;
mod interpret;
mod operations;
mod program;
mod reduce;
mod shape;
mod tape;
mod validate;

pub use arg::GraphArg;
pub use error::{Error, Result};
pub use graph::{GraphInput, GraphNode, LossGraph, NodeOp};
pub use program::{LossEvaluation, LossProgram, TensorView, ViewValues};
pub use validate::{MAX_INPUTS, MAX_NODES, is_input_name, is_metric_name, validate_inputs};
