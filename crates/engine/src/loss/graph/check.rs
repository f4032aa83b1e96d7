//! Whether a graph can be run at all.

use std::collections::BTreeSet;

use super::names::known;
use super::node::{Arg, Node, Op};
use super::{Error, GraphInput, Result};

const MOST_INPUTS: usize = 16;
const MOST_NODES: usize = 4096;
const MOST_DEPTH: usize = 32;

/// What a graph returns, as names of nodes.
pub(super) struct Output {
    pub(super) loss: String,
    pub(super) metrics: Vec<(String, String)>,
}

pub(super) fn check(inputs: &[GraphInput], nodes: &[Node]) -> Result<Output> {
    check_inputs(inputs)?;
    if nodes.len() > MOST_NODES {
        return Err(fault("", format!("{} nodes are more than {MOST_NODES}", nodes.len())));
    }
    let Some((output, nodes)) = nodes.split_last().filter(|(last, _)| last.op == Op::Output) else {
        return Err(fault("", "the last node must be the output"));
    };
    let mut seen = BTreeSet::new();
    for (i, node) in nodes.iter().enumerate() {
        let wrong = |why: String| Err(fault(&node.name, why));
        match (node.op, inputs.get(i)) {
            (Op::Placeholder, Some(input)) if input.name == node.target => {}
            (Op::Placeholder, Some(input)) => {
                return wrong(format!("reads {:?} where {:?} is due", node.target, input.name));
            }
            (Op::Placeholder, None) => return wrong("reads more inputs than declared".to_owned()),
            (_, Some(input)) => return wrong(format!("comes before input {:?}", input.name)),
            (Op::Output, None) => return wrong("is a second output".to_owned()),
            (Op::Other, None) => return wrong(format!("{:?} may not be used", node.target)),
            (Op::CallFunction | Op::CallMethod, None) => check_call(node, inputs)?,
        }
        for arg in node.args.iter().chain(node.kwargs.iter().map(|(_, arg)| arg)) {
            check_arg(&node.name, arg, &seen, MOST_DEPTH)?;
        }
        if !seen.insert(node.name.as_str()) {
            return wrong("is there twice".to_owned());
        }
    }
    if nodes.len() < inputs.len() {
        return Err(fault("", "every input must be read by a placeholder"));
    }
    check_output(output, &seen)
}

fn check_inputs(inputs: &[GraphInput]) -> Result<()> {
    let wrong = |why: String| Err(fault("", why));
    match inputs.first() {
        Some(first) if first.name == "logprobs" && (1..=2).contains(&first.rank) => {}
        _ => return wrong("the first input must be logprobs, of rank 1 or 2".to_owned()),
    }
    if inputs.len() > MOST_INPUTS {
        return wrong(format!("{} inputs are more than {MOST_INPUTS}", inputs.len()));
    }
    for (i, input) in inputs.iter().enumerate() {
        let tail = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_';
        let named = (1..=64).contains(&input.name.len())
            && input.name.bytes().all(tail)
            && !input.name.as_bytes()[0].is_ascii_digit();
        if !named {
            return wrong(format!("{:?} is not the name of an input", input.name));
        }
        if input.rank > 2 {
            return wrong(format!("{} has rank {}, at most 2 is allowed", input.name, input.rank));
        }
        if inputs[..i].iter().any(|other| other.name == input.name) {
            return wrong(format!("{} is listed twice", input.name));
        }
    }
    Ok(())
}

fn check_call(node: &Node, inputs: &[GraphInput]) -> Result<()> {
    let Some(call) = known(node.op, &node.target) else {
        return Err(fault(&node.name, format!("{:?} may not be used", node.target)));
    };
    if call.in_place
        && let Some(Arg::Ref(on)) = node.args.first()
        && inputs.iter().any(|input| input.name == *on)
    {
        let why = format!("{:?} would change the input {on}", node.target);
        return Err(fault(&node.name, why));
    }
    Ok(())
}

fn check_arg(node: &str, arg: &Arg, seen: &BTreeSet<&str>, depth: usize) -> Result<()> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(fault(node, format!("arguments nest deeper than {MOST_DEPTH}")));
    };
    let all = |args: &[Arg]| args.iter().try_for_each(|arg| check_arg(node, arg, seen, depth));
    match arg {
        Arg::Ref(name) if !seen.contains(name.as_str()) => {
            Err(fault(node, format!("refers to {name:?}, which is no earlier node")))
        }
        Arg::List(items) | Arg::Tuple(items) => all(items),
        Arg::Slice(items) => all(&items[..]),
        Arg::Dict(entries) => {
            entries.iter().try_for_each(|(_, arg)| check_arg(node, arg, seen, depth))
        }
        _ => Ok(()),
    }
}

fn check_output(output: &Node, seen: &BTreeSet<&str>) -> Result<Output> {
    let wrong = |why: &str| fault(&output.name, why);
    for arg in &output.args {
        check_arg(&output.name, arg, seen, MOST_DEPTH)?;
    }
    let [Arg::Tuple(pair) | Arg::List(pair)] = output.args.as_slice() else {
        return Err(wrong("must return a pair of the loss and a dict of metrics"));
    };
    let [Arg::Ref(loss), Arg::Dict(entries)] = pair.as_slice() else {
        return Err(wrong("must return a pair of the loss and a dict of metrics"));
    };
    let mut metrics = Vec::with_capacity(entries.len());
    for (key, value) in entries {
        let Arg::Ref(node) = value else {
            return Err(wrong(&format!("metric {key:?} is not the value of a node")));
        };
        if !is_metric(key) {
            let form = "custom/ and 1 to 64 of [a-z0-9_./-], then :sum or :mean";
            return Err(wrong(&format!("metric {key:?} is not {form}")));
        }
        if metrics.iter().any(|(other, _)| other == key) {
            return Err(wrong(&format!("metric {key:?} is there twice")));
        }
        metrics.push((key.clone(), node.clone()));
    }
    Ok(Output { loss: loss.clone(), metrics })
}

fn is_metric(key: &str) -> bool {
    let inside = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"_./-".contains(&c);
    key.strip_prefix("custom/")
        .and_then(|rest| rest.strip_suffix(":sum").or_else(|| rest.strip_suffix(":mean")))
        .is_some_and(|name| (1..=64).contains(&name.len()) && name.bytes().all(inside))
}

pub(super) fn fault(node: &str, reason: impl Into<String>) -> Error {
    Error::Graph { node: node.to_owned(), reason: reason.into() }
}
