//! Running the nodes in their order.

use std::collections::HashMap;

use crate::arg::GraphArg;
use crate::array::{Kind, truth};
use crate::call::{Call, Value};
use crate::error::{Error, Result};
use crate::graph::{GraphInput, GraphNode, NodeOp};
use crate::operations::{canonical, lookup};
use crate::program::TensorView;
use crate::tape::{Tape, Var};
use crate::{elementwise, index, inspect, reduce, shape};

pub(crate) const NOT_SUPPORTED: &str = "the operation is not supported";

/// Values of the nodes, by name.
pub(crate) struct NodeValues<'a>(HashMap<&'a str, Value>);

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
            NodeOp::Placeholder => {
                let array = inputs[i].to_array(declared[i].rank);
                let var = if i == 0 { tape.leaf(array) } else { tape.constant(array) };
                var.map(Value::Tensor)
            }
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
            Some(Value::Number(number, _)) => Ok(*number),
            Some(Value::Tensor(var)) if tape.shape(*var).is_empty() => Ok(tape.get(*var).data[0]),
            Some(Value::Tensor(var)) => {
                let shape = tape.shape(*var);
                Err(Error::node(name, format!("has shape {shape:?}, expected a scalar")))
            }
            _ => Err(Error::node(name, "is not a number")),
        }
    }

    /// Returns the gradient of the node `loss` with respect to the node `input`.
    pub(crate) fn gradient(&self, tape: &Tape, loss: &str, input: &str) -> Vec<f32> {
        let (Some(Value::Tensor(input)), Some(loss)) = (self.0.get(input), self.0.get(loss)) else {
            return Vec::new();
        };
        #[expect(clippy::cast_possible_truncation, reason = "an infinite f32 is an error later")]
        match loss {
            Value::Tensor(loss) => {
                tape.gradient(*loss, *input).iter().map(|&slope| slope as f32).collect()
            }
            _ => vec![0.0; tape.get(*input).data.len()],
        }
    }

    fn call(&mut self, tape: &mut Tape, node: &'a GraphNode) -> Result<Value, String> {
        let operation = lookup(node.op, &node.target).ok_or(NOT_SUPPORTED)?;
        let args = node.args.iter().map(|arg| self.value(arg)).collect::<Result<_, _>>()?;
        let kwargs = node
            .kwargs
            .iter()
            .map(|(name, arg)| Ok((name.as_str(), self.value(arg)?)))
            .collect::<Result<_, String>>()?;
        let mut call = Call::new(tape, args, kwargs);
        let value = dispatch(canonical(operation.name), node.op, &mut call)?;
        call.finish()?;
        if operation.in_place
            && let Some(GraphArg::Ref(on)) = node.args.first()
            && let Some(held) = self.0.get_mut(on.as_str())
        {
            *held = value.clone();
        }
        Ok(value)
    }

    fn value(&self, arg: &GraphArg) -> Result<Value, String> {
        let all =
            |args: &[GraphArg]| args.iter().map(|arg| self.value(arg)).collect::<Result<_, _>>();
        Ok(match arg {
            GraphArg::None => Value::None,
            GraphArg::Bool(yes) => Value::Number(truth(*yes), Kind::Bool),
            GraphArg::Int(number) => Value::Number(*number as f64, Kind::Int),
            GraphArg::Float(number) => Value::Number(*number, Kind::Float),
            GraphArg::Text(text) => Value::Text(text.clone()),
            GraphArg::Ref(name) => {
                self.0.get(name.as_str()).cloned().ok_or_else(|| format!("no node {name:?}"))?
            }
            GraphArg::List(items) | GraphArg::Tuple(items) => Value::List(all(items)?),
            GraphArg::Dict(_) => return Err("a dict cannot be an argument".to_owned()),
            GraphArg::Slice(ends) => {
                let ends: Vec<Value> = all(&ends[..])?;
                let end = |i: usize| index::slice_end(&ends[i]);
                Value::Slice([end(0)?, end(1)?, end(2)?])
            }
            GraphArg::Ellipsis => Value::Ellipsis,
            GraphArg::DType(name) => Value::DType(
                Kind::from_name(name).ok_or_else(|| format!("the type {name:?} is not known"))?,
            ),
            GraphArg::Device(_) | GraphArg::Layout(_) | GraphArg::MemoryFormat(_) => Value::Ignored,
            GraphArg::Unknown(reason) => return Err(reason.clone()),
        })
    }
}

fn dispatch(name: &str, op: NodeOp, call: &mut Call<'_>) -> Result<Value, String> {
    if let Some(value) = arithmetic(name, call)? {
        return Ok(value);
    }
    if let Some(value) = inspect::run(name, op, call)? {
        return Ok(value);
    }
    for family in [elementwise::run, reduce::run, shape::run, index::run] {
        if let Some(value) = family(name, call)? {
            return Ok(value);
        }
    }
    Err(NOT_SUPPORTED.to_owned())
}

/// Operations of one or two numbers; two plain numbers give a plain number.
fn arithmetic(name: &str, call: &mut Call<'_>) -> Result<Option<Value>, String> {
    let one = |call: &mut Call<'_>| -> Result<(Var, bool), String> {
        let x = call.needed(0, "input")?;
        Ok((call.var(&x, "input")?, matches!(x, Value::Number(..))))
    };
    let (var, plain) = if let Some(f) = elementwise::unary(name) {
        let (x, plain) = one(call)?;
        (call.tape.unary(x, Kind::Float, f)?, plain)
    } else if let Some(f) = elementwise::unary_any(name) {
        let (x, plain) = one(call)?;
        let kind = call.tape.get(x).kind;
        (call.tape.unary(x, kind, f)?, plain)
    } else if let Some(f) = elementwise::question(name) {
        let (x, plain) = one(call)?;
        if name == "invert" && call.tape.get(x).kind != Kind::Bool {
            return Err("~ is for truth values".to_owned());
        }
        (call.tape.unary(x, Kind::Bool, |x| (truth(f(x)), 0.0))?, plain)
    } else if elementwise::binary(name).is_some() || elementwise::comparison(name).is_some() {
        let (a, b) = (call.needed(0, "input")?, call.needed(1, "other")?);
        let plain = matches!((&a, &b), (Value::Number(..), Value::Number(..)));
        let (a, b) = (call.var(&a, "input")?, call.var(&b, "other")?);
        (two(name, call, a, b)?, plain)
    } else if name == "matmul" {
        let (a, b) = (call.tensor(0, "input")?, call.tensor(1, "other")?);
        (matmul(call, a, b)?, false)
    } else {
        return Ok(None);
    };
    let array = call.tape.get(var);
    Ok(Some(match plain {
        true => Value::Number(array.data[0], array.kind),
        false => Value::Tensor(var),
    }))
}

fn two(name: &str, call: &mut Call<'_>, a: Var, b: Var) -> Result<Var, String> {
    let wider = elementwise::wider(call, a, b);
    if let Some(f) = elementwise::comparison(name) {
        if matches!(name, "and_" | "or_") && wider != Kind::Bool {
            return Err("& and | are for truth values".to_owned());
        }
        return call.tape.binary(a, b, Kind::Bool, |a, b| (truth(f(a, b)), 0.0, 0.0));
    }
    let f = elementwise::binary(name).ok_or(NOT_SUPPORTED)?;
    let factor = match name {
        "add" | "sub" => call.optional_number(usize::MAX, "alpha")?.unwrap_or(1.0),
        _ => 1.0,
    };
    let mode = match name {
        "div" => call.optional_text(usize::MAX, "rounding_mode")?,
        _ => None,
    };
    let kind = match (name, mode.as_deref()) {
        ("div", None) => Kind::Float,
        ("minimum" | "maximum", _) => wider,
        _ => wider.max(Kind::Int),
    };
    match mode.as_deref() {
        None => call.tape.binary(a, b, kind, |a, b| {
            let (value, by_a, by_b) = f(a, factor * b);
            (value, by_a, factor * by_b)
        }),
        Some("floor") => call.tape.binary(a, b, kind, |a, b| ((a / b).floor(), 0.0, 0.0)),
        Some("trunc") => call.tape.binary(a, b, kind, |a, b| ((a / b).trunc(), 0.0, 0.0)),
        Some(other) => Err(format!("rounding_mode {other:?} is not known")),
    }
}

/// Products of vectors and matrices, by stretching and summing: inputs here are small.
fn matmul(call: &mut Call<'_>, a: Var, b: Var) -> Result<Var, String> {
    let (sa, sb) = (call.tape.shape(a).to_vec(), call.tape.shape(b).to_vec());
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
    let all = call.tape.binary(a, b, Kind::Float, |a, b| (a * b, b, a))?;
    let total = {
        let dim = Value::Number(1.0, Kind::Int);
        let mut inner = Call::new(call.tape, vec![Value::Tensor(all), dim], Vec::new());
        match reduce::run("sum", &mut inner)? {
            Some(Value::Tensor(var)) => var,
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

    /// A name on the list that nothing answers to would pass the check and fail every run.
    #[test]
    fn every_name_on_the_list_is_answered() {
        let data: Vec<f64> = vec![0.25, 0.5, 0.75, 1.0];
        for name in OPERATORS.iter().chain(&FUNCTIONS) {
            let mut tape = Tape::default();
            let array = |kind| Array { shape: vec![2, 2], data: data.clone(), kind };
            let x = Value::Tensor(tape.leaf(array(Kind::Float)).unwrap());
            let mut call = Call::new(&mut tape, vec![x], Vec::new());
            // Arguments are missing for some; being unknown is what must not be said.
            if let Err(why) = dispatch(canonical(name), NodeOp::CallMethod, &mut call) {
                assert!(!why.contains(NOT_SUPPORTED), "{name}: {why}");
            }
        }
    }
}
