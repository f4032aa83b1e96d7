//! Operations on metadata: shapes, element types, detached copies, and constants of a given shape.

use crate::array::{Array, ElementKind};
use crate::call::{CallArgs, NodeValue, describe, dimension};
use crate::graph::NodeOp;
use crate::operations::NOT_SUPPORTED;
use crate::shape;
use crate::tape::Var;

/// Runs the metadata operation `name`; returns `None` if `name` is no metadata operation.
pub(crate) fn run(
    name: &str,
    op: NodeOp,
    call: &mut CallArgs<'_>,
) -> Result<Option<NodeValue>, String> {
    let cast = |call: &mut CallArgs<'_>, x: Var, kind: ElementKind| {
        call.tape.unary(x, kind, |x| (kind.cast(x), 1.0)).map(NodeValue::Tensor)
    };
    Ok(Some(match name {
        "getattr" => {
            let object = call.required(0, "input")?;
            let name = call.optional_text(1, "name")?;
            return attribute(call, &object, name.as_deref().unwrap_or_default()).map(Some);
        }
        "size" => {
            let x = call.tensor(0, "input")?;
            let shape = call.tape.shape(x).to_vec();
            match call.optional(1, "dim") {
                None => sizes(&shape),
                Some(dim) => {
                    let at = dimension(&dim, shape.len())?;
                    count(*shape.get(at).ok_or("a scalar has no dimensions")?)
                }
            }
        }
        "dim" => {
            let x = call.tensor(0, "input")?;
            count(call.tape.shape(x).len())
        }
        "numel" => {
            let x = call.tensor(0, "input")?;
            count(call.tape.get(x).data.len())
        }
        "detach" => {
            let x = call.tensor(0, "input")?;
            NodeValue::Tensor(call.tape.detach(x)?)
        }
        "clone" | "contiguous" => NodeValue::Tensor(call.tensor(0, "input")?),
        "requires_grad" => {
            call.optional(1, "requires_grad");
            NodeValue::Tensor(call.tensor(0, "input")?)
        }
        "float" | "double" | "long" | "int" | "bool" if op == NodeOp::CallMethod => {
            let x = call.tensor(0, "input")?;
            let kind = ElementKind::from_name(name).ok_or(NOT_SUPPORTED)?;
            cast(call, x, kind)?
        }
        "to" => {
            let x = call.tensor(0, "input")?;
            let kind = match (call.optional(1, "other"), call.dtype()?) {
                (Some(NodeValue::DType(kind)), _) | (_, Some(kind)) => kind,
                (Some(NodeValue::Tensor(like)), _) => call.tape.get(like).kind,
                _ => call.tape.get(x).kind,
            };
            if let Some(NodeValue::DType(kind)) = call.optional(2, "dtype") {
                return cast(call, x, kind).map(Some);
            }
            cast(call, x, kind)?
        }
        "type_as" => {
            let x = call.tensor(0, "input")?;
            let like = call.tensor(1, "other")?;
            let kind = call.tape.get(like).kind;
            cast(call, x, kind)?
        }
        "zeros_like" | "ones_like" | "full_like" => {
            let x = call.tensor(0, "input")?;
            let fill = match name {
                "zeros_like" => 0.0,
                "ones_like" => 1.0,
                _ => call
                    .optional_number(1, "fill_value")?
                    .ok_or("argument fill_value is missing")?,
            };
            let kind = call.dtype()?.unwrap_or(call.tape.get(x).kind);
            let shape = call.tape.shape(x).to_vec();
            let data = vec![kind.cast(fill); call.tape.check_size(&shape)?];
            NodeValue::Tensor(call.tape.constant(Array { shape, data, kind })?)
        }
        _ => return Ok(None),
    }))
}

/// Returns a count as a value.
fn count(n: usize) -> NodeValue {
    NodeValue::Number(n as f64, ElementKind::Int)
}

/// Returns a shape as a list of its sizes.
fn sizes(shape: &[usize]) -> NodeValue {
    NodeValue::list(shape.iter().map(|&size| count(size)).collect())
}

/// Returns an attribute of a tensor, or of the result of `max` or `min` along a dimension.
fn attribute(call: &mut CallArgs<'_>, object: &NodeValue, name: &str) -> Result<NodeValue, String> {
    if let NodeValue::List(items) = object
        && matches!(name, "values" | "indices")
    {
        let at = usize::from(name == "indices");
        return items.get(at).cloned().ok_or_else(|| format!("the list has no attribute {name:?}"));
    }
    let &NodeValue::Tensor(x) = object else {
        return Err(format!("{} has no attribute {name:?}", describe(object)));
    };
    let array = call.tape.get(x);
    Ok(match name {
        "shape" => sizes(&array.shape),
        "ndim" => count(array.shape.len()),
        "dtype" => NodeValue::DType(array.kind),
        "device" => NodeValue::Ignored,
        "T" => {
            let mut inner = CallArgs::new(call.tape, vec![NodeValue::Tensor(x)], Vec::new());
            shape::run("T", &mut inner)?.ok_or(NOT_SUPPORTED)?
        }
        other => return Err(format!("attribute {other:?} is not supported")),
    })
}
