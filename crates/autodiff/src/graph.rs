//! Graph that describes a loss, in the JSON format of the Tinker API.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::arg::GraphArg;

/// Graph of tensor operations that computes a loss and its metrics for one datum.
///
/// The serialized form is the `graph` field of the `create_custom_loss` request. A deserialized
/// graph is not validated yet; [`LossProgram::new`](crate::LossProgram::new) does that.
///
/// ```
/// use tinkex_autodiff::{GraphArg, GraphNode, LossGraph};
///
/// let graph = LossGraph::new(vec![
///     GraphNode::placeholder("logprobs"),
///     GraphNode::method("total", "sum", [GraphArg::node("logprobs")]),
///     GraphNode::output(GraphArg::node("total"), []),
/// ]);
/// let json = serde_json::to_string(&graph)?;
/// assert!(json.starts_with(r#"{"format":1,"nodes":[{"op":"placeholder","name":"logprobs","#));
/// assert_eq!(serde_json::from_str::<LossGraph>(&json)?, graph);
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossGraph {
    /// Version of the JSON format; always [`LossGraph::FORMAT`].
    #[serde(default = "format_version")]
    pub format: u32,
    /// Nodes in execution order: placeholders first, the output last.
    pub nodes: Vec<GraphNode>,
}

fn format_version() -> u32 {
    LossGraph::FORMAT
}

impl LossGraph {
    /// Version of the JSON format that this crate reads and writes.
    pub const FORMAT: u32 = 1;

    /// Creates a graph of these nodes.
    #[must_use]
    pub fn new(nodes: Vec<GraphNode>) -> Self {
        Self { format: Self::FORMAT, nodes }
    }
}

/// Tensor that a loss reads for each datum.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GraphInput {
    /// Name of the loss input; the first one is `logprobs`.
    pub name: String,
    /// Number of dimensions: 0, 1 or 2.
    pub rank: u8,
}

impl GraphInput {
    /// Creates an input of this name and rank.
    #[must_use]
    pub fn new(name: impl Into<String>, rank: u8) -> Self {
        Self { name: name.into(), rank }
    }
}

/// One operation of a [`LossGraph`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GraphNode {
    /// Kind of node.
    pub op: NodeOp,
    /// Unique name by which later nodes refer to the result.
    pub name: String,
    /// Name of the input, qualified name of the function (`torch.exp`), or name of the method.
    pub target: String,
    /// Positional arguments; a method's first argument is its receiver.
    #[serde(default)]
    pub args: Vec<GraphArg>,
    /// Keyword arguments.
    #[serde(default)]
    pub kwargs: BTreeMap<String, GraphArg>,
}

/// Kind of a [`GraphNode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeOp {
    /// Reads an input.
    Placeholder,
    /// Reads an attribute of the traced module. Never valid in a loss.
    GetAttr,
    /// Calls a function by its qualified name.
    CallFunction,
    /// Calls a method of its first argument.
    CallMethod,
    /// Calls a submodule of the traced module. Never valid in a loss.
    CallModule,
    /// Returns the loss and its metrics.
    Output,
}

impl GraphNode {
    fn new(op: NodeOp, name: &str, target: &str, args: Vec<GraphArg>) -> Self {
        let name = name.to_owned();
        let target = target.to_owned();
        Self { op, name, target, args, kwargs: BTreeMap::new() }
    }

    /// Creates a node that reads an input. The node has the name of the input.
    #[must_use]
    pub fn placeholder(input: &str) -> Self {
        Self::new(NodeOp::Placeholder, input, input, Vec::new())
    }

    /// Creates a node that calls a function, such as `torch.exp` or `operator.mul`.
    #[must_use]
    pub fn function(name: &str, target: &str, args: impl Into<Vec<GraphArg>>) -> Self {
        Self::new(NodeOp::CallFunction, name, target, args.into())
    }

    /// Creates a node that calls a method of its first argument, such as `sum`.
    #[must_use]
    pub fn method(name: &str, target: &str, args: impl Into<Vec<GraphArg>>) -> Self {
        Self::new(NodeOp::CallMethod, name, target, args.into())
    }

    /// Creates the last node of a graph, which returns the loss and named metrics.
    #[must_use]
    pub fn output<'a>(
        loss: GraphArg,
        metrics: impl IntoIterator<Item = (&'a str, GraphArg)>,
    ) -> Self {
        let result = GraphArg::tuple([loss, GraphArg::dict(metrics)]);
        Self::new(NodeOp::Output, "output", "output", vec![result])
    }

    /// Adds a keyword argument.
    #[must_use]
    pub fn kwarg(mut self, name: &str, value: impl Into<GraphArg>) -> Self {
        self.kwargs.insert(name.to_owned(), value.into());
        self
    }
}
