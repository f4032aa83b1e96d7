//! Indexing and gathering.

use crate::array::{ElementKind, StridedView, strides};
use crate::call::{CallArgs, NodeValue, describe, dimension, integer};
use crate::tape::Var;

/// Number of 8-byte words of an item of a list.
const LIST_ITEM_WORDS: usize = size_of::<NodeValue>() / 8;

/// Runs the indexing operation `name`; returns `None` if `name` is no indexing operation.
pub(crate) fn run(name: &str, call: &mut CallArgs<'_>) -> Result<Option<NodeValue>, String> {
    match name {
        "getitem" => {
            let input = call.required(0, "input")?;
            let index = call.index();
            match input {
                NodeValue::List(items) => list_item(call, &items, &index).map(Some),
                NodeValue::Tensor(x) => {
                    tensor_item(call, x, index).map(|x| Some(NodeValue::Tensor(x)))
                }
                other => Err(format!("{} has no items", describe(&other))),
            }
        }
        "gather" => {
            let x = call.tensor(0, "input")?;
            let dim = call.required(1, "dim")?;
            let index = call.tensor(2, "index")?;
            gather(call, x, &dim, index).map(|x| Some(NodeValue::Tensor(x)))
        }
        "index_select" => {
            let x = call.tensor(0, "input")?;
            let rank = call.tape.shape(x).len();
            let dim = dimension(&call.required(1, "dim")?, rank)?;
            let index = call.tensor(2, "index")?;
            index_select(call, x, dim, index).map(|x| Some(NodeValue::Tensor(x)))
        }
        _ => Ok(None),
    }
}

impl CallArgs<'_> {
    /// Takes the index of `getitem`. `None` is valid: `x[None]` adds a dimension of length 1.
    fn index(&mut self) -> NodeValue {
        self.optional(1, "index").unwrap_or(NodeValue::None)
    }
}

/// Indexes a list, such as a shape.
fn list_item(
    call: &mut CallArgs<'_>,
    items: &[NodeValue],
    index: &NodeValue,
) -> Result<NodeValue, String> {
    match index {
        NodeValue::Slice(slice) => {
            let (start, step, count) = range(slice, items.len())?;
            let at = |i: usize| start.wrapping_add_signed(step.wrapping_mul(i.cast_signed()));
            call.tape.reserve(count.saturating_mul(LIST_ITEM_WORDS))?;
            Ok(NodeValue::list((0..count).map(|i| items[at(i)].clone()).collect()))
        }
        index => {
            let at = checked_index(integer(index)? as f64, items.len())?;
            Ok(items[at].clone())
        }
    }
}

/// Indexes a tensor by integers, slices, `...`, `None`, and at most one integer or boolean tensor.
fn tensor_item(call: &mut CallArgs<'_>, x: Var, index: NodeValue) -> Result<Var, String> {
    let parts = match index {
        NodeValue::List(parts) => parts.to_vec(),
        one => vec![one],
    };
    if let [NodeValue::Tensor(mask)] = parts.as_slice()
        && call.tape.get(*mask).kind == ElementKind::Bool
    {
        return masked(call, x, *mask);
    }
    let shape = call.tape.shape(x).to_vec();
    let indexed =
        parts.iter().filter(|part| !matches!(part, NodeValue::None | NodeValue::Ellipsis)).count();
    let Some(unindexed) = shape.len().checked_sub(indexed) else {
        return Err(format!("{indexed} indices are too many for a tensor of rank {}", shape.len()));
    };
    let source_strides = strides(&shape);
    let mut sizes = Vec::new();
    let mut steps = Vec::new();
    let mut start = 0_usize;
    let mut tensor_index = None;
    let mut dim = 0;
    let mut unindexed = Some(unindexed);
    let mut parts: Vec<NodeValue> = parts;
    if !parts.iter().any(|part| matches!(part, NodeValue::Ellipsis)) {
        parts.push(NodeValue::Ellipsis);
    }
    for part in parts {
        match part {
            NodeValue::None => {
                sizes.push(1);
                steps.push(0);
                continue;
            }
            NodeValue::Ellipsis => {
                let count = unindexed.take().ok_or("an index has at most one ellipsis")?;
                for _ in 0..count {
                    sizes.push(shape[dim]);
                    steps.push(source_strides[dim].cast_signed());
                    dim += 1;
                }
                continue;
            }
            NodeValue::Slice(slice) => {
                let (from, step, count) = range(&slice, shape[dim])?;
                start += from * source_strides[dim];
                sizes.push(count);
                steps.push(step * source_strides[dim].cast_signed());
            }
            NodeValue::Tensor(index) => {
                if tensor_index.replace((sizes.len(), index)).is_some() {
                    return Err("an index has at most one tensor".to_owned());
                }
                sizes.push(shape[dim]);
                steps.push(source_strides[dim].cast_signed());
            }
            number => {
                let at = checked_index(integer(&number)? as f64, shape[dim])?;
                start += at * source_strides[dim];
            }
        }
        dim += 1;
    }
    let x = call.tape.gather(x, StridedView::new(sizes.clone(), start, steps), sizes)?;
    match tensor_index {
        None => Ok(x),
        Some((dim, index)) => index_select(call, x, dim, index),
    }
}

/// Returns start, step and count of a slice of a list or dimension of this length, as Python
/// defines them. The step must be positive, as in torch.
fn range(slice: &[Option<i64>; 3], length: usize) -> Result<(usize, isize, usize), String> {
    let [start, stop, step] = *slice;
    let step = step.unwrap_or(1);
    if step < 1 {
        return Err(format!("slice step {step} is not positive"));
    }
    let too_long = |_| format!("a dimension of length {length} cannot be sliced");
    let signed_length = i64::try_from(length).map_err(too_long)?;
    let clamp = |at: i64| {
        if at < 0 { at.saturating_add(signed_length).max(0) } else { at.min(signed_length) }
    };
    let from = clamp(start.unwrap_or(0));
    let to = clamp(stop.unwrap_or(signed_length));
    let count = if to > from { (to - from - 1) / step + 1 } else { 0 };
    let unsigned = |n: i64| usize::try_from(n).map_err(too_long);
    // A larger step selects the same single element, and could overflow in products with strides.
    let step = isize::try_from(step.min(signed_length.max(1))).map_err(too_long)?;
    // An empty slice may start at `length`, which is not a valid position.
    Ok((unsigned(from)?.min(length.saturating_sub(1)), step, unsigned(count)?))
}

/// Returns the elements where the mask is true. The dimensions of the mask become one dimension.
fn masked(call: &mut CallArgs<'_>, x: Var, mask: Var) -> Result<Var, String> {
    let shape = call.tape.shape(x);
    let mask = call.tape.get(mask);
    if !shape.starts_with(&mask.shape) {
        return Err(format!(
            "mask of shape {:?} does not fit a tensor of shape {shape:?}",
            mask.shape
        ));
    }
    let rest = &shape[mask.shape.len()..];
    let block: usize = rest.iter().product();
    call.tape.check_words(mask.data.len())?;
    let selected: Vec<usize> = (0..mask.data.len()).filter(|&i| mask.data[i] != 0.0).collect();
    let sizes = [&[selected.len()], rest].concat();
    call.tape.check_words(2 * selected.len() * block)?;
    let map: Vec<usize> = selected.iter().flat_map(|&i| i * block..(i + 1) * block).collect();
    call.tape.gather(x, map, sizes)
}

/// Checks an index into a dimension of this length. Negative indices count from the end.
fn checked_index(value: f64, length: usize) -> Result<usize, String> {
    dimension(&NodeValue::Number(value, ElementKind::Int), length)
        .ok()
        .filter(|&at| at < length)
        .ok_or_else(|| format!("index {value} is out of range for a dimension of length {length}"))
}

/// Runs `index_select`: returns the slices of `x` along `dim` at these indices.
fn index_select(call: &mut CallArgs<'_>, x: Var, dim: usize, index: Var) -> Result<Var, String> {
    let shape = call.tape.shape(x).to_vec();
    let index = call.tape.get(index);
    if index.kind != ElementKind::Int || index.shape.len() != 1 {
        return Err("the index must be a one-dimensional integer tensor".to_owned());
    }
    let Some(&size) = shape.get(dim) else {
        return Err("a scalar cannot be indexed".to_owned());
    };
    let indices: Vec<usize> =
        index.data.iter().map(|&at| checked_index(at, size)).collect::<Result<_, _>>()?;
    let mut sizes = shape.clone();
    sizes[dim] = indices.len();
    let count = call.tape.check_size(&sizes)?;
    call.tape.check_words(count.saturating_mul(2))?;
    let step = strides(&shape)[dim];
    let outer: usize = shape[..dim].iter().product();
    let mut map = Vec::with_capacity(count);
    for block in 0..outer {
        for &at in &indices {
            let from = (block * size + at) * step;
            map.extend(from..from + step);
        }
    }
    call.tape.gather(x, map, sizes)
}

/// Runs `gather`: returns, for each element of the index, the element of `x` at that index along
/// `dim`.
fn gather(call: &mut CallArgs<'_>, x: Var, dim: &NodeValue, index: Var) -> Result<Var, String> {
    let shape = call.tape.shape(x).to_vec();
    let index = call.tape.get(index);
    let dim = dimension(dim, shape.len())?;
    let fits = index.shape.len() == shape.len()
        && (0..shape.len()).all(|i| i == dim || index.shape[i] <= shape[i]);
    if index.kind != ElementKind::Int {
        return Err("the index must be an integer tensor".to_owned());
    }
    if !fits {
        let index = &index.shape;
        return Err(format!("index of shape {index:?} does not fit a tensor of shape {shape:?}"));
    }
    let source_strides = strides(&shape);
    let steps: Vec<isize> = (0..shape.len())
        .map(|i| if i == dim { 0 } else { source_strides[i].cast_signed() })
        .collect();
    call.tape.check_words(2 * index.data.len())?;
    let sizes = index.shape.clone();
    let mut map: Vec<usize> = StridedView::new(sizes.clone(), 0, steps).positions().collect();
    for (at, &value) in map.iter_mut().zip(&index.data) {
        if let Some(&size) = shape.get(dim) {
            *at += checked_index(value, size)? * source_strides[dim];
        }
    }
    call.tape.gather(x, map, sizes)
}

/// Returns the start, stop or step of a slice, which may be absent.
pub(crate) fn slice_part(value: &NodeValue) -> Result<Option<i64>, String> {
    match value {
        NodeValue::None => Ok(None),
        other => integer(other).map(Some),
    }
}
