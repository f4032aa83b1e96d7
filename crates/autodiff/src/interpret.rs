//! Execution of the nodes of a graph.

use std::collections::HashMap;

use crate::arg::GraphArg;
use crate::array::ElementKind;
use crate::call::{CallArgs, KEYWORD_ONLY, NodeValue};
use crate::error::{Error, Result};
use crate::graph::{GraphInput, GraphNode, NodeOp};
use crate::operations::{NOT_SUPPORTED, canonical, lookup};
use crate::program::TensorView;
use crate::tape::{Tape, Var};
use crate::{elementwise, index, inspect, reduce, shape};

/// Values of the nodes, by name.
pub(crate) struct NodeValues<'a>(HashMap<&'a str, NodeValue>);

/// Runs `nodes` in order. The graph and the inputs have been validated.
pub(crate) fn run<'a>(
    nodes: &'a [GraphNode],
    declared: &[GraphInput],
    tape: &mut Tape,
    inputs: &[TensorView<'_>],
) -> Result<NodeValues<'a>> {
    let mut values = NodeValues(HashMap::with_capacity(nodes.len()));
    for (i, node) in nodes.iter().enumerate() {
        let value = match node.op {
            NodeOp::Output | NodeOp::GetAttr | NodeOp::CallModule => continue,
            NodeOp::Placeholder => tape.check_size(inputs[i].shape).and_then(|_| {
                let array = inputs[i].to_array(declared[i].rank);
                let var = if i == 0 { tape.leaf(array) } else { tape.constant(array) };
                var.map(NodeValue::Tensor)
            }),
            NodeOp::CallFunction | NodeOp::CallMethod => values.call(tape, node),
        };
        let value = value
            .map_err(|reason| Error::node(&node.name, format!("{}: {reason}", node.target)))?;
        values.0.insert(&node.name, value);
    }
    Ok(values)
}

impl<'a> NodeValues<'a> {
    /// Returns the value of a node that must be a scalar.
    pub(crate) fn scalar(&self, tape: &Tape, name: &str) -> Result<f64> {
        match self.0.get(name) {
            Some(NodeValue::Number(number, _)) => Ok(*number),
            Some(NodeValue::Tensor(var)) if tape.shape(*var).is_empty() => {
                Ok(tape.get(*var).data[0])
            }
            Some(NodeValue::Tensor(var)) => {
                let shape = tape.shape(*var);
                Err(Error::node(name, format!("has shape {shape:?}, expected a scalar")))
            }
            _ => Err(Error::node(name, "is not a number")),
        }
    }

    /// Returns the gradient of the node `loss` with respect to the node `input`.
    pub(crate) fn gradient(&self, tape: &Tape, loss: &str, input: &str) -> Vec<f32> {
        let Some(NodeValue::Tensor(input)) = self.0.get(input) else { return Vec::new() };
        let Some(loss) = self.0.get(loss) else { return Vec::new() };
        #[expect(clippy::cast_possible_truncation, reason = "`evaluate` rejects an infinite f32")]
        match loss {
            NodeValue::Tensor(loss) => {
                tape.gradient(*loss, *input).iter().map(|&slope| slope as f32).collect()
            }
            _ => vec![0.0; tape.get(*input).data.len()],
        }
    }

    /// Runs one operation. An in-place operation also replaces the value of its receiver.
    fn call(&mut self, tape: &mut Tape, node: &'a GraphNode) -> Result<NodeValue, String> {
        let operation = lookup(node.op, &node.target).ok_or(NOT_SUPPORTED)?;
        let args = node.args.iter().map(|arg| self.value(arg)).collect::<Result<_, _>>()?;
        let kwargs = node
            .kwargs
            .iter()
            .map(|(name, arg)| Ok((name.as_str(), self.value(arg)?)))
            .collect::<Result<_, String>>()?;
        let mut call = CallArgs::new(tape, args, kwargs);
        let value = dispatch(canonical(operation.name), node.op, &mut call)?;
        call.finish()?;
        if operation.in_place
            && let Some(GraphArg::Ref(receiver)) = node.args.first()
            && let Some(receiver) = self.0.get_mut(receiver.as_str())
        {
            *receiver = value.clone();
        }
        Ok(value)
    }

    /// Evaluates an argument.
    fn value(&self, arg: &GraphArg) -> Result<NodeValue, String> {
        let all =
            |args: &[GraphArg]| args.iter().map(|arg| self.value(arg)).collect::<Result<_, _>>();
        Ok(match arg {
            GraphArg::None => NodeValue::None,
            GraphArg::Bool(flag) => NodeValue::Number(f64::from(*flag), ElementKind::Bool),
            GraphArg::Int(number) => NodeValue::Number(*number as f64, ElementKind::Int),
            GraphArg::Float(number) => NodeValue::Number(*number, ElementKind::Float),
            GraphArg::Text(text) => NodeValue::Text(text.clone()),
            GraphArg::Ref(name) => {
                self.0.get(name.as_str()).cloned().ok_or_else(|| format!("no node {name:?}"))?
            }
            GraphArg::List(items) | GraphArg::Tuple(items) => NodeValue::list(all(items)?),
            GraphArg::Dict(_) => return Err("a dict is not a valid argument".to_owned()),
            GraphArg::Slice(parts) => {
                let parts: Vec<NodeValue> = all(&parts[..])?;
                let part = |i: usize| index::slice_part(&parts[i]);
                NodeValue::Slice([part(0)?, part(1)?, part(2)?])
            }
            GraphArg::Ellipsis => NodeValue::Ellipsis,
            GraphArg::DType(name) => NodeValue::DType(
                ElementKind::from_name(name).ok_or_else(|| format!("unknown dtype {name:?}"))?,
            ),
            GraphArg::Device(_) | GraphArg::Layout(_) | GraphArg::MemoryFormat(_) => {
                NodeValue::Ignored
            }
            GraphArg::Unknown { reason, .. } => return Err(reason.clone()),
        })
    }
}

/// Runs the operation `name` in the first module that implements it.
fn dispatch(name: &str, op: NodeOp, call: &mut CallArgs<'_>) -> Result<NodeValue, String> {
    if let Some(value) = arithmetic(name, call)? {
        return Ok(value);
    }
    if let Some(value) = inspect::run(name, op, call)? {
        return Ok(value);
    }
    for run in [elementwise::run, reduce::run, shape::run, index::run] {
        if let Some(value) = run(name, call)? {
            return Ok(value);
        }
    }
    Err(NOT_SUPPORTED.to_owned())
}

/// Runs the operation `name`, if it is an element-wise operation of one or two operands or
/// `matmul`; otherwise returns `None`. An operation on numbers yields a number, not a tensor.
fn arithmetic(name: &str, call: &mut CallArgs<'_>) -> Result<Option<NodeValue>, String> {
    let operand = |call: &mut CallArgs<'_>| -> Result<(Var, bool), String> {
        let x = call.required(0, "input")?;
        Ok((call.var(&x, "input")?, matches!(x, NodeValue::Number(..))))
    };
    let (var, is_number) = if let Some(f) = elementwise::unary(name) {
        let (x, is_number) = operand(call)?;
        (call.tape.unary(x, ElementKind::Float, f)?, is_number)
    } else if let Some(f) = elementwise::unary_same_kind(name) {
        let (x, is_number) = operand(call)?;
        let kind = call.tape.get(x).kind;
        (call.tape.unary(x, kind, f)?, is_number)
    } else if let Some(f) = elementwise::predicate(name) {
        let (x, is_number) = operand(call)?;
        if name == "invert" && call.tape.get(x).kind != ElementKind::Bool {
            return Err("~ needs a boolean tensor".to_owned());
        }
        (call.tape.unary(x, ElementKind::Bool, |x| (f64::from(f(x)), 0.0))?, is_number)
    } else if elementwise::binary(name).is_some() || elementwise::comparison(name).is_some() {
        let a = call.required(0, "input")?;
        let b = call.required(1, "other")?;
        let is_number = matches!((&a, &b), (NodeValue::Number(..), NodeValue::Number(..)));
        let a = call.var(&a, "input")?;
        let b = call.var(&b, "other")?;
        (binary(name, call, a, b)?, is_number)
    } else if name == "matmul" {
        let a = call.tensor(0, "input")?;
        let b = call.tensor(1, "other")?;
        (matmul(call, a, b)?, false)
    } else {
        return Ok(None);
    };
    let array = call.tape.get(var);
    Ok(Some(if is_number {
        NodeValue::Number(array.data[0], array.kind)
    } else {
        NodeValue::Tensor(var)
    }))
}

fn binary(name: &str, call: &mut CallArgs<'_>, a: Var, b: Var) -> Result<Var, String> {
    let promoted = elementwise::promoted(call, a, b);
    if let Some(f) = elementwise::comparison(name) {
        if matches!(name, "and_" | "or_") && promoted != ElementKind::Bool {
            return Err("& and | need boolean tensors".to_owned());
        }
        return call.tape.binary(a, b, ElementKind::Bool, |a, b| (f64::from(f(a, b)), 0.0, 0.0));
    }
    let f = elementwise::binary(name).ok_or(NOT_SUPPORTED)?;
    let factor = match name {
        "add" | "sub" => call.optional_number(KEYWORD_ONLY, "alpha")?.unwrap_or(1.0),
        _ => 1.0,
    };
    let mode = match name {
        "div" => call.optional_text(KEYWORD_ONLY, "rounding_mode")?,
        _ => None,
    };
    let kind = match (name, mode.as_deref()) {
        ("div", None) => ElementKind::Float,
        ("minimum" | "maximum", _) => promoted,
        _ => promoted.max(ElementKind::Int),
    };
    match mode.as_deref() {
        None => call.tape.binary(a, b, kind, |a, b| {
            let (value, by_a, by_b) = f(a, factor * b);
            (value, by_a, factor * by_b)
        }),
        Some("floor") => call.tape.binary(a, b, kind, |a, b| ((a / b).floor(), 0.0, 0.0)),
        Some("trunc") => call.tape.binary(a, b, kind, |a, b| ((a / b).trunc(), 0.0, 0.0)),
        Some(other) => Err(format!("unknown rounding_mode {other:?}")),
    }
}

/// Multiplies vectors and matrices by broadcasting and summing. The inputs of a loss are too small
/// to justify a dedicated kernel.
fn matmul(call: &mut CallArgs<'_>, a: Var, b: Var) -> Result<Var, String> {
    let sa = call.tape.shape(a).to_vec();
    let sb = call.tape.shape(b).to_vec();
    let ((rows, inner), (depth, columns)) = match (sa.as_slice(), sb.as_slice()) {
        (&[n], &[m]) => ((1, n), (m, 1)),
        (&[r, n], &[m]) => ((r, n), (m, 1)),
        (&[n], &[m, c]) => ((1, n), (m, c)),
        (&[r, n], &[m, c]) => ((r, n), (m, c)),
        _ => return Err(format!("shapes {sa:?} and {sb:?} cannot be multiplied")),
    };
    if inner != depth {
        return Err(format!("shapes {sa:?} and {sb:?} cannot be multiplied"));
    }
    let a = call.tape.reshaped(a, vec![rows, inner, 1])?;
    let b = call.tape.reshaped(b, vec![1, inner, columns])?;
    let products = call.tape.binary(a, b, ElementKind::Float, |a, b| (a * b, b, a))?;
    let total = {
        let dim = NodeValue::Number(1.0, ElementKind::Int);
        let mut inner =
            CallArgs::new(call.tape, vec![NodeValue::Tensor(products), dim], Vec::new());
        match reduce::run("sum", &mut inner)? {
            Some(NodeValue::Tensor(var)) => var,
            _ => return Err(NOT_SUPPORTED.to_owned()),
        }
    };
    let mut shape = Vec::new();
    if sa.len() == 2 {
        shape.push(rows);
    }
    if sb.len() == 2 {
        shape.push(columns);
    }
    call.tape.reshaped(total, shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::Array;
    use crate::operations::{FUNCTIONS, OPERATORS};

    /// A listed name without an implementation would pass validation and fail every evaluation.
    #[test]
    fn every_listed_operation_is_implemented() {
        let data: Vec<f64> = vec![0.25, 0.5, 0.75, 1.0];
        for name in OPERATORS.iter().chain(&FUNCTIONS) {
            let mut tape = Tape::new(1 << 20);
            let array = |kind| Array { shape: vec![2, 2], data: data.clone(), kind };
            let x = NodeValue::Tensor(tape.leaf(array(ElementKind::Float)).unwrap());
            let mut call = CallArgs::new(&mut tape, vec![x], Vec::new());
            // Some operations need more arguments; only "not supported" is a failure here.
            if let Err(reason) = dispatch(canonical(name), NodeOp::CallMethod, &mut call) {
                assert!(!reason.contains(NOT_SUPPORTED), "{name}: {reason}");
            }
        }
    }
}
