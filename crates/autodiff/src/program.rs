//! Validated loss graphs, and their evaluation for one datum.

use crate::array::{Array, ElementKind, element_count};
use crate::error::{Error, Result};
use crate::graph::{GraphInput, LossGraph};
use crate::interpret;
use crate::tape::Tape;
use crate::validate::validate;

/// Validated loss that can be evaluated.
///
/// See the [crate documentation](crate) for an example.
#[derive(Clone, Debug, PartialEq)]
pub struct LossProgram {
    inputs: Vec<GraphInput>,
    graph: LossGraph,
    /// Name of the node whose value is the loss.
    loss: String,
    /// Pairs of metric name and node name.
    metrics: Vec<(String, String)>,
    /// Maximum memory of one evaluation in bytes.
    memory_limit: usize,
}

/// Maximum memory of one evaluation in bytes, unless the program has another limit.
const DEFAULT_MEMORY_LIMIT: usize = 1 << 30;

/// Tensor passed to [`LossProgram::evaluate`].
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Lengths of the dimensions, outermost first; empty for a scalar.
    pub shape: &'a [usize],
    /// Elements in row-major order.
    pub values: ViewValues<'a>,
}

/// Elements of a [`TensorView`].
#[derive(Clone, Copy, Debug)]
pub enum ViewValues<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// 64-bit integers, promoted to floats only by an operation with floats.
    I64(&'a [i64]),
}

/// Loss of one datum, with its gradient and metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct LossEvaluation {
    /// Value of the loss; finite.
    pub loss: f64,
    /// Derivative of the loss with respect to each log-probability, in row-major order; finite.
    pub gradient: Vec<f32>,
    /// Names and values of the metrics, ordered by name. A value may be NaN or infinite.
    pub metrics: Vec<(String, f64)>,
}

impl LossProgram {
    /// Validates a graph that reads `inputs`.
    ///
    /// Shapes are not known yet: a graph that passes may still fail in
    /// [`evaluate`](Self::evaluate) because of them.
    ///
    /// # Errors
    /// [`Error::Graph`] with the name of the node and the reason.
    pub fn new(inputs: Vec<GraphInput>, graph: LossGraph) -> Result<Self> {
        let output = validate(&inputs, &graph)?;
        let loss = output.loss;
        let metrics = output.metrics;
        Ok(Self { inputs, graph, loss, metrics, memory_limit: DEFAULT_MEMORY_LIMIT })
    }

    /// Sets the maximum memory of one evaluation in bytes (default 1 GiB): values, slopes, index
    /// tensors and gradients. An evaluation that needs more fails before it allocates.
    #[must_use]
    pub fn memory_limit(mut self, bytes: usize) -> Self {
        self.memory_limit = bytes;
        self
    }

    /// Returns the declared inputs, `logprobs` first.
    #[must_use]
    pub fn inputs(&self) -> &[GraphInput] {
        &self.inputs
    }

    /// Returns the graph.
    #[must_use]
    pub fn graph(&self) -> &LossGraph {
        &self.graph
    }

    /// Checks that `inputs`, one for each of [`inputs`](Self::inputs), have the declared ranks and
    /// finite values. Log-probabilities, the first input, may be infinite.
    ///
    /// # Errors
    /// [`Error::InputCount`], [`Error::InputRank`], [`Error::InputLength`] or
    /// [`Error::NonFiniteInput`].
    pub fn check_inputs(&self, inputs: &[TensorView<'_>]) -> Result<()> {
        if inputs.len() != self.inputs.len() {
            return Err(Error::InputCount { expected: self.inputs.len(), got: inputs.len() });
        }
        for (i, (tensor, GraphInput { name, rank })) in inputs.iter().zip(&self.inputs).enumerate()
        {
            if tensor.shape.len() != usize::from(*rank) && !(*rank == 0 && tensor.len() == 1) {
                let name = name.clone();
                let shape = tensor.shape.to_vec();
                return Err(Error::InputRank { name, rank: *rank, shape });
            }
            let elements = element_count(tensor.shape);
            if elements != Some(tensor.len()) {
                let expected = elements.unwrap_or(usize::MAX);
                return Err(Error::InputLength { name: name.clone(), expected, got: tensor.len() });
            }
            // The model may assign probability 0 to a token: a log-probability of -∞ is valid.
            if i > 0
                && let ViewValues::F32(values) = tensor.values
                && let Some(index) = values.iter().position(|value| !value.is_finite())
            {
                let value = values[index];
                return Err(Error::NonFiniteInput { name: name.clone(), index, value });
            }
        }
        Ok(())
    }

    /// Computes the loss of one datum, its gradient and its metrics.
    ///
    /// `inputs` are in the order of [`inputs`](Self::inputs): the log-probabilities of the target
    /// tokens first.
    ///
    /// # Errors
    /// The errors of [`check_inputs`](Self::check_inputs); [`Error::Graph`] if shapes do not fit or
    /// the evaluation would hold more than its [memory limit](Self::memory_limit);
    /// [`Error::NonFiniteResult`] if the loss or
    /// its gradient is not finite.
    pub fn evaluate(&self, inputs: &[TensorView<'_>]) -> Result<LossEvaluation> {
        self.check_inputs(inputs)?;
        let mut tape = Tape::new(self.memory_limit);
        let values = interpret::run(&self.graph.nodes, &self.inputs, &mut tape, inputs)?;
        let loss = values.scalar(&tape, &self.loss)?;
        let mut metrics = Vec::with_capacity(self.metrics.len());
        for (name, node) in &self.metrics {
            metrics.push((name.clone(), values.scalar(&tape, node)?));
        }
        if !loss.is_finite() {
            return Err(Error::NonFiniteResult { what: "value", index: 0, value: loss });
        }
        let gradient = values.gradient(&tape, &self.loss, &self.inputs[0].name);
        if let Some(index) = gradient.iter().position(|slope| !slope.is_finite()) {
            let value = f64::from(gradient[index]);
            return Err(Error::NonFiniteResult { what: "gradient", index, value });
        }
        Ok(LossEvaluation { loss, gradient, metrics })
    }
}

impl<'a> TensorView<'a> {
    /// Creates a view of 32-bit floats in row-major order.
    #[must_use]
    pub fn f32(shape: &'a [usize], values: &'a [f32]) -> Self {
        Self { shape, values: ViewValues::F32(values) }
    }

    /// Creates a view of 64-bit integers in row-major order.
    #[must_use]
    pub fn i64(shape: &'a [usize], values: &'a [i64]) -> Self {
        Self { shape, values: ViewValues::I64(values) }
    }

    fn len(&self) -> usize {
        match self.values {
            ViewValues::F32(values) => values.len(),
            ViewValues::I64(values) => values.len(),
        }
    }

    /// Converts the elements to `f64`. A tensor of one element becomes a scalar if `rank` is 0.
    pub(crate) fn to_array(self, rank: u8) -> Array {
        let (data, kind) = match self.values {
            ViewValues::F32(values) => {
                (values.iter().map(|&value| f64::from(value)).collect(), ElementKind::Float)
            }
            ViewValues::I64(values) => {
                (values.iter().map(|&value| value as f64).collect(), ElementKind::Int)
            }
        };
        let shape = if rank == 0 { Vec::new() } else { self.shape.to_vec() };
        Array { shape, data, kind }
    }
}
