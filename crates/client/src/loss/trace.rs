//! [`Trace`] and [`Term`]: writing down what a loss computes.

use std::cell::RefCell;
use std::ops::{Add, Div, Mul, Neg, Sub};

use super::step::{One, Operand, Step, Two};

/// Writes down a loss while it is being described; see [`CustomLoss::trace`](super::CustomLoss).
#[derive(Debug, Default)]
pub struct Trace {
    state: RefCell<State>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) inputs: Vec<(String, u8)>,
    pub(super) steps: Vec<Step>,
    /// How many dimensions each step has.
    pub(super) ranks: Vec<u8>,
    pub(super) metrics: Vec<(String, usize)>,
    /// The first thing that makes no sense.
    pub(super) fault: Option<String>,
}

/// A number, a sequence or a table of numbers that a loss computes for each datum.
///
/// Terms are combined with `+ - * /` among themselves and with numbers; a smaller one is stretched
/// to fit. Nothing is computed while they are.
#[derive(Clone, Copy, Debug)]
pub struct Term<'t> {
    trace: &'t Trace,
    at: usize,
}

impl Trace {
    /// A loss input of this name with so many dimensions: 0 for a number, 1 for one number a
    /// token, 2 for a row a token.
    pub fn input(&self, name: &str, rank: u8) -> Term<'_> {
        let mut state = self.state.borrow_mut();
        if state.steps.len() > state.inputs.len() {
            let why = format!("input {name:?} must be named before anything is computed");
            state.fault.get_or_insert(why);
        }
        let at = state.inputs.len();
        state.inputs.push((name.to_owned(), rank));
        state.steps.push(Step::Input(at));
        state.ranks.push(rank);
        // If something stands before it, the fault above is what counts.
        Term { trace: self, at: state.steps.len() - 1 }
    }

    /// Reports a term with the loss. The name is `custom/…:sum` or `custom/…:mean`, which says how
    /// datums are joined; the term is a single number.
    pub fn metric(&self, name: &str, value: Term<'_>) {
        let mut state = self.state.borrow_mut();
        if state.ranks[value.at] != 0 {
            state.fault.get_or_insert(format!("metric {name:?} is not a single number"));
        }
        state.metrics.push((name.to_owned(), value.at));
    }

    pub(super) fn into_state(self) -> State {
        self.state.into_inner()
    }

    fn push(&self, step: Step, rank: u8) -> Term<'_> {
        let mut state = self.state.borrow_mut();
        state.steps.push(step);
        state.ranks.push(rank);
        Term { trace: self, at: state.steps.len() - 1 }
    }

    pub(super) fn refuse(&self, why: impl Into<String>) {
        self.state.borrow_mut().fault.get_or_insert_with(|| why.into());
    }
}

impl<'t> Term<'t> {
    pub(super) fn at(self) -> usize {
        self.at
    }

    /// How many dimensions it has.
    #[must_use]
    pub fn rank(self) -> u8 {
        self.trace.state.borrow().ranks[self.at]
    }

    fn one(self, one: One) -> Self {
        let rank = one.rank(self.rank()).unwrap_or_else(|why| {
            self.trace.refuse(why);
            0
        });
        self.trace.push(Step::One(one, self.at), rank)
    }

    fn two(self, two: Two, other: impl Into<Factor<'t>>) -> Self {
        let (other, rank) = self.operand(other);
        self.trace.push(Step::Two(two, Operand::Step(self.at), other), self.rank().max(rank))
    }

    fn operand(self, factor: impl Into<Factor<'t>>) -> (Operand, u8) {
        match factor.into() {
            Factor::Term(term) => {
                if !std::ptr::eq(term.trace, self.trace) {
                    self.trace.refuse("a term of another trace was used");
                }
                (Operand::Step(term.at), term.rank())
            }
            Factor::Number(number) => (Operand::Number(number), 0),
        }
    }

    fn two_back(self, two: Two, number: f64) -> Self {
        let step = Step::Two(two, Operand::Number(number), Operand::Step(self.at));
        self.trace.push(step, self.rank())
    }

    /// e to this.
    #[must_use]
    pub fn exp(self) -> Self {
        self.one(One::Exp)
    }

    /// The natural logarithm.
    #[must_use]
    pub fn ln(self) -> Self {
        self.one(One::Log)
    }

    /// Without its sign.
    #[must_use]
    pub fn abs(self) -> Self {
        self.one(One::Abs)
    }

    /// The square root.
    #[must_use]
    pub fn sqrt(self) -> Self {
        self.one(One::Sqrt)
    }

    /// 1 / (1 + e^-x).
    #[must_use]
    pub fn sigmoid(self) -> Self {
        self.one(One::Sigmoid)
    }

    /// The logarithm of [`Term::sigmoid`], exact for large numbers too.
    #[must_use]
    pub fn log_sigmoid(self) -> Self {
        self.one(One::LogSigmoid)
    }

    /// ln(1 + e^x).
    #[must_use]
    pub fn softplus(self) -> Self {
        self.one(One::Softplus)
    }

    /// The hyperbolic tangent.
    #[must_use]
    pub fn tanh(self) -> Self {
        self.one(One::Tanh)
    }

    /// 0 where it is negative.
    #[must_use]
    pub fn relu(self) -> Self {
        self.one(One::Relu)
    }

    /// The same value, through which no gradient flows.
    #[must_use]
    pub fn detach(self) -> Self {
        self.one(One::Detach)
    }

    /// All of it together.
    #[must_use]
    pub fn sum(self) -> Self {
        self.one(One::Sum)
    }

    /// The average of all of it.
    #[must_use]
    pub fn mean(self) -> Self {
        self.one(One::Mean)
    }

    /// The sum over the last dimension.
    #[must_use]
    pub fn sum_last(self) -> Self {
        self.one(One::SumLast)
    }

    /// The logarithm of the sum of e^x over the last dimension.
    #[must_use]
    pub fn log_sum_exp_last(self) -> Self {
        self.one(One::LogSumExpLast)
    }

    /// The sum of everything up to each token.
    #[must_use]
    pub fn cumulative_sum(self) -> Self {
        self.one(One::CumSum)
    }

    /// To a power.
    #[must_use]
    pub fn pow(self, exponent: f64) -> Self {
        self.two(Two::Pow, exponent)
    }

    /// The larger of the two, value by value.
    #[must_use]
    pub fn max(self, other: impl Into<Factor<'t>>) -> Self {
        self.two(Two::Maximum, other)
    }

    /// The smaller of the two, value by value.
    #[must_use]
    pub fn min(self, other: impl Into<Factor<'t>>) -> Self {
        self.two(Two::Minimum, other)
    }

    /// 1 where this is greater, 0 elsewhere.
    #[must_use]
    pub fn greater_than(self, other: impl Into<Factor<'t>>) -> Self {
        self.two(Two::Greater, other)
    }

    /// 1 where this is less, 0 elsewhere.
    #[must_use]
    pub fn less_than(self, other: impl Into<Factor<'t>>) -> Self {
        self.two(Two::Less, other)
    }

    /// No less than `low`, no more than `high`.
    #[must_use]
    pub fn clamp(self, low: f64, high: f64) -> Self {
        let bound = |bound: f64| bound.is_finite().then_some(bound);
        self.trace.push(Step::Clamp(self.at, bound(low), bound(high)), self.rank())
    }

    /// `yes` where a comparison holds, `no` elsewhere.
    #[must_use]
    pub fn choose(self, yes: impl Into<Factor<'t>>, no: impl Into<Factor<'t>>) -> Self {
        let ((yes, yes_rank), (no, no_rank)) = (self.operand(yes), self.operand(no));
        let rank = self.rank().max(yes_rank).max(no_rank);
        self.trace.push(Step::Where(self.at, yes, no), rank)
    }
}

/// A [`Term`] or a number.
#[derive(Clone, Copy, Debug)]
pub enum Factor<'t> {
    /// Computed for each datum.
    Term(Term<'t>),
    /// The same for all.
    Number(f64),
}

impl<'t> From<Term<'t>> for Factor<'t> {
    fn from(term: Term<'t>) -> Self {
        Self::Term(term)
    }
}

impl From<f64> for Factor<'_> {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

macro_rules! operators {
    ($($operator:ident $method:ident $two:ident),* $(,)?) => {$(
        impl<'t, F: Into<Factor<'t>>> $operator<F> for Term<'t> {
            type Output = Self;

            fn $method(self, other: F) -> Self {
                self.two(Two::$two, other)
            }
        }

        impl<'t> $operator<Term<'t>> for f64 {
            type Output = Term<'t>;

            fn $method(self, term: Term<'t>) -> Term<'t> {
                term.two_back(Two::$two, self)
            }
        }
    )*};
}

operators! { Add add Add, Sub sub Sub, Mul mul Mul, Div div Div }

impl Neg for Term<'_> {
    type Output = Self;

    fn neg(self) -> Self {
        self.one(One::Neg)
    }
}
