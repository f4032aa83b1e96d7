//! Element-wise operations and their slopes.

use crate::array::{Array, ElementKind, broadcast};
use crate::call::{CallArgs, NodeValue};
use crate::tape::{LocalGradient, Var};

/// Value of a unary operation, and its slope: the derivative with respect to the operand.
type ValueAndSlope = (f64, f64);
/// Value of a binary operation, and its slopes with respect to both operands.
type ValueAndSlopes = (f64, f64, f64);

/// Returns the unary operation `name` whose result is always a float.
pub(crate) fn unary(name: &str) -> Option<fn(f64) -> ValueAndSlope> {
    Some(match name {
        "exp" => |x| (x.exp(), x.exp()),
        "log" => |x| (x.ln(), 1.0 / x),
        "log1p" => |x| (x.ln_1p(), 1.0 / (1.0 + x)),
        "expm1" => |x| (x.exp_m1(), x.exp()),
        "sqrt" => |x| (x.sqrt(), 0.5 / x.sqrt()),
        "rsqrt" => |x| (1.0 / x.sqrt(), -0.5 / (x * x.sqrt())),
        "reciprocal" => |x| (1.0 / x, -1.0 / (x * x)),
        "sigmoid" => |x| {
            let y = sigmoid(x);
            (y, y * (1.0 - y))
        },
        "tanh" => |x| (x.tanh(), 1.0 - x.tanh() * x.tanh()),
        "logsigmoid" | "log_sigmoid" => |x| (-log1p_exp(-x), sigmoid(-x)),
        _ => return None,
    })
}

/// Returns the unary operation `name` whose result has the type of its operand.
pub(crate) fn unary_same_kind(name: &str) -> Option<fn(f64) -> ValueAndSlope> {
    Some(match name {
        "square" => |x| (x * x, 2.0 * x),
        "abs" => |x| (x.abs(), sign(x)),
        "sign" => |x| (sign(x), 0.0),
        "neg" => |x| (-x, -1.0),
        "pos" => |x| (x, 1.0),
        "relu" => |x| if x > 0.0 || x.is_nan() { (x, 1.0) } else { (0.0, 0.0) },
        _ => return None,
    })
}

/// Returns the unary predicate `name`.
pub(crate) fn predicate(name: &str) -> Option<fn(f64) -> bool> {
    Some(match name {
        "isnan" => f64::is_nan,
        "isinf" => f64::is_infinite,
        "isfinite" => f64::is_finite,
        "invert" | "logical_not" => |x| x == 0.0,
        _ => return None,
    })
}

/// Returns the comparison or logical operation `name`.
pub(crate) fn comparison(name: &str) -> Option<fn(f64, f64) -> bool> {
    Some(match name {
        "lt" => |a, b| a < b,
        "le" => |a, b| a <= b,
        "gt" => |a, b| a > b,
        "ge" => |a, b| a >= b,
        "eq" => |a, b| a == b,
        "ne" => |a, b| a != b,
        "and_" | "logical_and" => |a, b| a != 0.0 && b != 0.0,
        "or_" | "logical_or" => |a, b| a != 0.0 || b != 0.0,
        _ => return None,
    })
}

/// Returns the binary operation `name`.
pub(crate) fn binary(name: &str) -> Option<fn(f64, f64) -> ValueAndSlopes> {
    Some(match name {
        "add" => |a, b| (a + b, 1.0, 1.0),
        "sub" => |a, b| (a - b, 1.0, -1.0),
        "mul" => |a, b| (a * b, b, a),
        "div" => |a, b| (a / b, 1.0 / b, -a / (b * b)),
        "floordiv" => |a, b| ((a / b).floor(), 0.0, 0.0),
        // The result has the sign of the divisor, as in Python.
        "mod" => |a, b| (a - (a / b).floor() * b, 1.0, -(a / b).floor()),
        "pow" => power,
        "minimum" => |a, b| {
            let (value, (da, db)) = if a.is_nan() || b.is_nan() {
                (f64::NAN, (1.0, 1.0))
            } else {
                (a.min(b), minimum_slopes(a, b))
            };
            (value, da, db)
        },
        "maximum" => |a, b| {
            let (value, (da, db)) = if a.is_nan() || b.is_nan() {
                (f64::NAN, (1.0, 1.0))
            } else {
                (a.max(b), minimum_slopes(b, a))
            };
            (value, da, db)
        },
        "logaddexp" => |a, b| {
            let max = a.max(b);
            let value = if max.is_infinite() { max } else { max + log1p_exp(-(a - b).abs()) };
            (value, sigmoid(a - b), sigmoid(b - a))
        },
        _ => return None,
    })
}

/// Returns the slopes of the minimum of two numbers. At a tie each gets one half.
fn minimum_slopes(a: f64, b: f64) -> (f64, f64) {
    if a < b {
        (1.0, 0.0)
    } else if a > b {
        (0.0, 1.0)
    } else {
        (0.5, 0.5)
    }
}

/// Computes `a` to the power `b`. For `b = 0` the slope with respect to `a` is 0; for `a = 0` and
/// `b ≥ 0` the slope with respect to `b` is 0.
fn power(a: f64, b: f64) -> ValueAndSlopes {
    let value = a.powf(b);
    let by_a = if b == 0.0 { 0.0 } else { b * a.powf(b - 1.0) };
    let by_b = if a == 0.0 && b >= 0.0 { 0.0 } else { value * a.ln() };
    (value, by_a, by_b)
}

fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / (1.0 + x.exp()) }
}

/// Returns -1, 0 or 1; NaN for NaN.
pub(crate) fn sign(x: f64) -> f64 {
    if x == 0.0 || x.is_nan() { x * 0.0 } else { x.signum() }
}

/// Computes `ln(1 + exp(x))` without overflow.
fn log1p_exp(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Computes `x Φ(x)`, where Φ is the cumulative distribution function of the standard normal.
fn gelu(x: f64) -> ValueAndSlope {
    let cumulative = 0.5 * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2));
    let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    (x * cumulative, cumulative + if density == 0.0 { 0.0 } else { x * density })
}

/// Computes the approximation `½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))` of [`gelu`].
fn gelu_tanh(x: f64) -> ValueAndSlope {
    const CUBIC: f64 = 0.044_715;
    let scale = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
    let tanh = (scale * (x + CUBIC * x * x * x)).tanh();
    let tanh_slope = 1.0 - tanh * tanh;
    let slope =
        if tanh_slope == 0.0 { 0.0 } else { tanh_slope * scale * (1.0 + 3.0 * CUBIC * x * x) };
    (0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * slope)
}

/// Computes the error function by a series whose terms all have the same sign, which avoids
/// cancellation.
fn erf(x: f64) -> f64 {
    // Beyond 6 the distance to ±1 is below the precision of f64.
    if x.is_nan() || x.abs() > 6.0 {
        return if x.is_nan() { x } else { x.signum() };
    }
    let mut term = x;
    let mut sum = x;
    let mut n = 1.0;
    while term.abs() > sum.abs() * f64::EPSILON / 4.0 {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// Returns the element type that two operands are promoted to.
pub(crate) fn promoted(call: &CallArgs<'_>, a: Var, b: Var) -> ElementKind {
    call.tape.get(a).kind.max(call.tape.get(b).kind)
}

/// Runs the element-wise operation `name` if it has options; otherwise returns `None`.
pub(crate) fn run(name: &str, call: &mut CallArgs<'_>) -> Result<Option<NodeValue>, String> {
    let var = match name {
        "softplus" => {
            let x = call.tensor(0, "input")?;
            let beta = call.optional_number(1, "beta")?.unwrap_or(1.0);
            let threshold = call.optional_number(2, "threshold")?.unwrap_or(20.0);
            call.tape.unary(x, ElementKind::Float, |x| {
                if x * beta > threshold {
                    (x, 1.0)
                } else {
                    (log1p_exp(x * beta) / beta, sigmoid(x * beta))
                }
            })
        }
        "gelu" => {
            let x = call.tensor(0, "input")?;
            let function = match call.optional_text(1, "approximate")?.as_deref() {
                None | Some("none") => gelu,
                Some("tanh") => gelu_tanh,
                Some(other) => return Err(format!("unknown approximation {other:?} of gelu")),
            };
            call.tape.unary(x, ElementKind::Float, function)
        }
        "clamp" | "clip" => clamp(call),
        "where" => run_where(call),
        "masked_fill" => {
            let x = call.tensor(0, "input")?;
            let mask = call.tensor(1, "mask")?;
            let value = call.tensor(2, "value")?;
            let value = call.tape.detach(value)?;
            select(call, mask, value, x)
        }
        "nan_to_num" => {
            let x = call.tensor(0, "input")?;
            let nan = call.optional_number(1, "nan")?.unwrap_or(0.0);
            let max = f64::from(f32::MAX);
            let posinf = call.optional_number(2, "posinf")?.unwrap_or(max);
            let neginf = call.optional_number(3, "neginf")?.unwrap_or(-max);
            let kind = call.tape.get(x).kind;
            call.tape.unary(x, kind, |x| match x {
                x if x.is_nan() => (nan, 0.0),
                f64::INFINITY => (posinf, 0.0),
                f64::NEG_INFINITY => (neginf, 0.0),
                x => (x, 1.0),
            })
        }
        _ => return Ok(None),
    };
    var.map(|var| Some(NodeValue::Tensor(var)))
}

/// Runs `clamp`. The slope on a bound is 1, as in the built-in losses with clipping and in older
/// versions of PyTorch.
fn clamp(call: &mut CallArgs<'_>) -> Result<Var, String> {
    let mut x = call.tensor(0, "input")?;
    let low = call.optional_tensor(1, "min")?;
    let high = call.optional_tensor(2, "max")?;
    if low.is_none() && high.is_none() {
        return Err("clamp needs min or max".to_owned());
    }
    if let Some(low) = low {
        let kind = promoted(call, x, low);
        x = call
            .tape
            .binary(x, low, kind, |x, low| if x < low { (low, 0.0, 1.0) } else { (x, 1.0, 0.0) })?;
    }
    if let Some(high) = high {
        let kind = promoted(call, x, high);
        x = call.tape.binary(x, high, kind, |x, high| {
            if x > high { (high, 0.0, 1.0) } else { (x, 1.0, 0.0) }
        })?;
    }
    Ok(x)
}

/// Runs `where(condition, a, b)`, or as a method `a.where(condition, b)`.
fn run_where(call: &mut CallArgs<'_>) -> Result<Var, String> {
    let first = call.tensor(0, "condition")?;
    let second = call.tensor(1, "input")?;
    let other = call.tensor(2, "other")?;
    let is_bool = |var: Var| call.tape.get(var).kind == ElementKind::Bool;
    match (is_bool(first), is_bool(second)) {
        (true, _) => select(call, first, second, other),
        (false, true) => select(call, second, first, other),
        (false, false) => Err("the condition of where must be a boolean tensor".to_owned()),
    }
}

/// Returns `a` where the mask is true and `b` elsewhere. The gradient flows to the selected
/// element.
fn select(call: &mut CallArgs<'_>, mask: Var, a: Var, b: Var) -> Result<Var, String> {
    let kind = promoted(call, a, b);
    // A sum of products with 0 and 1 would be NaN where the element that is not selected is
    // infinite.
    let shape = broadcast(call.tape.shape(a), call.tape.shape(b))
        .and_then(|shape| broadcast(&shape, call.tape.shape(mask)))
        .ok_or("the shapes of condition and values cannot be broadcast together")?;
    let mask = call.tape.broadcast_to(mask, &shape)?;
    let a = call.tape.broadcast_to(a, &shape)?;
    let b = call.tape.broadcast_to(b, &shape)?;
    call.tape.check_words(4 * call.tape.get(mask).data.len())?;
    let selected: Vec<bool> = call.tape.get(mask).data.iter().map(|&m| m != 0.0).collect();
    let left = &call.tape.get(a).data;
    let right = &call.tape.get(b).data;
    let data = selected.iter().enumerate().map(|(i, &yes)| if yes { left[i] } else { right[i] });
    let value = Array { shape, data: data.collect(), kind };
    let by_a = selected.iter().map(|&yes| f64::from(yes)).collect();
    let by_b = selected.iter().map(|&yes| f64::from(!yes)).collect();
    call.tape.derive(
        value,
        vec![(a, LocalGradient::Elementwise(by_a)), (b, LocalGradient::Elementwise(by_b))],
    )
}
