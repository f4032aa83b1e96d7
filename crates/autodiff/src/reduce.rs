//! Operations that make fewer numbers of many.

use crate::array::{Array, Kind, strides, truth, walk};
use crate::call::{Call, Value, dimension, dimensions};
use crate::elementwise;
use crate::tape::{Link, Tape, Var};

/// Which cell of the result each cell goes to, and what the result looks like.
struct Buckets {
    of: Vec<usize>,
    /// With the reduced sides as 1, or without them.
    shape: Vec<usize>,
    count: usize,
    /// Cells that meet in one.
    each: usize,
}

impl Buckets {
    fn new(shape: &[usize], dims: &[usize], keep: bool) -> Self {
        let kept: Vec<usize> =
            shape.iter().enumerate().map(|(i, &s)| if dims.contains(&i) { 1 } else { s }).collect();
        let steps: Vec<isize> = strides(&kept)
            .iter()
            .enumerate()
            .map(|(i, &step)| if dims.contains(&i) { 0 } else { step.cast_signed() })
            .collect();
        let of = walk(shape, 0, &steps);
        let count = kept.iter().product();
        let each = dims.iter().map(|&dim| shape[dim]).product();
        let shape = match keep {
            true => kept,
            false => (0..shape.len()).filter(|i| !dims.contains(i)).map(|i| shape[i]).collect(),
        };
        Self { of, shape, count, each }
    }
}

/// Reductions; `None` if there is none of this name.
pub(crate) fn run(name: &str, call: &mut Call<'_>) -> Result<Option<Value>, String> {
    let var = match name {
        "sum" | "mean" | "prod" | "any" | "all" | "amax" | "amin" => plain(name, call),
        "max" | "min" => return extreme(name, call).map(Some),
        "var" | "std" => spread(name, call),
        "norm" => norm(call),
        "logsumexp" => {
            let x = call.tensor(0, "input")?;
            let dim = call.needed(1, "dim")?;
            let keep = call.flag(2, "keepdim", false)?;
            let dims = dimensions(Some(dim), call.tape.shape(x).len())?;
            log_sum_exp(call.tape, x, &dims, keep)
        }
        "softmax" | "log_softmax" => {
            let x = call.tensor(0, "input")?;
            let dim = call.needed(1, "dim")?;
            call.dtype()?;
            let dims = dimensions(Some(dim), call.tape.shape(x).len())?;
            let total = log_sum_exp(call.tape, x, &dims, true)?;
            let logs =
                call.tape.binary(x, total, Kind::Float, |x, total| (x - total, 1.0, -1.0))?;
            match name {
                "softmax" => call.tape.unary(logs, Kind::Float, |x| (x.exp(), x.exp())),
                _ => Ok(logs),
            }
        }
        "cumsum" => running(call),
        "mse_loss" | "l1_loss" | "smooth_l1_loss" | "huber_loss" => distance(name, call),
        _ => return Ok(None),
    };
    var.map(|var| Some(Value::Tensor(var)))
}

fn plain(name: &str, call: &mut Call<'_>) -> Result<Var, String> {
    let x = call.tensor(0, "input")?;
    let dim = call.optional(1, "dim");
    let keep = call.flag(2, "keepdim", false)?;
    let dtype = call.dtype()?;
    let dims = dimensions(dim, call.tape.shape(x).len())?;
    let buckets = Buckets::new(call.tape.shape(x), &dims, keep);
    let kind = call.tape.get(x).kind;
    match name {
        "sum" => sum(call.tape, x, buckets, dtype.unwrap_or(kind.max(Kind::Int))),
        "mean" => {
            if dtype.unwrap_or(kind) != Kind::Float {
                return Err("mean is of floats; call float() first".to_owned());
            }
            mean(call.tape, x, buckets)
        }
        "prod" => product(call.tape, x, &buckets, dtype.unwrap_or(kind.max(Kind::Int))),
        "any" | "all" => {
            let any = name == "any";
            let mut data = vec![truth(!any); buckets.count];
            for (&value, &at) in call.tape.get(x).data.iter().zip(&buckets.of) {
                if (value != 0.0) == any {
                    data[at] = truth(any);
                }
            }
            call.tape.constant(Array { shape: buckets.shape, data, kind: Kind::Bool })
        }
        _ => even_extreme(call.tape, x, buckets, name == "amax"),
    }
}

fn sum(tape: &mut Tape, x: Var, buckets: Buckets, kind: Kind) -> Result<Var, String> {
    let mut data = vec![0.0; buckets.count];
    for (&value, &at) in tape.get(x).data.iter().zip(&buckets.of) {
        data[at] += value;
    }
    let value = Array { shape: buckets.shape, data, kind };
    tape.derive(value, vec![(x, Link::Spread(buckets.of, None))])
}

fn mean(tape: &mut Tape, x: Var, buckets: Buckets) -> Result<Var, String> {
    let each = buckets.each as f64;
    let total = sum(tape, x, buckets, Kind::Float)?;
    tape.unary(total, Kind::Float, |total| (total / each, 1.0 / each))
}

fn product(tape: &mut Tape, x: Var, buckets: &Buckets, kind: Kind) -> Result<Var, String> {
    let source = &tape.get(x).data;
    let mut data = vec![1.0; buckets.count];
    let (mut zeros, mut others) = (vec![0_usize; buckets.count], vec![1.0; buckets.count]);
    for (&value, &at) in source.iter().zip(&buckets.of) {
        data[at] *= value;
        match value == 0.0 {
            true => zeros[at] += 1,
            false => others[at] *= value,
        }
    }
    // The product of all the others: with a zero among them, nothing but that zero has a slope.
    let slope =
        source.iter().zip(&buckets.of).map(|(&value, &at)| match (zeros[at], value == 0.0) {
            (0, _) => others[at] / value,
            (1, true) => others[at],
            _ => 0.0,
        });
    let slope = slope.collect();
    let value = Array { shape: buckets.shape.clone(), data, kind };
    tape.derive(value, vec![(x, Link::Spread(buckets.of.clone(), Some(slope)))])
}

/// The largest or smallest, whose slope is shared evenly by all that are equal.
fn even_extreme(tape: &mut Tape, x: Var, buckets: Buckets, largest: bool) -> Result<Var, String> {
    if buckets.each == 0 {
        return Err("there is no largest or smallest of nothing".to_owned());
    }
    let source = tape.get(x);
    let start = if largest { f64::NEG_INFINITY } else { f64::INFINITY };
    let mut data = vec![start; buckets.count];
    for (&value, &at) in source.data.iter().zip(&buckets.of) {
        data[at] = match (largest, value.is_nan() || data[at].is_nan()) {
            (_, true) => f64::NAN,
            (true, _) => data[at].max(value),
            (false, _) => data[at].min(value),
        };
    }
    let mut ties = vec![0.0; buckets.count];
    for (&value, &at) in source.data.iter().zip(&buckets.of) {
        ties[at] += truth(value == data[at]);
    }
    let slope = source.data.iter().zip(&buckets.of);
    let slope = slope.map(|(&value, &at)| truth(value == data[at]) / f64::max(ties[at], 1.0));
    let slope = slope.collect();
    let value = Array { shape: buckets.shape, data, kind: source.kind };
    tape.derive(value, vec![(x, Link::Spread(buckets.of, Some(slope)))])
}

/// `max(x)`, `max(x, y)` and `max(x, dim)`, which also says where.
fn extreme(name: &str, call: &mut Call<'_>) -> Result<Value, String> {
    let largest = name == "max";
    let x = call.tensor(0, "input")?;
    if let Some(other) = call.optional(usize::MAX, "other") {
        return pairwise(call, x, &other, largest);
    }
    let Some(dim) = call.optional(1, "dim") else {
        let dims: Vec<usize> = (0..call.tape.shape(x).len()).collect();
        let buckets = Buckets::new(call.tape.shape(x), &dims, false);
        return even_extreme(call.tape, x, buckets, largest).map(Value::Tensor);
    };
    if let Value::Tensor(_) = dim {
        return pairwise(call, x, &dim, largest);
    }
    let keep = call.flag(2, "keepdim", false)?;
    let shape = call.tape.shape(x).to_vec();
    let dim = dimension(&dim, shape.len())?;
    let dims = if shape.is_empty() { vec![] } else { vec![dim] };
    let buckets = Buckets::new(&shape, &dims, keep);
    if buckets.each == 0 {
        return Err("there is no largest or smallest of nothing".to_owned());
    }
    let source = &call.tape.get(x).data;
    let mut best: Vec<Option<usize>> = vec![None; buckets.count];
    for (i, &at) in buckets.of.iter().enumerate() {
        let better = best[at].is_none_or(|best| {
            let (new, old) = (source[i], source[best]);
            !old.is_nan() && (new.is_nan() || if largest { new > old } else { new < old })
        });
        if better {
            best[at] = Some(i);
        }
    }
    let best: Vec<usize> = best.into_iter().flatten().collect();
    let step = strides(&shape).get(dim).copied().unwrap_or(1);
    let side = shape.get(dim).copied().unwrap_or(1);
    let places = best.iter().map(|&at| (at / step % side) as f64).collect();
    let places = Array { shape: buckets.shape.clone(), data: places, kind: Kind::Int };
    let values = call.tape.gather(x, best, buckets.shape)?;
    let places = call.tape.constant(places)?;
    Ok(Value::List(vec![Value::Tensor(values), Value::Tensor(places)]))
}

fn pairwise(call: &mut Call<'_>, x: Var, other: &Value, largest: bool) -> Result<Value, String> {
    let other = call.var(other, "other")?;
    let kind = elementwise::wider(call, x, other);
    let f = elementwise::binary(if largest { "maximum" } else { "minimum" });
    let f = f.ok_or("no such function")?;
    call.tape.binary(x, other, kind, f).map(Value::Tensor)
}

fn spread(name: &str, call: &mut Call<'_>) -> Result<Var, String> {
    let x = call.tensor(0, "input")?;
    let mut dim = call.optional(1, "dim");
    let mut unbiased = call.flag(2, "unbiased", true)?;
    if let Some(Value::Number(flag, Kind::Bool)) = dim {
        // The form `var(x, unbiased)`.
        (dim, unbiased) = (None, flag != 0.0);
    }
    let less = call.optional_number(usize::MAX, "correction")?.unwrap_or(truth(unbiased));
    let keep = call.flag(3, "keepdim", false)?;
    let shape = call.tape.shape(x).to_vec();
    let dims = dimensions(dim, shape.len())?;
    let middle = mean(call.tape, x, Buckets::new(&shape, &dims, true))?;
    let off = call.tape.binary(x, middle, Kind::Float, |x, m| (x - m, 1.0, -1.0))?;
    let squares = call.tape.unary(off, Kind::Float, |x| (x * x, 2.0 * x))?;
    let buckets = Buckets::new(&shape, &dims, keep);
    let count = (buckets.each as f64 - less).max(0.0);
    let total = sum(call.tape, squares, buckets, Kind::Float)?;
    let var = call.tape.unary(total, Kind::Float, |total| (total / count, 1.0 / count))?;
    match name {
        "std" => call.tape.unary(var, Kind::Float, |v| (v.sqrt(), 0.5 / v.sqrt())),
        _ => Ok(var),
    }
}

fn norm(call: &mut Call<'_>) -> Result<Var, String> {
    let x = call.tensor(0, "input")?;
    let power = match call.optional(1, "p") {
        None => 2.0,
        Some(Value::Number(power, _)) if power > 0.0 => power,
        Some(Value::Text(name)) if name == "fro" => 2.0,
        Some(_) => return Err("p must be a positive number".to_owned()),
    };
    let dim = call.optional(2, "dim");
    let keep = call.flag(3, "keepdim", false)?;
    call.dtype()?;
    let shape = call.tape.shape(x).to_vec();
    let dims = dimensions(dim, shape.len())?;
    let buckets = Buckets::new(&shape, &dims, keep);
    let size =
        call.tape.unary(x, Kind::Float, |x| (x.abs(), if x == 0.0 { 0.0 } else { x.signum() }))?;
    if power.is_infinite() {
        return even_extreme(call.tape, size, buckets, true);
    }
    let powers = call.tape.unary(size, Kind::Float, |x| {
        (x.powf(power), if x == 0.0 { truth(power == 1.0) } else { power * x.powf(power - 1.0) })
    })?;
    let total = sum(call.tape, powers, buckets, Kind::Float)?;
    call.tape.unary(total, Kind::Float, |t| {
        // At zero the length has no direction; torch says 0.
        (t.powf(1.0 / power), if t == 0.0 { 0.0 } else { t.powf(1.0 / power - 1.0) / power })
    })
}

fn log_sum_exp(tape: &mut Tape, x: Var, dims: &[usize], keep: bool) -> Result<Var, String> {
    let shape = tape.shape(x).to_vec();
    let top = even_extreme(tape, x, Buckets::new(&shape, dims, true), true)?;
    let top = tape.detach(top)?;
    // An infinite top would make NaN of everything; without it the result is right by itself.
    let top = tape.unary(top, Kind::Float, |t| (if t.is_finite() { t } else { 0.0 }, 0.0))?;
    let parts = tape.binary(x, top, Kind::Float, |x, t| ((x - t).exp(), (x - t).exp(), 0.0))?;
    let total = sum(tape, parts, Buckets::new(&shape, dims, keep), Kind::Float)?;
    let logs = tape.unary(total, Kind::Float, |t| (t.ln(), 1.0 / t))?;
    let flat = tape.shape(logs).to_vec();
    let top = tape.reshaped(top, flat)?;
    tape.binary(logs, top, Kind::Float, |l, t| (l + t, 1.0, 0.0))
}

fn running(call: &mut Call<'_>) -> Result<Var, String> {
    let x = call.tensor(0, "input")?;
    let dim = call.needed(1, "dim")?;
    let dtype = call.dtype()?;
    let source = call.tape.get(x);
    let dim = dimension(&dim, source.shape.len())?;
    let (length, stride) = match source.shape.get(dim) {
        Some(&length) => (length, strides(&source.shape)[dim]),
        None => (1, 1),
    };
    let mut data = source.data.clone();
    for at in 0..data.len() {
        if at / stride % length > 0 {
            data[at] += data[at - stride];
        }
    }
    let kind = dtype.unwrap_or(source.kind.max(Kind::Int));
    let value = Array { shape: source.shape.clone(), data, kind };
    call.tape.derive(value, vec![(x, Link::Running(length, stride))])
}

/// Distances between two tensors, summed up as asked.
fn distance(name: &str, call: &mut Call<'_>) -> Result<Var, String> {
    let (a, b) = (call.tensor(0, "input")?, call.tensor(1, "target")?);
    let reduction = call.optional_text(usize::MAX, "reduction")?;
    let reduction = reduction.unwrap_or_else(|| "mean".to_owned());
    let knee = match name {
        "smooth_l1_loss" => call.optional_number(usize::MAX, "beta")?.unwrap_or(1.0),
        "huber_loss" => call.optional_number(usize::MAX, "delta")?.unwrap_or(1.0),
        _ => 0.0,
    };
    let off = call.tape.binary(a, b, Kind::Float, |a, b| (a - b, 1.0, -1.0))?;
    let side = |x: f64| if x == 0.0 { 0.0 } else { x.signum() };
    let all = call.tape.unary(off, Kind::Float, |x| match name {
        "mse_loss" => (x * x, 2.0 * x),
        "huber_loss" if x.abs() <= knee => (0.5 * x * x, x),
        "huber_loss" => (knee * (x.abs() - 0.5 * knee), knee * side(x)),
        "smooth_l1_loss" if x.abs() < knee => (0.5 * x * x / knee, x / knee),
        _ => (x.abs() - 0.5 * knee, side(x)),
    })?;
    let shape = call.tape.shape(all).to_vec();
    let dims: Vec<usize> = (0..shape.len()).collect();
    match reduction.as_str() {
        "none" => Ok(all),
        "sum" => sum(call.tape, all, Buckets::new(&shape, &dims, false), Kind::Float),
        "mean" => mean(call.tape, all, Buckets::new(&shape, &dims, false)),
        other => Err(format!("reduction {other:?} is not known")),
    }
}
