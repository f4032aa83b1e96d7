//! Operations that work cell by cell.

use crate::array::{Array, Kind, broadcast, truth};
use crate::call::{Call, Value};
use crate::tape::{Link, Var};

/// A value and its slope.
type Slope = (f64, f64);
/// A value and both its slopes.
type Slopes = (f64, f64, f64);

/// A float function of one number; `None` if there is none of this name.
pub(crate) fn unary(name: &str) -> Option<fn(f64) -> Slope> {
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

/// A function of one number that keeps integers whole.
pub(crate) fn unary_any(name: &str) -> Option<fn(f64) -> Slope> {
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

/// A question about one number.
pub(crate) fn question(name: &str) -> Option<fn(f64) -> bool> {
    Some(match name {
        "isnan" => f64::is_nan,
        "isinf" => f64::is_infinite,
        "isfinite" => f64::is_finite,
        "invert" | "logical_not" => |x| x == 0.0,
        _ => return None,
    })
}

/// A question about two numbers.
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

/// A function of two numbers, with its slopes.
pub(crate) fn binary(name: &str) -> Option<fn(f64, f64) -> Slopes> {
    Some(match name {
        "add" => |a, b| (a + b, 1.0, 1.0),
        "sub" => |a, b| (a - b, 1.0, -1.0),
        "mul" => |a, b| (a * b, b, a),
        "div" | "truediv" => |a, b| (a / b, 1.0 / b, -a / (b * b)),
        "floordiv" => |a, b| ((a / b).floor(), 0.0, 0.0),
        // As Python: the sign of the divisor.
        "mod" => |a, b| (a - (a / b).floor() * b, 1.0, -(a / b).floor()),
        "pow" => power,
        "minimum" => |a, b| {
            let (value, (da, db)) = if a.is_nan() || b.is_nan() {
                (f64::NAN, (1.0, 1.0))
            } else {
                (a.min(b), choose(a, b))
            };
            (value, da, db)
        },
        "maximum" => |a, b| {
            let (value, (da, db)) = if a.is_nan() || b.is_nan() {
                (f64::NAN, (1.0, 1.0))
            } else {
                (a.max(b), choose(b, a))
            };
            (value, da, db)
        },
        "logaddexp" => |a, b| {
            let top = a.max(b);
            let value = if top.is_infinite() { top } else { top + log1p_exp(-(a - b).abs()) };
            (value, sigmoid(a - b), sigmoid(b - a))
        },
        _ => return None,
    })
}

/// Which of two the smaller one is; a tie is shared.
fn choose(a: f64, b: f64) -> (f64, f64) {
    if a < b {
        (1.0, 0.0)
    } else if a > b {
        (0.0, 1.0)
    } else {
        (0.5, 0.5)
    }
}

fn power(a: f64, b: f64) -> (f64, f64, f64) {
    let value = a.powf(b);
    let by_a = if b == 0.0 { 0.0 } else { b * a.powf(b - 1.0) };
    let by_b = if a == 0.0 && b >= 0.0 { 0.0 } else { value * a.ln() };
    (value, by_a, by_b)
}

fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / (1.0 + x.exp()) }
}

fn sign(x: f64) -> f64 {
    if x == 0.0 || x.is_nan() { x * 0.0 } else { x.signum() }
}

/// `ln(1 + exp(x))`, without overflow.
fn log1p_exp(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// `x Φ(x)`, where Φ is the share of a normal distribution below `x`.
fn gelu(x: f64) -> Slope {
    let share = 0.5 * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2));
    let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    (x * share, share + if density == 0.0 { 0.0 } else { x * density })
}

fn gelu_tanh(x: f64) -> Slope {
    const CUBE: f64 = 0.044_715;
    let root = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
    let tanh = (root * (x + CUBE * x * x * x)).tanh();
    let flat = 1.0 - tanh * tanh;
    let inner = if flat == 0.0 { 0.0 } else { flat * root * (1.0 + 3.0 * CUBE * x * x) };
    (0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * inner)
}

/// The error function, by a series of positive terms: nothing cancels.
fn erf(x: f64) -> f64 {
    // Beyond 6 the rest is below the last bit of 1.
    if x.is_nan() || x.abs() > 6.0 {
        return if x.is_nan() { x } else { x.signum() };
    }
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term.abs() > sum.abs() * f64::EPSILON / 4.0 {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// What two numbers give: floats if one is, and never less than integers from arithmetic.
pub(crate) fn wider(call: &Call<'_>, a: Var, b: Var) -> Kind {
    call.tape.get(a).kind.max(call.tape.get(b).kind)
}

/// Cell-by-cell operations with settings of their own.
pub(crate) fn run(name: &str, call: &mut Call<'_>) -> Result<Option<Value>, String> {
    let var = match name {
        "softplus" => {
            let x = call.tensor(0, "input")?;
            let beta = call.optional_number(1, "beta")?.unwrap_or(1.0);
            let threshold = call.optional_number(2, "threshold")?.unwrap_or(20.0);
            call.tape.unary(x, Kind::Float, |x| {
                if x * beta > threshold {
                    (x, 1.0)
                } else {
                    (log1p_exp(x * beta) / beta, sigmoid(x * beta))
                }
            })
        }
        "gelu" => {
            let x = call.tensor(0, "input")?;
            let slope = match call.optional_text(1, "approximate")?.as_deref() {
                None | Some("none") => gelu,
                Some("tanh") => gelu_tanh,
                Some(other) => return Err(format!("gelu has no approximation {other:?}")),
            };
            call.tape.unary(x, Kind::Float, slope)
        }
        "clamp" | "clip" => clamp(call),
        "where" => pick(call),
        "masked_fill" => {
            let x = call.tensor(0, "input")?;
            let mask = call.tensor(1, "mask")?;
            let value = call.tensor(2, "value")?;
            let held = call.tape.detach(value)?;
            select(call, mask, held, x)
        }
        "nan_to_num" => {
            let x = call.tensor(0, "input")?;
            let nan = call.optional_number(1, "nan")?.unwrap_or(0.0);
            let most = f64::from(f32::MAX);
            let posinf = call.optional_number(2, "posinf")?.unwrap_or(most);
            let neginf = call.optional_number(3, "neginf")?.unwrap_or(-most);
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
    var.map(|var| Some(Value::Tensor(var)))
}

fn clamp(call: &mut Call<'_>) -> Result<Var, String> {
    let mut x = call.tensor(0, "input")?;
    let (low, high) = (call.optional_tensor(1, "min")?, call.optional_tensor(2, "max")?);
    if low.is_none() && high.is_none() {
        return Err("clamp needs min or max".to_owned());
    }
    if let Some(low) = low {
        let kind = wider(call, x, low);
        x = call.tape.binary(x, low, kind, |x, low| match x < low {
            true => (low, 0.0, 1.0),
            false => (x, 1.0, 0.0),
        })?;
    }
    if let Some(high) = high {
        let kind = wider(call, x, high);
        x = call.tape.binary(x, high, kind, |x, high| match x > high {
            true => (high, 0.0, 1.0),
            false => (x, 1.0, 0.0),
        })?;
    }
    Ok(x)
}

/// `where(condition, a, b)`; as a method, `a.where(condition, b)`.
fn pick(call: &mut Call<'_>) -> Result<Var, String> {
    let first = call.tensor(0, "condition")?;
    let second = call.tensor(1, "input")?;
    let other = call.tensor(2, "other")?;
    let is_bool = |var: Var| call.tape.get(var).kind == Kind::Bool;
    match (is_bool(first), is_bool(second)) {
        (true, _) => select(call, first, second, other),
        (false, true) => select(call, second, first, other),
        (false, false) => Err("the condition of where must be of truth values".to_owned()),
    }
}

/// `a` where the mask holds, `b` elsewhere; only the chosen one has a slope.
fn select(call: &mut Call<'_>, mask: Var, a: Var, b: Var) -> Result<Var, String> {
    let kind = wider(call, a, b);
    // Two products would turn an infinity that was not chosen into NaN.
    let shape = broadcast(call.tape.shape(a), call.tape.shape(b))
        .and_then(|shape| broadcast(&shape, call.tape.shape(mask)))
        .ok_or("the shapes of condition and values do not fit together")?;
    let mask = call.tape.stretched(mask, &shape)?;
    let (a, b) = (call.tape.stretched(a, &shape)?, call.tape.stretched(b, &shape)?);
    let held: Vec<bool> = call.tape.get(mask).data.iter().map(|&m| m != 0.0).collect();
    let (left, right) = (&call.tape.get(a).data, &call.tape.get(b).data);
    let data = held.iter().enumerate().map(|(i, &yes)| if yes { left[i] } else { right[i] });
    let value = Array { shape, data: data.collect(), kind };
    let by_a = held.iter().map(|&yes| truth(yes)).collect();
    let by_b = held.iter().map(|&yes| truth(!yes)).collect();
    call.tape.derive(value, vec![(a, Link::Scale(by_a)), (b, Link::Scale(by_b))])
}
