//! [`Trace`], [`Term`] and [`Mask`]: the description of a traced loss.

use std::cell::RefCell;
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};

use tinkex_autodiff::{GraphArg, GraphInput, GraphNode};

/// Records the operations of a loss while a closure describes the loss.
///
/// [`CustomLoss::trace`](super::CustomLoss::trace) passes a `Trace` to its closure. Mistakes in the
/// description, such as an input declared too late, are recorded; `CustomLoss::trace` returns the
/// first mistake as an error.
#[derive(Debug, Default)]
pub struct Trace {
    traced: RefCell<TracedLoss>,
}

/// Operations recorded by a [`Trace`].
#[derive(Debug, Default)]
pub(crate) struct TracedLoss {
    pub(crate) inputs: Vec<GraphInput>,
    pub(crate) nodes: Vec<GraphNode>,
    /// Rank of the value of each node.
    pub(crate) ranks: Vec<u8>,
    /// Pairs of metric name and node.
    pub(crate) metrics: Vec<(String, usize)>,
    /// First mistake in the description.
    pub(crate) error: Option<String>,
}

/// Scalar, vector or matrix that a loss computes for each datum.
///
/// Terms are combined with `+`, `-`, `*` and `/` among themselves and with `f64`. Operands of
/// different shapes are broadcast as in PyTorch: shapes are aligned at the last dimension, and a
/// missing dimension, or a dimension of length 1, is repeated. Combining terms only records the
/// operation; nothing is computed until the loss is executed.
///
/// Every method is one PyTorch operation, with PyTorch's subgradient where the operation is not
/// differentiable. The exceptions are documented at [`clamp`](Self::clamp) and [`Mask::choose`].
///
/// ```
/// use tinkex::loss::CustomLoss;
/// use tinkex::{Datum, TensorData};
///
/// // Squared hinge: max(0, margin - x)².
/// let hinge = CustomLoss::trace("hinge", |trace| {
///     let logprobs = trace.input("logprobs", 1);
///     let margin = trace.input("margin", 0);
///     (margin - logprobs).relu().pow(2.0).sum()
/// })?;
/// let datum = Datum::builder([1, 2])
///     .loss_input("target_tokens", vec![2_i64, 3])
///     .loss_input("margin", TensorData::scalar(-1.0_f32))
///     .build()?;
/// let value = hinge.evaluate(&[datum], &[TensorData::from(vec![-0.5_f32, -3.0])])?;
/// assert_eq!(value.loss, 4.0);
/// assert_eq!(value.gradients, [[0.0, -4.0]]);
/// # Ok::<_, tinkex::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Term<'t> {
    trace: &'t Trace,
    node: usize,
}

/// Boolean tensor: the result of comparing two terms.
///
/// Masks are combined with `&`, `|` and `!`, and select between two terms with
/// [`choose`](Self::choose). A loss input of zeros and ones becomes a mask with
/// [`Term::gt(0.0)`](Term::gt).
///
/// ```
/// use tinkex::loss::CustomLoss;
///
/// let loss = CustomLoss::trace("inside", |trace| {
///     let logprobs = trace.input("logprobs", 1);
///     let inside = logprobs.gt(-5.0) & logprobs.lt(-0.1);
///     trace.metric("custom/inside:mean", inside.choose(1.0, 0.0).mean());
///     -inside.choose(logprobs, 0.0).sum()
/// })?;
/// # Ok::<_, tinkex::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Mask<'t>(Term<'t>);

/// Operand of a binary operation: a [`Term`] or a number.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'t> {
    /// Term of the same trace.
    Term(Term<'t>),
    /// Constant.
    Number(f64),
}

impl Trace {
    /// Declares a loss input and returns the term with its value.
    ///
    /// `rank` is the number of dimensions: 0 for a scalar, 1 for one number per token, 2 for one
    /// row per token. All inputs must be declared before the first operation, `logprobs` first.
    pub fn input(&self, name: &str, rank: u8) -> Term<'_> {
        let mut traced = self.traced.borrow_mut();
        if traced.nodes.len() > traced.inputs.len() {
            let reason = format!("input {name:?} is declared after the first computation");
            traced.error.get_or_insert(reason);
        }
        traced.inputs.push(GraphInput::new(name, rank));
        traced.nodes.push(GraphNode::placeholder(name));
        traced.ranks.push(rank);
        Term { trace: self, node: traced.nodes.len() - 1 }
    }

    /// Reports a scalar term as a metric.
    ///
    /// The name is `custom/NAME:sum` or `custom/NAME:mean`; the suffix states how the values of
    /// several data are combined. `NAME` is 1 to 64 characters of `a-z 0-9 _ . / -`.
    pub fn metric(&self, name: &str, value: Term<'_>) {
        let mut traced = self.traced.borrow_mut();
        if !std::ptr::eq(value.trace, self) {
            traced.error.get_or_insert_with(|| FOREIGN_TERM.to_owned());
            return;
        }
        if traced.ranks[value.node] != 0 {
            traced.error.get_or_insert(format!("metric {name:?} is not a scalar"));
        }
        traced.metrics.push((name.to_owned(), value.node));
    }

    pub(crate) fn into_traced(self) -> TracedLoss {
        self.traced.into_inner()
    }

    /// Records a mistake in the description. Only the first mistake is kept.
    pub(crate) fn reject(&self, reason: impl Into<String>) {
        self.traced.borrow_mut().error.get_or_insert_with(|| reason.into());
    }

    /// Records a node whose value has the rank `rank`. `node` creates the node from its name.
    fn push(&self, node: impl FnOnce(&str) -> GraphNode, rank: u8) -> Term<'_> {
        let mut traced = self.traced.borrow_mut();
        // Input names are lower case, so no input has this name.
        let name = format!("Step{}", traced.nodes.len());
        traced.nodes.push(node(&name));
        traced.ranks.push(rank);
        Term { trace: self, node: traced.nodes.len() - 1 }
    }
}

const FOREIGN_TERM: &str = "it uses a term of another trace";

impl<'t> Term<'t> {
    pub(crate) fn node(self) -> usize {
        self.node
    }

    /// Returns the number of dimensions: 0, 1 or 2.
    #[must_use]
    pub fn rank(self) -> u8 {
        self.trace.traced.borrow().ranks[self.node]
    }

    fn arg(self) -> GraphArg {
        GraphArg::node(&self.trace.traced.borrow().nodes[self.node].name)
    }

    /// Records a call of the PyTorch function `target`, whose result has the shape of this term.
    fn function(self, target: &str) -> Self {
        let arg = self.arg();
        self.trace.push(|name| GraphNode::function(name, target, [arg]), self.rank())
    }

    /// Records a call of the tensor method `target`, whose result has the rank `rank`.
    fn method(self, target: &str, rank: u8) -> Self {
        let arg = self.arg();
        self.trace.push(|name| GraphNode::method(name, target, [arg]), rank)
    }

    /// Records a call of the PyTorch function `target` with this term and another operand.
    fn binary(self, target: &str, other: impl Into<Operand<'t>>) -> Self {
        let this = self.arg();
        let (other, rank) = self.operand(other);
        let rank = rank.max(self.rank());
        self.trace.push(|name| GraphNode::function(name, target, [this, other]), rank)
    }

    /// Records a call of the PyTorch function `target` with a number and this term.
    fn binary_from(self, target: &str, number: f64) -> Self {
        let args = [GraphArg::from(number), self.arg()];
        self.trace.push(|name| GraphNode::function(name, target, args), self.rank())
    }

    /// Converts an operand to an argument of a node. Returns the argument and its rank.
    fn operand(self, operand: impl Into<Operand<'t>>) -> (GraphArg, u8) {
        match operand.into() {
            Operand::Number(number) => (number.into(), 0),
            Operand::Term(term) if std::ptr::eq(term.trace, self.trace) => {
                (term.arg(), term.rank())
            }
            Operand::Term(_) => {
                self.trace.reject(FOREIGN_TERM);
                (GraphArg::None, 0)
            }
        }
    }

    /// Returns the rank without the last dimension. Records a mistake if this term is a scalar.
    fn rank_without_last(self, operation: &str) -> u8 {
        self.rank().checked_sub(1).unwrap_or_else(|| {
            self.trace.reject(format!("{operation} of a scalar, which has no last dimension"));
            0
        })
    }

    /// Returns the element-wise exponential, eˣ.
    #[must_use]
    pub fn exp(self) -> Self {
        self.function("torch.exp")
    }

    /// Returns the element-wise natural logarithm. At 0 the value is -∞ and the derivative ∞.
    #[must_use]
    pub fn ln(self) -> Self {
        self.function("torch.log")
    }

    /// Returns the element-wise absolute value. The derivative at 0 is 0.
    #[must_use]
    pub fn abs(self) -> Self {
        self.function("torch.abs")
    }

    /// Returns the element-wise square root. The derivative at 0 is ∞.
    #[must_use]
    pub fn sqrt(self) -> Self {
        self.function("torch.sqrt")
    }

    /// Returns the element-wise logistic function, 1 / (1 + e⁻ˣ).
    #[must_use]
    pub fn sigmoid(self) -> Self {
        self.function("torch.sigmoid")
    }

    /// Returns the element-wise logarithm of [`sigmoid`](Self::sigmoid), without underflow.
    #[must_use]
    pub fn log_sigmoid(self) -> Self {
        self.function("torch._C._nn.log_sigmoid")
    }

    /// Returns the element-wise softplus, ln(1 + eˣ). Elements above 20 are unchanged, as in
    /// PyTorch.
    #[must_use]
    pub fn softplus(self) -> Self {
        self.function("torch._C._nn.softplus")
    }

    /// Returns the element-wise hyperbolic tangent.
    #[must_use]
    pub fn tanh(self) -> Self {
        self.function("torch.tanh")
    }

    /// Returns the element-wise maximum of 0 and this term. The derivative at 0 is 0.
    #[must_use]
    pub fn relu(self) -> Self {
        self.function("torch.relu")
    }

    /// Returns the same value as a constant: no gradient flows to this term.
    #[must_use]
    pub fn detach(self) -> Self {
        self.method("detach", self.rank())
    }

    /// Returns the sum of all elements as a scalar term.
    #[must_use]
    pub fn sum(self) -> Self {
        self.method("sum", 0)
    }

    /// Returns the mean of all elements as a scalar term. The mean of no elements is NaN.
    #[must_use]
    pub fn mean(self) -> Self {
        self.method("mean", 0)
    }

    /// Returns the sums over the last dimension. The term must not be a scalar.
    #[must_use]
    pub fn sum_last(self) -> Self {
        let arg = self.arg();
        let rank = self.rank_without_last("sum_last");
        self.trace.push(|name| GraphNode::method(name, "sum", [arg]).kwarg("dim", -1), rank)
    }

    /// Returns ln(Σ eˣ) over the last dimension, without overflow. The term must not be a scalar.
    #[must_use]
    pub fn log_sum_exp_last(self) -> Self {
        let arg = self.arg();
        let rank = self.rank_without_last("log_sum_exp_last");
        let node =
            |name: &str| GraphNode::function(name, "torch.logsumexp", [arg]).kwarg("dim", -1);
        self.trace.push(node, rank)
    }

    /// Returns the running sum of a vector: element `i` is the sum of elements 0 to `i`. The term
    /// must be of rank 1.
    #[must_use]
    pub fn cumulative_sum(self) -> Self {
        if self.rank() != 1 {
            let rank = self.rank();
            self.trace.reject(format!("cumulative_sum needs a term of rank 1, not {rank}"));
        }
        let arg = self.arg();
        let node = |name: &str| GraphNode::function(name, "torch.cumsum", [arg]).kwarg("dim", 0);
        self.trace.push(node, 1)
    }

    /// Returns the element-wise power with a constant exponent. The derivative of x⁰ is 0
    /// everywhere.
    #[must_use]
    pub fn pow(self, exponent: f64) -> Self {
        self.binary("operator.pow", exponent)
    }

    /// Returns the element-wise maximum of this term and `other`, as `torch.maximum`.
    ///
    /// At a tie the derivative is ½ for each operand. For a derivative of 1 at the bound use
    /// [`clamp`](Self::clamp), for a derivative of 0 at 0 use [`relu`](Self::relu).
    #[must_use]
    pub fn max(self, other: impl Into<Operand<'t>>) -> Self {
        let other = self.same_shape(other.into());
        self.binary("torch.maximum", other)
    }

    /// Returns the element-wise minimum of this term and `other`, as `torch.minimum`.
    ///
    /// At a tie the derivative is ½ for each operand.
    #[must_use]
    pub fn min(self, other: impl Into<Operand<'t>>) -> Self {
        let other = self.same_shape(other.into());
        self.binary("torch.minimum", other)
    }

    /// Converts a number to a constant tensor in the shape of this term, because `torch.maximum`
    /// and `torch.minimum` accept only tensors.
    fn same_shape(self, operand: Operand<'t>) -> Self {
        match operand {
            Operand::Term(term) => term,
            Operand::Number(number) => {
                let args = [self.arg(), number.into()];
                // An integer input would otherwise truncate the number.
                let dtype = GraphArg::DType("float32".to_owned());
                let node = |name: &str| {
                    GraphNode::function(name, "torch.full_like", args).kwarg("dtype", dtype)
                };
                self.trace.push(node, self.rank())
            }
        }
    }

    /// Limits each element to the range `low..=high`. An infinite bound has no effect.
    ///
    /// The derivative is 1 inside the range and on its bounds, and 0 outside. (In PyTorch 2.15 the
    /// derivative of `torch.clamp` on a bound is 0; in older versions it is 1.)
    #[must_use]
    pub fn clamp(self, low: f64, high: f64) -> Self {
        if low.is_nan() || high.is_nan() {
            self.trace.reject("a bound of clamp is NaN");
        }
        let bound = |bound: f64| bound.is_finite().then_some(bound);
        let arg = self.arg();
        let low = bound(low);
        let high = bound(high);
        if low.is_none() && high.is_none() {
            return self;
        }
        let node = |name: &str| {
            let clamp = GraphNode::function(name, "torch.clamp", [arg]);
            clamp.kwarg("min", low).kwarg("max", high)
        };
        self.trace.push(node, self.rank())
    }

    /// Returns a mask that is true where this term is greater than `other`.
    #[must_use]
    pub fn gt(self, other: impl Into<Operand<'t>>) -> Mask<'t> {
        Mask(self.binary("operator.gt", other))
    }

    /// Returns a mask that is true where this term is greater than or equal to `other`.
    #[must_use]
    pub fn ge(self, other: impl Into<Operand<'t>>) -> Mask<'t> {
        Mask(self.binary("operator.ge", other))
    }

    /// Returns a mask that is true where this term is less than `other`.
    #[must_use]
    pub fn lt(self, other: impl Into<Operand<'t>>) -> Mask<'t> {
        Mask(self.binary("operator.lt", other))
    }

    /// Returns a mask that is true where this term is less than or equal to `other`.
    #[must_use]
    pub fn le(self, other: impl Into<Operand<'t>>) -> Mask<'t> {
        Mask(self.binary("operator.le", other))
    }
}

impl<'t> Mask<'t> {
    /// Returns `yes` where the mask is true, `no` elsewhere.
    ///
    /// The gradient flows to the selected operand only. An operand that was not selected
    /// contributes 0 even if its own derivative is infinite: `x.gt(0.0).choose(x.ln(), 0.0)` has
    /// the gradient 0 at `x = 0`, where PyTorch's `torch.where` yields NaN.
    #[must_use]
    pub fn choose(self, yes: impl Into<Operand<'t>>, no: impl Into<Operand<'t>>) -> Term<'t> {
        let mask = self.0;
        let (yes, yes_rank) = mask.operand(yes);
        let (no, no_rank) = mask.operand(no);
        let args = [mask.arg(), yes, no];
        let rank = mask.rank().max(yes_rank).max(no_rank);
        mask.trace.push(|name| GraphNode::function(name, "torch.where", args), rank)
    }
}

impl BitAnd for Mask<'_> {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0.binary("operator.and_", other.0))
    }
}

impl BitOr for Mask<'_> {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0.binary("operator.or_", other.0))
    }
}

impl Not for Mask<'_> {
    type Output = Self;

    fn not(self) -> Self {
        Self(self.0.function("operator.invert"))
    }
}

impl<'t> From<Term<'t>> for Operand<'t> {
    fn from(term: Term<'t>) -> Self {
        Self::Term(term)
    }
}

impl From<f64> for Operand<'_> {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

macro_rules! operators {
    ($($operator:ident $method:ident $target:literal),* $(,)?) => {$(
        impl<'t, O: Into<Operand<'t>>> $operator<O> for Term<'t> {
            type Output = Self;

            fn $method(self, other: O) -> Self {
                self.binary($target, other)
            }
        }

        impl<'t> $operator<Term<'t>> for f64 {
            type Output = Term<'t>;

            fn $method(self, term: Term<'t>) -> Term<'t> {
                term.binary_from($target, self)
            }
        }
    )*};
}

operators! {
    Add add "operator.add",
    Sub sub "operator.sub",
    Mul mul "operator.mul",
    Div div "operator.truediv",
}

impl Neg for Term<'_> {
    type Output = Self;

    fn neg(self) -> Self {
        self.function("operator.neg")
    }
}
