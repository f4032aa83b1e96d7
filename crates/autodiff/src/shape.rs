//! Operations that rearrange elements.

use crate::array::{Array, ElementKind, StridedView, element_count, strides};
use crate::call::{CallArgs, NodeValue, dimension, dimensions, integer};
use crate::tape::{LocalGradient, Var};

/// Runs the shape operation `name`; returns `None` if `name` is no shape operation.
pub(crate) fn run(name: &str, call: &mut CallArgs<'_>) -> Result<Option<NodeValue>, String> {
    let var = match name {
        "reshape" | "view" => {
            let x = call.tensor(0, "input")?;
            let sizes = call.rest(1, "shape").unwrap_or_default();
            let shape = inferred_shape(&sizes, call.tape.get(x).data.len())?;
            call.tape.reshaped(x, shape)
        }
        "flatten" => flatten(call),
        "squeeze" => {
            let x = call.tensor(0, "input")?;
            let dim = call.optional(1, "dim");
            let shape = call.tape.shape(x).to_vec();
            let dims = dimensions(dim, shape.len())?;
            let kept = (0..shape.len()).filter(|i| shape[*i] != 1 || !dims.contains(i));
            let kept = kept.map(|i| shape[i]).collect();
            call.tape.reshaped(x, kept)
        }
        "unsqueeze" => {
            let x = call.tensor(0, "input")?;
            let dim = call.required(1, "dim")?;
            let mut shape = call.tape.shape(x).to_vec();
            let dim = dimension(&dim, shape.len() + 1)?;
            shape.insert(dim, 1);
            call.tape.reshaped(x, shape)
        }
        "transpose" | "t" | "T" => {
            let x = call.tensor(0, "input")?;
            let rank = call.tape.shape(x).len();
            let mut order: Vec<usize> = (0..rank).collect();
            if name == "transpose" {
                let a = call.required(1, "dim0")?;
                let b = call.required(2, "dim1")?;
                let a = dimension(&a, rank)?;
                let b = dimension(&b, rank)?;
                if rank > 0 {
                    order.swap(a, b);
                }
            } else if rank > 2 {
                return Err("T needs a tensor of rank 2 or less".to_owned());
            } else {
                order.reverse();
            }
            permuted(call, x, &order)
        }
        "permute" => {
            let x = call.tensor(0, "input")?;
            let rank = call.tape.shape(x).len();
            let order = call.rest(1, "dims").unwrap_or_default();
            let order: Vec<usize> =
                order.iter().map(|dim| dimension(dim, rank)).collect::<Result<_, _>>()?;
            let mut sorted = order.clone();
            sorted.sort_unstable();
            if sorted != (0..rank).collect::<Vec<_>>() {
                return Err(format!("{order:?} is not a permutation of {rank} dimensions"));
            }
            permuted(call, x, &order)
        }
        "expand" => expand(call),
        "expand_as" => {
            let x = call.tensor(0, "input")?;
            let like = call.tensor(1, "other")?;
            let shape = call.tape.shape(like).to_vec();
            call.tape.broadcast_to(x, &shape)
        }
        "stack" | "cat" | "concat" => join(name == "stack", call),
        "flip" => {
            let x = call.tensor(0, "input")?;
            let shape = call.tape.shape(x).to_vec();
            let dims = call.rest(1, "dims").map(NodeValue::list);
            let dims = dimensions(dims, shape.len())?;
            let source_strides = strides(&shape);
            let start =
                dims.iter().map(|&dim| source_strides[dim] * shape[dim].saturating_sub(1)).sum();
            let steps: Vec<isize> = source_strides
                .iter()
                .enumerate()
                .map(|(i, step)| step.cast_signed() * if dims.contains(&i) { -1 } else { 1 })
                .collect();
            call.tape.gather(x, StridedView::new(shape.clone(), start, steps), shape)
        }
        "roll" => roll(call),
        _ => return Ok(None),
    };
    var.map(|var| Some(NodeValue::Tensor(var)))
}

/// Returns the shape of a tensor of `count` elements. One size may be -1 and is then inferred.
fn inferred_shape(sizes: &[NodeValue], count: usize) -> Result<Vec<usize>, String> {
    let sizes: Vec<i64> = sizes.iter().map(integer).collect::<Result<_, _>>()?;
    let mismatch = || format!("{count} elements do not fill the shape {sizes:?}");
    let mut inferred = None;
    let mut shape = Vec::with_capacity(sizes.len());
    for (i, &size) in sizes.iter().enumerate() {
        shape.push(match size {
            -1 if inferred.replace(i).is_none() => 1,
            size => usize::try_from(size).map_err(|_| mismatch())?,
        });
    }
    let known = element_count(&shape).ok_or_else(mismatch)?;
    if let Some(i) = inferred {
        shape[i] = count.checked_div(known).ok_or_else(mismatch)?;
    }
    if element_count(&shape) == Some(count) { Ok(shape) } else { Err(mismatch()) }
}

fn flatten(call: &mut CallArgs<'_>) -> Result<Var, String> {
    let x = call.tensor(0, "input")?;
    let from = call.optional(1, "start_dim");
    let to = call.optional(2, "end_dim");
    let shape = call.tape.shape(x).to_vec();
    let from = from.map_or(Ok(0), |dim| dimension(&dim, shape.len()))?;
    let to = to.map_or(Ok(shape.len().saturating_sub(1)), |dim| dimension(&dim, shape.len()))?;
    if from > to {
        return Err("start_dim is greater than end_dim".to_owned());
    }
    let flat = match shape.get(from..=to) {
        None => vec![1],
        Some(middle) => {
            let middle = middle.iter().product();
            [&shape[..from], &[middle], &shape[to + 1..]].concat()
        }
    };
    call.tape.reshaped(x, flat)
}

/// Reorders the dimensions of a tensor.
fn permuted(call: &mut CallArgs<'_>, x: Var, order: &[usize]) -> Result<Var, String> {
    let shape = call.tape.shape(x).to_vec();
    let source_strides = strides(&shape);
    let permuted_shape: Vec<usize> = order.iter().map(|&dim| shape[dim]).collect();
    let steps: Vec<isize> = order.iter().map(|&dim| source_strides[dim].cast_signed()).collect();
    let view = StridedView::new(permuted_shape.clone(), 0, steps);
    call.tape.gather(x, view, permuted_shape)
}

fn expand(call: &mut CallArgs<'_>) -> Result<Var, String> {
    let x = call.tensor(0, "input")?;
    let sizes = call.rest(1, "size").unwrap_or_default();
    let sizes: Vec<i64> = sizes.iter().map(integer).collect::<Result<_, _>>()?;
    let source_shape = call.tape.shape(x);
    let Some(missing) = sizes.len().checked_sub(source_shape.len()) else {
        return Err(format!("shape {source_shape:?} cannot be expanded to {sizes:?}"));
    };
    let shape: Vec<usize> = sizes
        .iter()
        .enumerate()
        .map(|(i, &size)| match (size, i.checked_sub(missing)) {
            (-1, Some(i)) => Ok(source_shape[i]),
            _ => usize::try_from(size).map_err(|_| format!("{size} is not a valid size")),
        })
        .collect::<Result<_, _>>()?;
    call.tape.broadcast_to(x, &shape)
}

/// Concatenates tensors along a new dimension (`stack`) or an existing one (`cat`).
fn join(stack: bool, call: &mut CallArgs<'_>) -> Result<Var, String> {
    let NodeValue::List(items) = call.required(0, "tensors")? else {
        return Err("argument tensors is not a list".to_owned());
    };
    let dim = call.optional(1, "dim").unwrap_or(NodeValue::Number(0.0, ElementKind::Int));
    let mut parts = Vec::with_capacity(items.len());
    for item in items.iter() {
        parts.push(call.var(item, "tensors")?);
    }
    let Some(&first) = parts.first() else {
        return Err("the list of tensors is empty".to_owned());
    };
    let like = call.tape.shape(first).to_vec();
    let dim = dimension(&dim, like.len() + usize::from(stack))?;
    if !stack && like.is_empty() {
        return Err("scalars cannot be concatenated; use stack".to_owned());
    }
    let mut joined = 0_usize;
    let mut kind = ElementKind::Bool;
    for &part in &parts {
        let shape = call.tape.shape(part);
        let fits = if stack {
            shape == like
        } else {
            shape.len() == like.len() && (0..like.len()).all(|i| i == dim || shape[i] == like[i])
        };
        if !fits {
            return Err(format!("shapes {like:?} and {shape:?} cannot be concatenated"));
        }
        joined += if stack { 1 } else { shape[dim] };
        kind = kind.max(call.tape.get(part).kind);
    }
    let mut shape = like.clone();
    if stack {
        shape.insert(dim, joined);
    } else {
        shape[dim] = joined;
    }
    let count = call.tape.check_size(&shape)?;
    // The result is a sequence of `outer` blocks, each of one contiguous piece of every part.
    let outer: usize = shape[..dim].iter().product();
    let block: usize = shape[dim..].iter().product();
    let mut data = Vec::with_capacity(count);
    for at in 0..outer {
        for &part in &parts {
            let source = &call.tape.get(part).data;
            let length = source.len() / outer;
            data.extend_from_slice(&source[at * length..(at + 1) * length]);
        }
    }
    let mut start = 0;
    let operands = parts.into_iter().map(|part| {
        let length = call.tape.get(part).data.len().checked_div(outer).unwrap_or(0);
        let strides = vec![block.cast_signed(), 1];
        let view = StridedView::new(vec![outer, length], start, strides);
        start += length;
        (part, LocalGradient::Reduce(view, None))
    });
    let operands = operands.collect();
    call.tape.derive(Array { shape, data, kind }, operands)
}

fn roll(call: &mut CallArgs<'_>) -> Result<Var, String> {
    let x = call.tensor(0, "input")?;
    let shifts = match call.required(1, "shifts")? {
        NodeValue::List(items) => items.to_vec(),
        one => vec![one],
    };
    let shape = call.tape.shape(x).to_vec();
    let dims = match call.optional(2, "dims") {
        Some(NodeValue::List(items)) => items.to_vec(),
        Some(one) => vec![one],
        None => {
            // Without dims the flattened tensor is rolled.
            let flat = call.tape.reshaped(x, vec![call.tape.get(x).data.len()])?;
            let rolled = match shifts.as_slice() {
                [shift] => roll_dimension(call, flat, integer(shift)?, 0)?,
                _ => return Err("several shifts need dims".to_owned()),
            };
            return call.tape.reshaped(rolled, shape);
        }
    };
    if dims.len() != shifts.len() {
        return Err("the numbers of shifts and dims differ".to_owned());
    }
    let mut x = x;
    for (shift, dim) in shifts.iter().zip(&dims) {
        x = roll_dimension(call, x, integer(shift)?, dimension(dim, shape.len())?)?;
    }
    Ok(x)
}

/// Rolls one dimension by `shift` elements.
fn roll_dimension(call: &mut CallArgs<'_>, x: Var, shift: i64, dim: usize) -> Result<Var, String> {
    let shape = call.tape.shape(x).to_vec();
    let Some(&length) = shape.get(dim) else { return Ok(x) };
    if length == 0 {
        return Ok(x);
    }
    let step = strides(&shape)[dim];
    let too_long = |_| format!("a dimension of length {length} cannot be rolled");
    let signed_length = i64::try_from(length).map_err(too_long)?;
    let back = usize::try_from((-shift).rem_euclid(signed_length)).map_err(too_long)?;
    let count = call.tape.get(x).data.len();
    call.tape.check_words(2 * count)?;
    let rolled = |at: usize| {
        let index = at / step % length;
        at - index * step + (index + back) % length * step
    };
    call.tape.gather(x, (0..count).map(rolled).collect::<Vec<_>>(), shape)
}
