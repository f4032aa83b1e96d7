//! Questions about a tensor, changes of its type, and constants of its shape.

use crate::array::{Array, Kind};
use crate::call::{Call, Value, describe, dimension};
use crate::graph::NodeOp;
use crate::interpret::NOT_SUPPORTED;
use crate::shape;
use crate::tape::Var;

/// Such operations; `None` if there is none of this name.
pub(crate) fn run(name: &str, op: NodeOp, call: &mut Call<'_>) -> Result<Option<Value>, String> {
    let number = |n: usize| Value::Number(n as f64, Kind::Int);
    let sizes = |call: &Call<'_>, x: Var| {
        Value::List(call.tape.shape(x).iter().map(|&side| number(side)).collect())
    };
    let cast = |call: &mut Call<'_>, x: Var, kind: Kind| {
        call.tape.unary(x, kind, |x| (kind.hold(x), 1.0)).map(Value::Tensor)
    };
    Ok(Some(match name {
        "getattr" => {
            let (of, which) = (call.needed(0, "input")?, call.optional_text(1, "name")?);
            return attribute(call, &of, which.as_deref().unwrap_or_default()).map(Some);
        }
        "size" => {
            let x = call.tensor(0, "input")?;
            match (sizes(call, x), call.optional(1, "dim")) {
                (all, None) => all,
                (Value::List(all), Some(dim)) => {
                    let at = dimension(&dim, all.len())?;
                    all.get(at).cloned().ok_or("a single number has no sizes")?
                }
                (other, _) => other,
            }
        }
        "dim" => {
            let x = call.tensor(0, "input")?;
            number(call.tape.shape(x).len())
        }
        "numel" => {
            let x = call.tensor(0, "input")?;
            number(call.tape.get(x).data.len())
        }
        "detach" => {
            let x = call.tensor(0, "input")?;
            Value::Tensor(call.tape.detach(x)?)
        }
        "clone" | "contiguous" => Value::Tensor(call.tensor(0, "input")?),
        "requires_grad" => {
            call.optional(1, "requires_grad");
            Value::Tensor(call.tensor(0, "input")?)
        }
        "float" | "double" | "long" | "int" | "bool" if op == NodeOp::CallMethod => {
            let x = call.tensor(0, "input")?;
            let kind = Kind::from_name(name).ok_or(NOT_SUPPORTED)?;
            cast(call, x, kind)?
        }
        "to" => {
            let x = call.tensor(0, "input")?;
            let kind = match (call.optional(1, "other"), call.dtype()?) {
                (Some(Value::DType(kind)), _) | (_, Some(kind)) => kind,
                (Some(Value::Tensor(like)), _) => call.tape.get(like).kind,
                _ => call.tape.get(x).kind,
            };
            if let Some(Value::DType(kind)) = call.optional(2, "dtype") {
                return cast(call, x, kind).map(Some);
            }
            cast(call, x, kind)?
        }
        "type_as" => {
            let (x, like) = (call.tensor(0, "input")?, call.tensor(1, "other")?);
            let kind = call.tape.get(like).kind;
            cast(call, x, kind)?
        }
        "zeros_like" | "ones_like" | "full_like" => {
            let x = call.tensor(0, "input")?;
            let fill = match name {
                "zeros_like" => 0.0,
                "ones_like" => 1.0,
                _ => call.optional_number(1, "fill_value")?.ok_or("fill_value is missing")?,
            };
            let kind = call.dtype()?.unwrap_or(call.tape.get(x).kind);
            let shape = call.tape.shape(x).to_vec();
            let data = vec![kind.hold(fill); call.tape.get(x).data.len()];
            Value::Tensor(call.tape.constant(Array { shape, data, kind })?)
        }
        _ => return Ok(None),
    }))
}

fn attribute(call: &mut Call<'_>, of: &Value, which: &str) -> Result<Value, String> {
    if let (Value::List(items), "values" | "indices") = (of, which) {
        let at = usize::from(which == "indices");
        return items.get(at).cloned().ok_or_else(|| "there is no such part".to_owned());
    }
    let &Value::Tensor(x) = of else {
        return Err(format!("{} has no attribute {which:?}", describe(of)));
    };
    let array = call.tape.get(x);
    Ok(match which {
        "shape" => Value::List(
            array.shape.iter().map(|&side| Value::Number(side as f64, Kind::Int)).collect(),
        ),
        "ndim" => Value::Number(array.shape.len() as f64, Kind::Int),
        "dtype" => Value::DType(array.kind),
        "device" => Value::Ignored,
        "T" => {
            let mut inner = Call::new(call.tape, vec![Value::Tensor(x)], Vec::new());
            shape::run("T", &mut inner)?.ok_or(NOT_SUPPORTED)?
        }
        other => return Err(format!("the attribute {other:?} may not be used")),
    })
}
