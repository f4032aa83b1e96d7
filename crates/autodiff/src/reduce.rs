//! Reductions, and operations built on them.

use crate::array::{Array, ElementKind, StridedView, strides};
use crate::call::{CallArgs, KEYWORD_ONLY, NodeValue, dimension, dimensions};
use crate::elementwise::{self, sign};
use crate::operations::NOT_SUPPORTED;
use crate::tape::{LocalGradient, Tape, Var};

const NO_ELEMENTS: &str = "max and min need at least one element";

/// Assignment of the elements of a tensor to the elements of the result.
struct Reduction {
    /// For each element, the element of the result it contributes to.
    targets: StridedView,
    /// Shape of the result: reduced dimensions have length 1, or are removed.
    shape: Vec<usize>,
    /// Number of elements of the result.
    count: usize,
    /// Number of elements that are combined into one.
    group_size: usize,
}

impl Reduction {
    fn new(shape: &[usize], dims: &[usize], keep: bool) -> Self {
        let kept: Vec<usize> =
            shape.iter().enumerate().map(|(i, &s)| if dims.contains(&i) { 1 } else { s }).collect();
        let steps: Vec<isize> = strides(&kept)
            .iter()
            .enumerate()
            .map(|(i, &step)| if dims.contains(&i) { 0 } else { step.cast_signed() })
            .collect();
        let targets = StridedView::new(shape.to_vec(), 0, steps);
        let count = kept.iter().product();
        let group_size = dims.iter().map(|&dim| shape[dim]).product();
        let shape = if keep {
            kept
        } else {
            (0..shape.len()).filter(|i| !dims.contains(i)).map(|i| shape[i]).collect()
        };
        Self { targets, shape, count, group_size }
    }
}

/// Runs the reduction `name`; returns `None` if `name` is no reduction.
pub(crate) fn run(name: &str, call: &mut CallArgs<'_>) -> Result<Option<NodeValue>, String> {
    let var = match name {
        "sum" | "mean" | "prod" | "any" | "all" | "amax" | "amin" => simple(name, call),
        "max" | "min" => return extreme(name, call).map(Some),
        "var" | "std" => variance(name, call),
        "norm" => norm(call),
        "logsumexp" => {
            let x = call.tensor(0, "input")?;
            let dim = call.required(1, "dim")?;
            let keep = call.flag(2, "keepdim", false)?;
            let dims = dimensions(Some(dim), call.tape.shape(x).len())?;
            log_sum_exp(call.tape, x, &dims, keep)
        }
        "softmax" | "log_softmax" => {
            let x = call.tensor(0, "input")?;
            let dim = call.required(1, "dim")?;
            call.dtype()?;
            let dims = dimensions(Some(dim), call.tape.shape(x).len())?;
            let total = log_sum_exp(call.tape, x, &dims, true)?;
            let logs = call
                .tape
                .binary(x, total, ElementKind::Float, |x, total| (x - total, 1.0, -1.0))?;
            match name {
                "softmax" => call.tape.unary(logs, ElementKind::Float, |x| (x.exp(), x.exp())),
                _ => Ok(logs),
            }
        }
        "cumsum" => cumulative_sum(call),
        "mse_loss" | "l1_loss" | "smooth_l1_loss" | "huber_loss" => comparison_loss(name, call),
        _ => return Ok(None),
    };
    var.map(|var| Some(NodeValue::Tensor(var)))
}

/// Runs the reductions whose only options are `dim`, `keepdim` and `dtype`.
fn simple(name: &str, call: &mut CallArgs<'_>) -> Result<Var, String> {
    let x = call.tensor(0, "input")?;
    let dim = call.optional(1, "dim");
    let keep = call.flag(2, "keepdim", false)?;
    let dtype = call.dtype()?;
    let dims = dimensions(dim, call.tape.shape(x).len())?;
    let reduction = Reduction::new(call.tape.shape(x), &dims, keep);
    let kind = call.tape.get(x).kind;
    match name {
        "sum" => sum(call.tape, x, reduction, dtype.unwrap_or(kind.max(ElementKind::Int))),
        "mean" => {
            if dtype.unwrap_or(kind) != ElementKind::Float {
                return Err("mean needs floats; call float() first".to_owned());
            }
            mean(call.tape, x, reduction)
        }
        "prod" => product(call.tape, x, &reduction, dtype.unwrap_or(kind.max(ElementKind::Int))),
        "any" | "all" => {
            let any = name == "any";
            call.tape.check_words(reduction.count)?;
            let mut data = vec![f64::from(!any); reduction.count];
            for (&value, at) in call.tape.get(x).data.iter().zip(reduction.targets.positions()) {
                if (value != 0.0) == any {
                    data[at] = f64::from(any);
                }
            }
            call.tape.constant(Array { shape: reduction.shape, data, kind: ElementKind::Bool })
        }
        _ => shared_extreme(call.tape, x, reduction, name == "amax"),
    }
}

fn sum(tape: &mut Tape, x: Var, reduction: Reduction, kind: ElementKind) -> Result<Var, String> {
    tape.check_words(reduction.count)?;
    let mut data = vec![0.0; reduction.count];
    for (&value, at) in tape.get(x).data.iter().zip(reduction.targets.positions()) {
        data[at] += value;
    }
    let value = Array { shape: reduction.shape, data, kind };
    tape.derive(value, vec![(x, LocalGradient::Reduce(reduction.targets, None))])
}

fn mean(tape: &mut Tape, x: Var, reduction: Reduction) -> Result<Var, String> {
    let count = reduction.group_size as f64;
    let total = sum(tape, x, reduction, ElementKind::Float)?;
    tape.unary(total, ElementKind::Float, |total| (total / count, 1.0 / count))
}

fn product(
    tape: &mut Tape,
    x: Var,
    reduction: &Reduction,
    kind: ElementKind,
) -> Result<Var, String> {
    let source = &tape.get(x).data;
    tape.check_words(source.len() + 3 * reduction.count)?;
    let mut data = vec![1.0; reduction.count];
    let mut zeros = vec![0_usize; reduction.count];
    let mut others = vec![1.0; reduction.count];
    for (&value, at) in source.iter().zip(reduction.targets.positions()) {
        data[at] *= value;
        if value == 0.0 { zeros[at] += 1 } else { others[at] *= value }
    }
    // The slope of an element is the product of the others. If one element is 0, only its slope is
    // nonzero; if two are, all slopes are 0.
    let slope = source.iter().zip(reduction.targets.positions()).map(|(&value, at)| {
        match (zeros[at], value == 0.0) {
            (0, _) => others[at] / value,
            (1, true) => others[at],
            _ => 0.0,
        }
    });
    let slope = slope.collect();
    let value = Array { shape: reduction.shape.clone(), data, kind };
    tape.derive(value, vec![(x, LocalGradient::Reduce(reduction.targets.clone(), Some(slope)))])
}

/// Returns the maximum or minimum. Tied elements share the slope evenly.
fn shared_extreme(
    tape: &mut Tape,
    x: Var,
    reduction: Reduction,
    largest: bool,
) -> Result<Var, String> {
    if reduction.group_size == 0 {
        return Err(NO_ELEMENTS.to_owned());
    }
    let source = tape.get(x);
    tape.check_words(source.data.len() + 2 * reduction.count)?;
    let start = if largest { f64::NEG_INFINITY } else { f64::INFINITY };
    let mut data = vec![start; reduction.count];
    for (&value, at) in source.data.iter().zip(reduction.targets.positions()) {
        data[at] = match (largest, value.is_nan() || data[at].is_nan()) {
            (_, true) => f64::NAN,
            (true, _) => data[at].max(value),
            (false, _) => data[at].min(value),
        };
    }
    let mut ties = vec![0.0; reduction.count];
    for (&value, at) in source.data.iter().zip(reduction.targets.positions()) {
        ties[at] += f64::from(value == data[at]);
    }
    let slope = source.data.iter().zip(reduction.targets.positions());
    let slope = slope.map(|(&value, at)| f64::from(value == data[at]) / f64::max(ties[at], 1.0));
    let slope = slope.collect();
    let value = Array { shape: reduction.shape, data, kind: source.kind };
    tape.derive(value, vec![(x, LocalGradient::Reduce(reduction.targets, Some(slope)))])
}

/// Runs `max(x)`, `max(x, y)` and `max(x, dim)`, or `min`. With `dim` the result is a list of
/// values and indices, and the first of the tied elements has the slope 1.
fn extreme(name: &str, call: &mut CallArgs<'_>) -> Result<NodeValue, String> {
    let largest = name == "max";
    let x = call.tensor(0, "input")?;
    if let Some(other) = call.optional(KEYWORD_ONLY, "other") {
        return pairwise(call, x, &other, largest);
    }
    let Some(dim) = call.optional(1, "dim") else {
        let dims: Vec<usize> = (0..call.tape.shape(x).len()).collect();
        let reduction = Reduction::new(call.tape.shape(x), &dims, false);
        return shared_extreme(call.tape, x, reduction, largest).map(NodeValue::Tensor);
    };
    if let NodeValue::Tensor(_) = dim {
        return pairwise(call, x, &dim, largest);
    }
    let keep = call.flag(2, "keepdim", false)?;
    let shape = call.tape.shape(x).to_vec();
    let dim = dimension(&dim, shape.len())?;
    let dims = if shape.is_empty() { vec![] } else { vec![dim] };
    let reduction = Reduction::new(&shape, &dims, keep);
    if reduction.group_size == 0 {
        return Err(NO_ELEMENTS.to_owned());
    }
    call.tape.check_words(5 * reduction.count)?;
    let source = &call.tape.get(x).data;
    let mut best: Vec<Option<usize>> = vec![None; reduction.count];
    for (i, at) in reduction.targets.positions().enumerate() {
        let better = best[at].is_none_or(|best| {
            let new = source[i];
            let old = source[best];
            !old.is_nan() && (new.is_nan() || if largest { new > old } else { new < old })
        });
        if better {
            best[at] = Some(i);
        }
    }
    let best: Vec<usize> = best.into_iter().flatten().collect();
    let step = strides(&shape).get(dim).copied().unwrap_or(1);
    let length = shape.get(dim).copied().unwrap_or(1);
    let indices = best.iter().map(|&at| (at / step % length) as f64).collect();
    let indices = Array { shape: reduction.shape.clone(), data: indices, kind: ElementKind::Int };
    let values = call.tape.gather(x, best, reduction.shape)?;
    let indices = call.tape.constant(indices)?;
    Ok(NodeValue::list(vec![NodeValue::Tensor(values), NodeValue::Tensor(indices)]))
}

/// Runs `maximum` or `minimum` of two tensors.
fn pairwise(
    call: &mut CallArgs<'_>,
    x: Var,
    other: &NodeValue,
    largest: bool,
) -> Result<NodeValue, String> {
    let other = call.var(other, "other")?;
    let kind = elementwise::promoted(call, x, other);
    let f = elementwise::binary(if largest { "maximum" } else { "minimum" });
    let f = f.ok_or(NOT_SUPPORTED)?;
    call.tape.binary(x, other, kind, f).map(NodeValue::Tensor)
}

/// Runs `var` and `std`.
fn variance(name: &str, call: &mut CallArgs<'_>) -> Result<Var, String> {
    let x = call.tensor(0, "input")?;
    let mut dim = call.optional(1, "dim");
    let mut unbiased = call.flag(2, "unbiased", true)?;
    if let Some(NodeValue::Number(flag, ElementKind::Bool)) = dim {
        // The call has the form `var(x, unbiased)`.
        dim = None;
        unbiased = flag != 0.0;
    }
    let correction =
        call.optional_number(KEYWORD_ONLY, "correction")?.unwrap_or(f64::from(unbiased));
    let keep = call.flag(3, "keepdim", false)?;
    let shape = call.tape.shape(x).to_vec();
    let dims = dimensions(dim, shape.len())?;
    let mean = mean(call.tape, x, Reduction::new(&shape, &dims, true))?;
    let difference = call.tape.binary(x, mean, ElementKind::Float, |x, m| (x - m, 1.0, -1.0))?;
    let squares = call.tape.unary(difference, ElementKind::Float, |x| (x * x, 2.0 * x))?;
    let reduction = Reduction::new(&shape, &dims, keep);
    let count = (reduction.group_size as f64 - correction).max(0.0);
    let total = sum(call.tape, squares, reduction, ElementKind::Float)?;
    let var = call.tape.unary(total, ElementKind::Float, |total| (total / count, 1.0 / count))?;
    match name {
        "std" => call.tape.unary(var, ElementKind::Float, |v| (v.sqrt(), 0.5 / v.sqrt())),
        _ => Ok(var),
    }
}

fn norm(call: &mut CallArgs<'_>) -> Result<Var, String> {
    let x = call.tensor(0, "input")?;
    let power = match call.optional(1, "p") {
        None => 2.0,
        Some(NodeValue::Number(power, _)) if power > 0.0 => power,
        Some(NodeValue::Text(name)) if name == "fro" => 2.0,
        Some(_) => return Err("p must be a positive number".to_owned()),
    };
    let dim = call.optional(2, "dim");
    let keep = call.flag(3, "keepdim", false)?;
    call.dtype()?;
    let shape = call.tape.shape(x).to_vec();
    let dims = dimensions(dim, shape.len())?;
    let reduction = Reduction::new(&shape, &dims, keep);
    let magnitudes = call.tape.unary(x, ElementKind::Float, |x| (x.abs(), sign(x)))?;
    if power.is_infinite() {
        return shared_extreme(call.tape, magnitudes, reduction, true);
    }
    let powers = call.tape.unary(magnitudes, ElementKind::Float, |x| {
        (
            x.powf(power),
            if x == 0.0 { f64::from(power == 1.0) } else { power * x.powf(power - 1.0) },
        )
    })?;
    let total = sum(call.tape, powers, reduction, ElementKind::Float)?;
    call.tape.unary(total, ElementKind::Float, |t| {
        // The norm is not differentiable at 0; PyTorch uses the slope 0.
        (t.powf(1.0 / power), if t == 0.0 { 0.0 } else { t.powf(1.0 / power - 1.0) / power })
    })
}

fn log_sum_exp(tape: &mut Tape, x: Var, dims: &[usize], keep: bool) -> Result<Var, String> {
    let shape = tape.shape(x).to_vec();
    let max = shared_extreme(tape, x, Reduction::new(&shape, dims, true), true)?;
    let max = tape.detach(max)?;
    // Subtracting an infinite maximum would yield ∞ - ∞ = NaN; subtracting 0 yields that infinity.
    let max =
        tape.unary(max, ElementKind::Float, |m| (if m.is_finite() { m } else { 0.0 }, 0.0))?;
    let parts =
        tape.binary(x, max, ElementKind::Float, |x, m| ((x - m).exp(), (x - m).exp(), 0.0))?;
    let total = sum(tape, parts, Reduction::new(&shape, dims, keep), ElementKind::Float)?;
    let logs = tape.unary(total, ElementKind::Float, |t| (t.ln(), 1.0 / t))?;
    let shape = tape.shape(logs).to_vec();
    let max = tape.reshaped(max, shape)?;
    tape.binary(logs, max, ElementKind::Float, |log, m| (log + m, 1.0, 0.0))
}

fn cumulative_sum(call: &mut CallArgs<'_>) -> Result<Var, String> {
    let x = call.tensor(0, "input")?;
    let dim = call.required(1, "dim")?;
    let dtype = call.dtype()?;
    let source = call.tape.get(x);
    call.tape.check_words(source.data.len())?;
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
    let kind = dtype.unwrap_or(source.kind.max(ElementKind::Int));
    let value = Array { shape: source.shape.clone(), data, kind };
    call.tape.derive(value, vec![(x, LocalGradient::CumulativeSum { length, stride })])
}

/// Runs the losses that compare two tensors, with their `reduction` option.
fn comparison_loss(name: &str, call: &mut CallArgs<'_>) -> Result<Var, String> {
    let a = call.tensor(0, "input")?;
    let b = call.tensor(1, "target")?;
    let reduction = call.optional_text(KEYWORD_ONLY, "reduction")?;
    let reduction = reduction.unwrap_or_else(|| "mean".to_owned());
    let threshold = match name {
        "smooth_l1_loss" => call.optional_number(KEYWORD_ONLY, "beta")?.unwrap_or(1.0),
        "huber_loss" => call.optional_number(KEYWORD_ONLY, "delta")?.unwrap_or(1.0),
        _ => 0.0,
    };
    let difference = call.tape.binary(a, b, ElementKind::Float, |a, b| (a - b, 1.0, -1.0))?;
    let losses = call.tape.unary(difference, ElementKind::Float, |x| match name {
        "mse_loss" => (x * x, 2.0 * x),
        "huber_loss" if x.abs() <= threshold => (0.5 * x * x, x),
        "huber_loss" => (threshold * (x.abs() - 0.5 * threshold), threshold * sign(x)),
        "smooth_l1_loss" if x.abs() < threshold => (0.5 * x * x / threshold, x / threshold),
        _ => (x.abs() - 0.5 * threshold, sign(x)),
    })?;
    let shape = call.tape.shape(losses).to_vec();
    let dims: Vec<usize> = (0..shape.len()).collect();
    match reduction.as_str() {
        "none" => Ok(losses),
        "sum" => sum(call.tape, losses, Reduction::new(&shape, &dims, false), ElementKind::Float),
        "mean" => mean(call.tape, losses, Reduction::new(&shape, &dims, false)),
        other => Err(format!("unknown reduction {other:?}")),
    }
}
