//! Losses that the caller wrote, traced into a graph of tensor operations.
//!
//! [`Graph::new`] checks a graph once: its structure, and that every operation is one of ours.
//! [`Graph::evaluate`] runs it for one datum and follows it back from the loss to the
//! log-probabilities. Shapes are known only then, so faults of shape are found only then.
//!
//! Values are held in f64 whatever their declared float type. Slopes at kinks are torch's, with one
//! difference: a slope of zero wins over an infinite one, so that `where(mask, log(x), 0)` has no
//! slope outside the mask instead of a NaN.

mod about;
mod array;
mod call;
mod check;
mod elementwise;
mod index;
mod names;
mod node;
mod reduce;
mod run;
mod shape;
mod tape;

pub use node::{Arg, Node, Op};

use self::array::{Array, Kind};
use self::tape::Tape;
use crate::{Error, Result};

/// A checked graph.
///
/// ```
/// use tinkex_engine::loss::graph::{Arg, Graph, GraphInput, Node, Tensor, Values};
///
/// let graph = Graph::new(
///     vec![GraphInput { name: "logprobs".to_owned(), rank: 1 }],
///     vec![
///         Node::placeholder("logprobs"),
///         Node::function("exp", "torch.exp", vec![Arg::node("logprobs")]),
///         Node::method("sum_1", "sum", vec![Arg::node("exp")]),
///         Node::output(Arg::Tuple(vec![Arg::node("sum_1"), Arg::Dict(vec![])])),
///     ],
/// )?;
/// let logprobs = Tensor { shape: &[2], values: Values::F32(&[0.0, f32::NEG_INFINITY]) };
/// let out = graph.evaluate(&[logprobs])?;
/// assert_eq!((out.loss, &out.slope[..]), (1.0, &[1.0, 0.0][..]));
/// # Ok::<_, tinkex_engine::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Graph {
    inputs: Vec<GraphInput>,
    nodes: Vec<Node>,
    metrics: Vec<(String, String)>,
    loss: String,
}

/// Something that a graph reads for each datum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphInput {
    /// Its name; the first is `logprobs`.
    pub name: String,
    /// How many dimensions it has: 0, 1 or 2.
    pub rank: usize,
}

/// A tensor given to a graph.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Its sides, outermost first; empty for a single number.
    pub shape: &'a [usize],
    /// Its numbers.
    pub values: Values<'a>,
}

/// Numbers given to a graph.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// Floats.
    F32(&'a [f32]),
    /// Integers, which stay so until they meet floats.
    I64(&'a [i64]),
}

/// What a graph says about one datum.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphEvaluated {
    /// The loss.
    pub loss: f64,
    /// Its slope by each log-probability.
    pub slope: Vec<f32>,
    /// The metrics, in the order of the graph.
    pub metrics: Vec<(String, f64)>,
}

impl Graph {
    /// Checks a graph that reads `inputs` and runs `nodes` in their order.
    ///
    /// # Errors
    /// [`Error::Graph`], naming the node and what is wrong with it.
    pub fn new(inputs: Vec<GraphInput>, nodes: Vec<Node>) -> Result<Self> {
        let output = check::check(&inputs, &nodes)?;
        Ok(Self { inputs, nodes, loss: output.loss, metrics: output.metrics })
    }

    /// What it reads, `logprobs` first.
    #[must_use]
    pub fn inputs(&self) -> &[GraphInput] {
        &self.inputs
    }

    /// Whether these inputs, one for each of [`inputs`](Self::inputs), have the right ranks and
    /// numbers.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Shape`] or [`Error::NonFiniteInput`].
    pub fn check_inputs(&self, inputs: &[Tensor<'_>]) -> Result<()> {
        if inputs.len() != self.inputs.len() {
            let field = "inputs of the custom loss".to_owned();
            return Err(Error::Length { field, expected: self.inputs.len(), got: inputs.len() });
        }
        for (i, (tensor, input)) in inputs.iter().zip(&self.inputs).enumerate() {
            if tensor.shape.len() != input.rank && !(input.rank == 0 && tensor.count() == 1) {
                return Err(Error::Shape {
                    what: format!("{}, declared with rank {},", input.name, input.rank),
                    expected: vec![1; input.rank],
                    got: tensor.shape.to_vec(),
                });
            }
            let sides = tensor.shape.iter().try_fold(1_usize, |n, &side| n.checked_mul(side));
            if sides != Some(tensor.count()) {
                let field = input.name.clone();
                let expected = sides.unwrap_or(usize::MAX);
                return Err(Error::Length { field, expected, got: tensor.count() });
            }
            // The model's own numbers come first; a caller's must be numbers.
            if let Values::F32(values) = tensor.values
                && let Some(index) = values.iter().position(|value| !value.is_finite())
                && i > 0
            {
                let (field, value) = (input.name.clone(), values[index]);
                return Err(Error::NonFiniteInput { field, index, value });
            }
        }
        Ok(())
    }

    /// Runs the graph for one datum; `inputs` are in the order of [`inputs`](Self::inputs), the
    /// log-probabilities of the targets first.
    ///
    /// # Errors
    /// As [`check_inputs`](Self::check_inputs); [`Error::Graph`] if shapes do not fit;
    /// [`Error::NonFiniteResult`] if the loss or a slope is not a number.
    pub fn evaluate(&self, inputs: &[Tensor<'_>]) -> Result<GraphEvaluated> {
        self.check_inputs(inputs)?;
        let mut tape = Tape::default();
        let values = run::run(self, &mut tape, inputs)?;
        let scalar = |name: &str| values.scalar(&tape, name);
        let loss = scalar(&self.loss)?;
        let mut metrics = Vec::with_capacity(self.metrics.len());
        for (key, node) in &self.metrics {
            metrics.push((key.clone(), scalar(node)?));
        }
        if !loss.is_finite() {
            return Err(non_finite("the custom loss", 0, loss));
        }
        let slope = values.slope(&tape, &self.loss, &self.inputs[0].name);
        if let Some(index) = slope.iter().position(|slope| !slope.is_finite()) {
            return Err(non_finite("the custom loss's gradient", index, f64::from(slope[index])));
        }
        Ok(GraphEvaluated { loss, slope, metrics })
    }
}

fn non_finite(what: &str, index: usize, value: f64) -> Error {
    let hint = "keep logarithms and exponentials inside clamp";
    Error::NonFiniteResult { what: what.to_owned(), index, value, hint }
}

impl Tensor<'_> {
    fn count(&self) -> usize {
        match self.values {
            Values::F32(values) => values.len(),
            Values::I64(values) => values.len(),
        }
    }

    fn to_array(self, rank: usize) -> Array {
        let (data, kind) = match self.values {
            Values::F32(values) => (values.iter().map(|&v| f64::from(v)).collect(), Kind::Float),
            Values::I64(values) => (values.iter().map(|&v| v as f64).collect(), Kind::Int),
        };
        let shape = if rank == 0 { Vec::new() } else { self.shape.to_vec() };
        Array { shape, data, kind }
    }
}
