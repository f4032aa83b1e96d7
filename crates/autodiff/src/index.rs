//! Picking numbers by their place.

use crate::array::{Kind, strides, walk};
use crate::call::{Call, Value, describe, dimension, whole};
use crate::tape::Var;

/// Indexing operations; `None` if there is none of this name.
pub(crate) fn run(name: &str, call: &mut Call<'_>) -> Result<Option<Value>, String> {
    match name {
        "getitem" => {
            let (of, index) = (call.needed(0, "input")?, call.needed_index()?);
            match of {
                Value::List(items) => item(&items, &index).map(Some),
                Value::Tensor(x) => tensor_item(call, x, index).map(|x| Some(Value::Tensor(x))),
                other => Err(format!("{} has no items", describe(&other))),
            }
        }
        "gather" => {
            let x = call.tensor(0, "input")?;
            let dim = call.needed(1, "dim")?;
            let index = call.tensor(2, "index")?;
            gather(call, x, &dim, index).map(|x| Some(Value::Tensor(x)))
        }
        "index_select" => {
            let x = call.tensor(0, "input")?;
            let rank = call.tape.shape(x).len();
            let dim = dimension(&call.needed(1, "dim")?, rank)?;
            let index = call.tensor(2, "index")?;
            select(call, x, dim, index).map(|x| Some(Value::Tensor(x)))
        }
        _ => Ok(None),
    }
}

impl Call<'_> {
    /// An index may be nothing at all: `x[None]` adds a side of 1.
    fn needed_index(&mut self) -> Result<Value, String> {
        Ok(self.optional(1, "index").unwrap_or(Value::None))
    }
}

/// An item of a shape or of another list.
fn item(items: &[Value], index: &Value) -> Result<Value, String> {
    match index {
        Value::Slice(slice) => {
            let (start, step, count) = range(slice, items.len())?;
            let at = |i: usize| start.wrapping_add_signed(step.wrapping_mul(i.cast_signed()));
            Ok(Value::List((0..count).map(|i| items[at(i)].clone()).collect()))
        }
        index => {
            let at = dimension(index, items.len())?;
            items.get(at).cloned().ok_or_else(|| "the list is empty".to_owned())
        }
    }
}

/// `x[index]` for numbers, slices, `...`, `None`, and at most one tensor of places or truths.
fn tensor_item(call: &mut Call<'_>, x: Var, index: Value) -> Result<Var, String> {
    let parts = match index {
        Value::List(parts) => parts,
        one => vec![one],
    };
    if let [Value::Tensor(mask)] = parts.as_slice()
        && call.tape.get(*mask).kind == Kind::Bool
    {
        return masked(call, x, *mask);
    }
    let shape = call.tape.shape(x).to_vec();
    let used = parts.iter().filter(|part| !matches!(part, Value::None | Value::Ellipsis)).count();
    let Some(open) = shape.len().checked_sub(used) else {
        return Err(format!("{used} indices into a tensor of rank {}", shape.len()));
    };
    let own = strides(&shape);
    let (mut sides, mut steps, mut start) = (Vec::new(), Vec::new(), 0_usize);
    let mut places = None;
    let mut dim = 0;
    let mut open = Some(open);
    let mut parts: Vec<Value> = parts;
    if !parts.iter().any(|part| matches!(part, Value::Ellipsis)) {
        parts.push(Value::Ellipsis);
    }
    for part in parts {
        match part {
            Value::None => {
                sides.push(1);
                steps.push(0);
                continue;
            }
            Value::Ellipsis => {
                let count = open.take().ok_or("two ellipses in one index")?;
                for _ in 0..count {
                    sides.push(shape[dim]);
                    steps.push(own[dim].cast_signed());
                    dim += 1;
                }
                continue;
            }
            Value::Slice(slice) => {
                let (from, step, count) = range(&slice, shape[dim])?;
                start += from * own[dim];
                sides.push(count);
                steps.push(step * own[dim].cast_signed());
            }
            Value::Tensor(index) => {
                if places.replace((sides.len(), index)).is_some() {
                    return Err("at most one tensor may be an index".to_owned());
                }
                sides.push(shape[dim]);
                steps.push(own[dim].cast_signed());
            }
            number => {
                let at = dimension(&number, shape[dim])?;
                if at >= shape[dim] {
                    return Err(format!("index {at} into a side of {}", shape[dim]));
                }
                start += at * own[dim];
            }
        }
        dim += 1;
    }
    let map = walk(&sides, start, &steps);
    let x = call.tape.gather(x, map, sides)?;
    match places {
        None => Ok(x),
        Some((dim, index)) => select(call, x, dim, index),
    }
}

/// Start, step and count of a slice of `length` things, by Python's rule.
fn range(slice: &[Option<i64>; 3], length: usize) -> Result<(usize, isize, usize), String> {
    let [start, stop, step] = *slice;
    let step = step.unwrap_or(1);
    if step < 1 {
        return Err(format!("a slice cannot have the step {step}"));
    }
    let length_i = i64::try_from(length).map_err(|_| "too large".to_owned())?;
    let place =
        |at: i64| if at < 0 { at.saturating_add(length_i).max(0) } else { at.min(length_i) };
    let (from, to) = (place(start.unwrap_or(0)), place(stop.unwrap_or(length_i)));
    let count = if to > from { (to - from - 1) / step + 1 } else { 0 };
    let unsigned = |n: i64| usize::try_from(n).map_err(|_| "too large".to_owned());
    let step = isize::try_from(step.min(length_i.max(1))).map_err(|_| "too large".to_owned())?;
    Ok((unsigned(from)?.min(length.saturating_sub(1)), step, unsigned(count)?))
}

/// The numbers where the mask holds, in a row.
fn masked(call: &mut Call<'_>, x: Var, mask: Var) -> Result<Var, String> {
    let (shape, truths) = (call.tape.shape(x), call.tape.get(mask));
    if !shape.starts_with(&truths.shape) {
        return Err(format!("a mask of {:?} on a tensor of {shape:?}", truths.shape));
    }
    let rest = &shape[truths.shape.len()..];
    let block: usize = rest.iter().product();
    let held: Vec<usize> = (0..truths.data.len()).filter(|&i| truths.data[i] != 0.0).collect();
    let sides = [&[held.len()], rest].concat();
    let map = held.iter().flat_map(|&i| i * block..(i + 1) * block).collect();
    call.tape.gather(x, map, sides)
}

/// A place given by a tensor of whole numbers.
fn place(value: f64, side: usize) -> Result<usize, String> {
    dimension(&Value::Number(value, Kind::Int), side)
        .ok()
        .filter(|&at| at < side)
        .ok_or_else(|| format!("index {value} into a side of {side}"))
}

/// Whole slices of `x` along `dim`, by a list of places.
fn select(call: &mut Call<'_>, x: Var, dim: usize, index: Var) -> Result<Var, String> {
    let (shape, index) = (call.tape.shape(x).to_vec(), call.tape.get(index));
    if index.kind != Kind::Int || index.shape.len() != 1 {
        return Err("the index must be a list of whole numbers".to_owned());
    }
    let Some(&side) = shape.get(dim) else {
        return Err("a single number has no items".to_owned());
    };
    let places: Vec<usize> =
        index.data.iter().map(|&at| place(at, side)).collect::<Result<_, _>>()?;
    let mut sides = shape.clone();
    sides[dim] = places.len();
    call.tape.room(&sides)?;
    let step = strides(&shape)[dim];
    let outer: usize = shape[..dim].iter().product();
    let mut map = Vec::new();
    for block in 0..outer {
        for &at in &places {
            let from = (block * side + at) * step;
            map.extend(from..from + step);
        }
    }
    call.tape.gather(x, map, sides)
}

/// For each cell of the index, the number at that place along `dim`.
fn gather(call: &mut Call<'_>, x: Var, dim: &Value, index: Var) -> Result<Var, String> {
    let (shape, index) = (call.tape.shape(x).to_vec(), call.tape.get(index).clone());
    let dim = dimension(dim, shape.len())?;
    let fits = index.shape.len() == shape.len()
        && (0..shape.len()).all(|i| i == dim || index.shape[i] <= shape[i]);
    if !fits || index.kind != Kind::Int {
        return Err(format!("an index of {:?} into a tensor of {shape:?}", index.shape));
    }
    let own = strides(&shape);
    let steps: Vec<isize> =
        (0..shape.len()).map(|i| if i == dim { 0 } else { own[i].cast_signed() }).collect();
    let mut map = walk(&index.shape, 0, &steps);
    for (at, &value) in map.iter_mut().zip(&index.data) {
        if let Some(&side) = shape.get(dim) {
            *at += place(value, side)? * own[dim];
        }
    }
    call.tape.gather(x, map, index.shape)
}

/// A whole number or nothing, as the end of a slice.
pub(crate) fn slice_end(value: &Value) -> Result<Option<i64>, String> {
    match value {
        Value::None => Ok(None),
        other => whole(other).map(Some),
    }
}
