//! The steps a traced loss is made of: what each is called on the server, what it computes here,
//! and how a gradient goes back through it.

use tinkex_wire::{Arg, Node};

use super::array::{Array, Size};

/// A step, whose operands are earlier steps.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    Input(usize),
    One(One, usize),
    Two(Two, Operand, Operand),
    Clamp(usize, Option<f64>, Option<f64>),
    /// The second where the first is not zero, the third elsewhere.
    Where(usize, Operand, Operand),
}

/// What a step works on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Operand {
    Step(usize),
    Number(f64),
}

/// What is done to one array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum One {
    Neg,
    Exp,
    Log,
    Abs,
    Sqrt,
    Sigmoid,
    Tanh,
    Relu,
    LogSigmoid,
    Softplus,
    Detach,
    Sum,
    Mean,
    SumLast,
    LogSumExpLast,
    CumSum,
}

/// What is done with two arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Two {
    Add,
    Sub,
    Mul,
    Div,
    Pow,
    Maximum,
    Minimum,
    Greater,
    Less,
}

impl One {
    /// What a server knows it as, and whether it is a method.
    fn name(self) -> (&'static str, bool) {
        match self {
            Self::Neg => ("operator.neg", false),
            Self::Exp => ("torch.exp", false),
            Self::Log => ("torch.log", false),
            Self::Abs => ("torch.abs", false),
            Self::Sqrt => ("torch.sqrt", false),
            Self::Sigmoid => ("torch.sigmoid", false),
            Self::Tanh => ("torch.tanh", false),
            Self::Relu => ("torch.relu", false),
            Self::LogSigmoid => ("torch._C._nn.log_sigmoid", false),
            Self::Softplus => ("torch._C._nn.softplus", false),
            Self::LogSumExpLast => ("torch.logsumexp", false),
            Self::CumSum => ("torch.cumsum", false),
            Self::Detach => ("detach", true),
            Self::Sum | Self::SumLast => ("sum", true),
            Self::Mean => ("mean", true),
        }
    }

    /// How many dimensions the result has, or why there is none.
    pub(super) fn rank(self, rank: u8) -> Result<u8, &'static str> {
        match (self, rank) {
            (Self::Sum | Self::Mean, _) => Ok(0),
            (Self::SumLast | Self::LogSumExpLast, 0) => {
                Err("a single number has no last dimension")
            }
            (Self::SumLast | Self::LogSumExpLast, _) => Ok(rank - 1),
            (Self::CumSum, 1) => Ok(1),
            (Self::CumSum, _) => Err("only a sequence can be summed up step by step"),
            _ => Ok(rank),
        }
    }

    pub(super) fn run(self, x: &Array) -> Array {
        match self {
            Self::Neg => x.map(|x| -x),
            Self::Exp => x.map(f64::exp),
            Self::Log => x.map(f64::ln),
            Self::Abs => x.map(f64::abs),
            Self::Sqrt => x.map(f64::sqrt),
            Self::Sigmoid => x.map(sigmoid),
            Self::Tanh => x.map(f64::tanh),
            Self::Relu => x.map(|x| larger(x, 0.0)),
            Self::LogSigmoid => x.map(|x| -softplus(-x)),
            Self::Softplus => x.map(softplus),
            Self::Detach => x.clone(),
            Self::Sum => Array::scalar(x.sum()),
            Self::Mean => Array::scalar(x.sum() / count(x)),
            Self::SumLast => by_row(x, |row| row.iter().sum()),
            Self::LogSumExpLast => by_row(x, log_sum_exp),
            Self::CumSum => {
                let mut sum = 0.0;
                let values = x.values.iter().map(|x| {
                    sum += x;
                    sum
                });
                Array { size: x.size, values: values.collect() }
            }
        }
    }

    /// The gradient of the operand, from that of the result. `None` if there is none.
    pub(super) fn back(self, x: &Array, y: &Array, gradient: &Array) -> Option<Array> {
        let times = |slope: &dyn Fn(f64, f64) -> f64| {
            let values = x.values.iter().zip(&y.values).zip(&gradient.values);
            let values = values.map(|((x, y), gradient)| gradient * slope(*x, *y)).collect();
            Array { size: x.size, values }
        };
        Some(match self {
            Self::Neg => times(&|_, _| -1.0),
            Self::Exp => times(&|_, y| y),
            Self::Log => times(&|x, _| 1.0 / x),
            Self::Abs => times(&|x, _| if x == 0.0 { 0.0 } else { x.signum() }),
            Self::Sqrt => times(&|_, y| 0.5 / y),
            Self::Sigmoid => times(&|_, y| y * (1.0 - y)),
            Self::Tanh => times(&|_, y| 1.0 - y * y),
            Self::Relu => times(&|x, _| f64::from(x > 0.0)),
            Self::LogSigmoid => times(&|x, _| sigmoid(-x)),
            Self::Softplus => times(&|x, _| sigmoid(x)),
            Self::Detach => return None,
            Self::Sum => Array::filled(x.size, gradient.values[0]),
            Self::Mean => Array::filled(x.size, gradient.values[0] / count(x)),
            Self::SumLast => spread(x, gradient, |_, _| 1.0),
            Self::LogSumExpLast => {
                let whole = Array { size: column(x.size), values: y.values.clone() };
                spread(x, gradient, |x, row| (x - whole.values[row]).exp())
            }
            Self::CumSum => {
                let mut sum = 0.0;
                let mut values: Vec<f64> = gradient
                    .values
                    .iter()
                    .rev()
                    .map(|gradient| {
                        sum += gradient;
                        sum
                    })
                    .collect();
                values.reverse();
                Array { size: x.size, values }
            }
        })
    }
}

impl Two {
    fn name(self) -> &'static str {
        match self {
            Self::Add => "operator.add",
            Self::Sub => "operator.sub",
            Self::Mul => "operator.mul",
            Self::Div => "operator.truediv",
            Self::Pow => "operator.pow",
            Self::Maximum => "torch.maximum",
            Self::Minimum => "torch.minimum",
            Self::Greater => "operator.gt",
            Self::Less => "operator.lt",
        }
    }

    pub(super) fn run(self, a: &Array, b: &Array) -> Option<Array> {
        a.zip(b, |a, b| match self {
            Self::Add => a + b,
            Self::Sub => a - b,
            Self::Mul => a * b,
            Self::Div => a / b,
            Self::Pow => a.powf(b),
            Self::Maximum => larger(a, b),
            Self::Minimum => -larger(-a, -b),
            Self::Greater => f64::from(a > b),
            Self::Less => f64::from(a < b),
        })
    }

    /// How much the result changes with each operand.
    pub(super) fn slopes(self, a: f64, b: f64) -> (f64, f64) {
        // Of two equal numbers each counts half, as on the server.
        let side = |wins: bool| if a == b { 0.5 } else { f64::from(wins) };
        match self {
            Self::Add => (1.0, 1.0),
            Self::Sub => (1.0, -1.0),
            Self::Mul => (b, a),
            Self::Div => (1.0 / b, -a / (b * b)),
            Self::Pow => {
                let exponent = if a > 0.0 { a.powf(b) * a.ln() } else { 0.0 };
                (if b == 0.0 { 0.0 } else { b * a.powf(b - 1.0) }, exponent)
            }
            Self::Maximum => (side(a > b), side(b > a)),
            Self::Minimum => (side(a < b), side(b < a)),
            Self::Greater | Self::Less => (0.0, 0.0),
        }
    }
}

impl Step {
    /// The step as a server reads it.
    pub(super) fn node(&self, at: usize, inputs: &[(String, u8)]) -> Node {
        let name = name(at);
        let step = |at: &usize| Arg::node(&node_name(*at, inputs));
        let arg = |operand: &Operand| match operand {
            Operand::Step(at) => step(at),
            Operand::Number(number) => Arg::from(*number),
        };
        let bound = |bound: &Option<f64>| bound.map_or_else(Arg::null, Arg::from);
        match self {
            Self::Input(input) => Node::placeholder(&inputs[*input].0),
            Self::One(one, x) => {
                let (target, method) = one.name();
                let node = if method {
                    Node::method(&name, target, [step(x)])
                } else {
                    Node::function(&name, target, [step(x)])
                };
                match one {
                    One::SumLast | One::LogSumExpLast => node.kwarg("dim", -1),
                    One::CumSum => node.kwarg("dim", 0),
                    _ => node,
                }
            }
            Self::Two(two @ (Two::Maximum | Two::Minimum), a, Operand::Number(bound)) => {
                // Their second operand must be a tensor there; a bound is a clamp.
                let (low, high) = match two {
                    Two::Maximum => (Arg::from(*bound), Arg::null()),
                    _ => (Arg::null(), Arg::from(*bound)),
                };
                Node::function(&name, "torch.clamp", [arg(a)]).kwarg("min", low).kwarg("max", high)
            }
            Self::Two(two, a, b) => Node::function(&name, two.name(), [arg(a), arg(b)]),
            Self::Clamp(x, low, high) => Node::function(&name, "torch.clamp", [step(x)])
                .kwarg("min", bound(low))
                .kwarg("max", bound(high)),
            Self::Where(condition, yes, no) => {
                Node::function(&name, "torch.where", [step(condition), arg(yes), arg(no)])
            }
        }
    }
}

/// What a step is called in a graph. Inputs stand first, under their own names.
pub(super) fn node_name(at: usize, inputs: &[(String, u8)]) -> String {
    inputs.get(at).map_or_else(|| name(at), |(input, _)| input.clone())
}

/// No input is called that: names with a capital are not allowed there.
fn name(at: usize) -> String {
    format!("Step{at}")
}

/// What is not a number stays that, unlike with `f64::max`: a broken loss must not look whole.
pub(super) fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn log_sum_exp(row: &[f64]) -> f64 {
    let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if most.is_infinite() {
        return most;
    }
    most + row.iter().map(|x| (x - most).exp()).sum::<f64>().ln()
}

#[expect(clippy::cast_precision_loss, reason = "nobody has 2^53 tokens")]
fn count(x: &Array) -> f64 {
    x.values.len() as f64
}

/// One number for each row.
fn column(size: Size) -> Size {
    Size { rows: 1, cols: size.rows }
}

fn by_row(x: &Array, function: impl Fn(&[f64]) -> f64) -> Array {
    Array { size: column(x.size), values: x.rows().map(function).collect() }
}

/// A gradient for each row, spread over its columns by a slope.
fn spread(x: &Array, gradient: &Array, slope: impl Fn(f64, usize) -> f64) -> Array {
    let rows = x.rows().enumerate();
    let values = rows
        .flat_map(|(row, values)| {
            let slope = &slope;
            values.iter().map(move |x| gradient.values[row] * slope(*x, row))
        })
        .collect();
    Array { size: x.size, values }
}
