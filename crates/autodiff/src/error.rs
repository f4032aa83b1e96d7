//! Error type of the crate.

use std::fmt;

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error returned when a graph is invalid or cannot be evaluated.
///
/// ```
/// use tinkex_autodiff::{Error, GraphInput, LossGraph, LossProgram};
///
/// let inputs = vec![GraphInput::new("logprobs", 1)];
/// let error = LossProgram::new(inputs, LossGraph::new(vec![])).unwrap_err();
/// assert!(matches!(error, Error::Graph { node: None, .. }));
/// assert_eq!(error.to_string(), "invalid custom loss: the last node must be the output");
/// ```
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The graph is malformed, uses an unsupported operation, or combines tensors whose shapes do
    /// not fit.
    #[error("invalid custom loss{}: {reason}", InNode(node.as_deref()))]
    Graph {
        /// Name of the invalid node; `None` if the error concerns the whole graph.
        node: Option<String>,
        /// Description of the problem.
        reason: String,
    },
    /// The number of tensors differs from the number of declared inputs.
    #[error("custom loss reads {expected} inputs, got {got}")]
    InputCount {
        /// Number of declared inputs.
        expected: usize,
        /// Number of tensors passed.
        got: usize,
    },
    /// An input tensor has another rank than declared.
    #[error("custom loss input {name} has shape {shape:?}, expected rank {rank}")]
    InputRank {
        /// Name of the input.
        name: String,
        /// Declared rank.
        rank: u8,
        /// Shape of the tensor passed.
        shape: Vec<usize>,
    },
    /// The number of values of an input tensor differs from the product of its shape.
    #[error("custom loss input {name} has {got} values, expected {expected}")]
    InputLength {
        /// Name of the input.
        name: String,
        /// Number of elements of the shape.
        expected: usize,
        /// Number of values passed.
        got: usize,
    },
    /// An input other than the log-probabilities contains NaN or an infinity.
    // The prefix is the one the Tinker API uses for built-in losses.
    #[error("NonFiniteInTensor: {name}[{index}] is {value}")]
    NonFiniteInput {
        /// Name of the input.
        name: String,
        /// Index of the first such value.
        index: usize,
        /// The value.
        value: f32,
    },
    /// The loss or an element of its gradient is NaN or infinite.
    #[error("{what} of the custom loss is {value} at position {index}; {HINT}")]
    NonFiniteResult {
        /// `"value"` or `"gradient"`.
        what: &'static str,
        /// Index of the element; 0 for the value.
        index: usize,
        /// NaN or an infinity.
        value: f64,
    },
}

const HINT: &str = "clamp the arguments of logarithms, divisions and exponentials";

impl Error {
    /// Returns whether the loss or its gradient overflowed or is undefined for valid inputs.
    #[must_use]
    pub fn is_numeric(&self) -> bool {
        matches!(self, Self::NonFiniteResult { .. })
    }

    pub(crate) fn graph(reason: impl Into<String>) -> Self {
        Self::Graph { node: None, reason: reason.into() }
    }

    pub(crate) fn node(node: &str, reason: impl Into<String>) -> Self {
        Self::Graph { node: Some(node.to_owned()), reason: reason.into() }
    }
}

/// Formats `, node "name"`; the empty string without a node.
struct InNode<'a>(Option<&'a str>);

impl fmt::Display for InNode<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |node| write!(f, ", node {node:?}"))
    }
}
