//! Validation of graphs before they run.

use std::collections::BTreeSet;

use crate::arg::GraphArg;
use crate::error::{Error, Result};
use crate::graph::{GraphInput, GraphNode, LossGraph, NodeOp};
use crate::operations::lookup;

/// Maximum number of inputs of a loss, `logprobs` included.
pub const MAX_INPUTS: usize = 16;
/// Maximum number of nodes of a graph.
pub const MAX_NODES: usize = 4096;
/// Maximum nesting of lists, tuples, dictionaries and slices in one argument.
const MAX_ARG_DEPTH: usize = 32;

/// Names of the nodes that the output node of a graph returns.
pub(crate) struct GraphOutput {
    pub(crate) loss: String,
    /// Pairs of metric name and node name.
    pub(crate) metrics: Vec<(String, String)>,
}

/// Checks everything that does not depend on the shapes of the inputs.
pub(crate) fn validate(inputs: &[GraphInput], graph: &LossGraph) -> Result<GraphOutput> {
    validate_inputs(inputs)?;
    let format = graph.format;
    let known = LossGraph::FORMAT;
    if format != known {
        return Err(Error::graph(format!("format {format} is unknown, expected {known}")));
    }
    if graph.nodes.len() > MAX_NODES {
        let count = graph.nodes.len();
        let reason = format!("the graph has {count} nodes, the limit is {MAX_NODES}");
        return Err(Error::graph(reason));
    }
    let last = graph.nodes.split_last().filter(|(last, _)| last.op == NodeOp::Output);
    let Some((output, nodes)) = last else {
        return Err(Error::graph("the last node must be the output"));
    };
    let mut earlier = BTreeSet::new();
    for (i, node) in nodes.iter().enumerate() {
        let invalid = |reason: String| Err(Error::node(&node.name, reason));
        match (node.op, inputs.get(i)) {
            (NodeOp::Placeholder, Some(input)) if input.name == node.target => {}
            (NodeOp::Placeholder, Some(input)) => {
                return invalid(format!("reads {:?}, expected {:?}", node.target, input.name));
            }
            (NodeOp::Placeholder, None) => {
                return invalid(format!("reads undeclared input {:?}", node.target));
            }
            (_, Some(input)) => {
                return invalid(format!("precedes the placeholder of input {:?}", input.name));
            }
            (NodeOp::Output, None) => return invalid("is a second output".to_owned()),
            (NodeOp::GetAttr | NodeOp::CallModule, None) => {
                return invalid(format!("operation {:?} is not supported", node.target));
            }
            (NodeOp::CallFunction | NodeOp::CallMethod, None) => validate_call(node, inputs)?,
        }
        for arg in node.args.iter().chain(node.kwargs.values()) {
            validate_arg(&node.name, arg, &earlier, MAX_ARG_DEPTH)?;
        }
        if !earlier.insert(node.name.as_str()) {
            return invalid("another node has the same name".to_owned());
        }
    }
    if nodes.len() < inputs.len() {
        return Err(Error::graph("every input must have a placeholder"));
    }
    validate_output(output, &earlier)
}

/// Checks the declared inputs of a loss: their number, names and ranks.
///
/// # Errors
/// [`Error::Graph`] if the first input is not `logprobs` of rank 1 or 2, there are more than
/// [`MAX_INPUTS`], a name is not allowed ([`is_input_name`]) or used twice, or a rank exceeds 2.
pub fn validate_inputs(inputs: &[GraphInput]) -> Result<()> {
    match inputs.first() {
        Some(first) if first.name == "logprobs" && (1..=2).contains(&first.rank) => {}
        _ => return Err(Error::graph("the first input must be `logprobs`, of rank 1 or 2")),
    }
    if inputs.len() > MAX_INPUTS {
        let count = inputs.len();
        let reason = format!("the loss has {count} inputs, the limit is {MAX_INPUTS}");
        return Err(Error::graph(reason));
    }
    for (i, GraphInput { name, rank }) in inputs.iter().enumerate() {
        if !is_input_name(name) {
            let reason = format!("input name {name:?} does not match [a-z_][a-z0-9_]{{0,63}}");
            return Err(Error::graph(reason));
        }
        if *rank > 2 {
            return Err(Error::graph(format!("input {name} has rank {rank}, the limit is 2")));
        }
        if inputs[..i].iter().any(|other| other.name == *name) {
            return Err(Error::graph(format!("input {name} is declared twice")));
        }
    }
    Ok(())
}

/// Returns whether an input may have this name: `[a-z_][a-z0-9_]{0,63}`.
#[must_use]
pub fn is_input_name(name: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_';
    name.len() <= 64
        && name.bytes().all(allowed)
        && name.bytes().next().is_some_and(|first| !first.is_ascii_digit())
}

/// Returns whether a metric may have this name: `custom/`, 1 to 64 characters of `[a-z0-9_./-]`,
/// then `:sum` or `:mean`. The suffix states how the values of several data are combined.
#[must_use]
pub fn is_metric_name(name: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"_./-".contains(&c);
    name.strip_prefix("custom/")
        .and_then(|rest| rest.strip_suffix(":sum").or_else(|| rest.strip_suffix(":mean")))
        .is_some_and(|key| (1..=64).contains(&key.len()) && key.bytes().all(allowed))
}

fn validate_call(node: &GraphNode, inputs: &[GraphInput]) -> Result<()> {
    let Some(operation) = lookup(node.op, &node.target) else {
        let reason = format!("operation {:?} is not supported", node.target);
        return Err(Error::node(&node.name, reason));
    };
    if operation.in_place
        && let Some(GraphArg::Ref(receiver)) = node.args.first()
        && inputs.iter().any(|input| input.name == *receiver)
    {
        let reason = format!("{:?} would modify the input {receiver}", node.target);
        return Err(Error::node(&node.name, reason));
    }
    Ok(())
}

fn validate_arg(node: &str, arg: &GraphArg, earlier: &BTreeSet<&str>, depth: usize) -> Result<()> {
    let Some(depth) = depth.checked_sub(1) else {
        let reason = format!("arguments are nested more than {MAX_ARG_DEPTH} levels deep");
        return Err(Error::node(node, reason));
    };
    let all =
        |args: &[GraphArg]| args.iter().try_for_each(|arg| validate_arg(node, arg, earlier, depth));
    match arg {
        GraphArg::Ref(name) if !earlier.contains(name.as_str()) => {
            Err(Error::node(node, format!("refers to {name:?}, which is not an earlier node")))
        }
        GraphArg::List(items) | GraphArg::Tuple(items) => all(items),
        GraphArg::Slice(parts) => all(&parts[..]),
        GraphArg::Dict(entries) => {
            entries.values().try_for_each(|arg| validate_arg(node, arg, earlier, depth))
        }
        GraphArg::Unknown { reason, .. } => Err(Error::node(node, reason.as_str())),
        _ => Ok(()),
    }
}

fn validate_output(output: &GraphNode, earlier: &BTreeSet<&str>) -> Result<GraphOutput> {
    let invalid = |reason: &str| Error::node(&output.name, reason);
    for arg in &output.args {
        validate_arg(&output.name, arg, earlier, MAX_ARG_DEPTH)?;
    }
    let [GraphArg::Tuple(pair) | GraphArg::List(pair)] = output.args.as_slice() else {
        return Err(invalid("must return a pair of the loss and a dict of metrics"));
    };
    let [GraphArg::Ref(loss), GraphArg::Dict(entries)] = pair.as_slice() else {
        return Err(invalid("must return a pair of the loss and a dict of metrics"));
    };
    let mut metrics = Vec::with_capacity(entries.len());
    for (name, value) in entries {
        let GraphArg::Ref(node) = value else {
            return Err(invalid(&format!("metric {name:?} is not the value of a node")));
        };
        if !is_metric_name(name) {
            let form = "`custom/`, 1 to 64 of a-z 0-9 _ . / -, then `:sum` or `:mean`";
            return Err(invalid(&format!("metric name {name:?} is not of the form {form}")));
        }
        metrics.push((name.clone(), node.clone()));
    }
    Ok(GraphOutput { loss: loss.clone(), metrics })
}
