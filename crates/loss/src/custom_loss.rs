//! [`CustomLoss`]: a loss that is traced once and then executed by the server or by the client.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use tinkex_autodiff::{
    GraphArg, GraphInput, GraphNode, LossGraph, LossProgram, TensorView, is_metric_name,
};
use tinkex_wire::{
    CreateCustomLoss, Datum, LossId, SessionId, TensorData, TensorValues, codec::json, loss_input,
};

use tinkex_transport::error::{Error, ErrorKind, Result};

use crate::trace::{Term, Trace};

/// Name of the first input of every loss.
pub(crate) const LOGPROBS: &str = "logprobs";
/// Maximum number of elements of a sparse input once it is expanded.
const MAX_DENSE_ELEMENTS: usize = 1 << 26;

/// Value of a loss over a batch, with its gradient.
///
/// ```
/// use tinkex::loss::LossValue;
///
/// let value = LossValue::new(1.5, vec![vec![-1.0, 0.5]]).metric("margin:mean", 0.25);
/// assert_eq!(value.loss, 1.5);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct LossValue {
    /// Loss, summed over the batch.
    pub loss: f64,
    /// For each datum, the derivative of the loss with respect to each of its log-probabilities.
    pub gradients: Vec<Vec<f32>>,
    /// Metrics to report with the loss.
    pub metrics: BTreeMap<String, f64>,
}

impl LossValue {
    /// Creates a value from the loss and, for each datum, the derivative of the loss with respect to
    /// each of its log-probabilities.
    #[must_use]
    pub fn new(loss: f64, gradients: Vec<Vec<f32>>) -> Self {
        Self { loss, gradients, metrics: BTreeMap::new() }
    }

    /// Adds a metric to report with the loss.
    #[must_use]
    pub fn metric(mut self, name: impl Into<String>, value: f64) -> Self {
        self.metrics.insert(name.into(), value);
        self
    }
}

/// Loss that is traced once and then executed by the server or by the client.
///
/// A loss is a function of one datum's log-probabilities and of any other loss inputs of that
/// datum. The loss of a batch is the sum over its data.
///
/// ```
/// use tinkex::loss::CustomLoss;
///
/// // REINFORCE, with a penalty for leaving the policy that sampled the tokens.
/// let loss = CustomLoss::trace("penalized", |trace| {
///     let logprobs = trace.input("logprobs", 1);
///     let old = trace.input("old_logprobs", 1);
///     let advantages = trace.input("advantages", 1);
///     let penalty = (logprobs - old).pow(2.0).sum();
///     trace.metric("custom/penalty:mean", penalty);
///     -(logprobs * advantages).sum() + 0.1 * penalty
/// })?;
/// assert_eq!(loss.name(), "penalized");
/// # Ok::<_, tinkex::Error>(())
/// ```
///
/// The server executes a loss that was registered with `ServiceClient::create_custom_loss`. The
/// client executes any other loss, which takes an additional forward pass.
#[derive(Clone)]
pub struct CustomLoss {
    name: Arc<str>,
    program: Arc<LossProgram>,
    /// Session and id under which the loss is registered with the server; `None` if the client
    /// executes the loss.
    registered: Option<(SessionId, LossId)>,
}

impl CustomLoss {
    /// Traces a loss.
    ///
    /// `describe` runs once. It declares the inputs first, `logprobs` before all others, combines
    /// them, and returns the loss as a scalar term.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the loss is not a scalar, if an input or a metric has an
    /// invalid name or rank, or if the description contains another mistake, such as a term of
    /// another trace.
    pub fn trace<F>(name: impl Into<String>, describe: F) -> Result<Self>
    where
        F: for<'t> FnOnce(&'t Trace) -> Term<'t>,
    {
        let name = name.into();
        let invalid = |reason: String| {
            Error::new(ErrorKind::InvalidInput, format!("cannot trace loss {name:?}: {reason}"))
        };
        let trace = Trace::default();
        let loss = describe(&trace).node();
        let mut traced = trace.into_traced();
        if let Some(reason) = traced.error {
            return Err(invalid(reason));
        }
        if traced.ranks[loss] != 0 {
            let reason = "the loss is not a scalar; return its sum or mean";
            return Err(invalid(reason.to_owned()));
        }
        for (i, (metric, _)) in traced.metrics.iter().enumerate() {
            if !is_metric_name(metric) {
                let form = "`custom/`, 1 to 64 of a-z 0-9 _ . / -, then `:sum` or `:mean`";
                return Err(invalid(format!("metric name {metric:?} is not of the form {form}")));
            }
            if traced.metrics[..i].iter().any(|(other, _)| other == metric) {
                return Err(invalid(format!("metric {metric:?} is reported twice")));
            }
        }
        let reference = |node: usize| GraphArg::node(&traced.nodes[node].name);
        let metrics = traced.metrics.iter().map(|(name, node)| (name.as_str(), reference(*node)));
        let output = GraphNode::output(reference(loss), metrics);
        traced.nodes.push(output);
        Self::from_graph(name, traced.inputs, LossGraph::new(traced.nodes))
    }

    /// Creates a loss from a graph, for example one that was traced in Python.
    ///
    /// The graph may use any operation that `tinkex-autodiff` supports; [`Term`] has methods for
    /// only some of these operations.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the graph or the inputs are invalid.
    pub fn from_graph(
        name: impl Into<String>,
        inputs: Vec<GraphInput>,
        graph: LossGraph,
    ) -> Result<Self> {
        let name = name.into();
        let program = LossProgram::new(inputs, graph).map_err(|error| {
            Error::new(ErrorKind::InvalidInput, format!("loss {name:?} is invalid: {error}"))
        })?;
        Ok(Self { name: name.into(), program: Arc::new(program), registered: None })
    }

    /// Returns the name of the loss.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the names and ranks of the loss inputs, `logprobs` first.
    pub fn inputs(&self) -> impl Iterator<Item = (&str, u8)> + ExactSizeIterator {
        self.program.inputs().iter().map(|input| (input.name.as_str(), input.rank))
    }

    /// Returns the traced graph, as it is sent to the server.
    #[must_use]
    pub fn graph(&self) -> &LossGraph {
        self.program.graph()
    }

    /// Returns whether the server executes the loss.
    #[must_use]
    pub fn is_on_server(&self) -> bool {
        self.registered.is_some()
    }

    /// Computes the loss of a batch in this process. `logprobs` holds the log-probabilities of the
    /// target tokens of each datum.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the two slices differ in length, an input is missing or has
    /// another rank than declared, shapes are incompatible, or the loss or its gradient is not
    /// finite.
    pub fn evaluate(&self, data: &[Datum], logprobs: &[TensorData]) -> Result<LossValue> {
        let invalid = |reason: String| Err(Error::new(ErrorKind::InvalidInput, reason));
        if data.len() != logprobs.len() {
            return invalid(format!(
                "cannot evaluate loss {:?}: got {} data, but log-probabilities of {} data",
                self.name(),
                data.len(),
                logprobs.len()
            ));
        }
        let mut total = LossValue::default();
        for (i, (datum, logprobs)) in data.iter().zip(logprobs).enumerate() {
            let value = match self.evaluate_datum(datum, logprobs) {
                Ok(value) => value,
                Err(reason) => {
                    let name = self.name();
                    return invalid(format!(
                        "cannot evaluate loss {name:?} of datum {i}: {reason}"
                    ));
                }
            };
            total.loss += value.loss;
            total.gradients.push(value.gradient);
            for (name, metric) in value.metrics {
                *total.metrics.entry(name).or_default() += metric;
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "no batch has 2^53 data")]
        let count = data.len().max(1) as f64;
        for (name, value) in &mut total.metrics {
            if name.ends_with(":mean") {
                *value /= count;
            }
        }
        Ok(total)
    }

    fn evaluate_datum(
        &self,
        datum: &Datum,
        logprobs: &TensorData,
    ) -> std::result::Result<tinkex_autodiff::LossEvaluation, String> {
        let mut tensors = Vec::with_capacity(self.program.inputs().len());
        for (name, rank) in self.inputs() {
            let tensor = if name == LOGPROBS { Some(logprobs) } else { datum.loss_input(name) };
            let tensor = tensor.ok_or_else(|| format!("loss input {name:?} is missing"))?;
            if !has_rank(tensor, rank) {
                return Err(format!("loss input {name:?} is not of rank {rank}"));
            }
            let dense = tensor.to_dense(MAX_DENSE_ELEMENTS).map_err(|error| error.to_string())?;
            let shape = match rank {
                0 => Vec::new(),
                // The shape of a vector may be absent.
                1 => vec![dense.values().len()],
                _ => dense.shape().dims().to_vec(),
            };
            tensors.push((dense, shape));
        }
        let views: Vec<TensorView<'_>> = tensors
            .iter()
            .map(|(tensor, shape)| match tensor.values() {
                TensorValues::Float32(values) => TensorView::f32(shape, values),
                TensorValues::Int64(values) => TensorView::i64(shape, values),
            })
            .collect();
        self.program.evaluate(&views).map_err(|error| error.to_string())
    }

    /// Checks that every datum has the inputs of the loss, with the declared ranks. Checks the
    /// target tokens in place of `logprobs`, which has the same rank and is computed later.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if a datum lacks an input, or the input has another rank.
    #[doc(hidden)]
    pub fn check(&self, data: &[Datum]) -> Result<()> {
        for (i, datum) in data.iter().enumerate() {
            for (name, rank) in self.inputs() {
                let tensor = if name == LOGPROBS { loss_input::TARGET_TOKENS } else { name };
                if !datum.loss_input(tensor).is_some_and(|tensor| has_rank(tensor, rank)) {
                    let loss = self.name();
                    let reason =
                        format!("loss {loss:?} needs {tensor:?} of rank {rank} in datum {i}");
                    return Err(Error::new(ErrorKind::InvalidInput, reason));
                }
            }
        }
        Ok(())
    }

    /// Returns the request that registers the loss with the server.
    #[doc(hidden)]
    #[must_use]
    pub fn registration(&self, session_id: SessionId, seq_id: u32) -> CreateCustomLoss {
        CreateCustomLoss {
            session_id,
            custom_loss_seq_id: seq_id,
            name: self.name.to_string(),
            inputs: self.program.inputs().to_vec(),
            graph: self.program.graph().clone(),
        }
    }

    /// Returns a copy of a loss that is registered with the server in `session_id` as `loss_id`, so
    /// that the server executes it.
    #[doc(hidden)]
    #[must_use]
    pub fn on_server(&self, session_id: SessionId, loss_id: LossId) -> Self {
        Self { registered: Some((session_id, loss_id)), ..self.clone() }
    }

    /// Returns the id of the loss on the server, or `None` if the client executes the loss.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the loss was registered in another session.
    #[doc(hidden)]
    pub fn id_in(&self, session: &SessionId) -> Result<Option<&LossId>> {
        match &self.registered {
            Some((owner, id)) if owner == session => Ok(Some(id)),
            Some((owner, _)) => {
                let name = self.name();
                let reason = format!(
                    "cannot use loss {name:?} in session {session}: registered in session {owner}"
                );
                let hint = "Call create_custom_loss in this session too.";
                Err(Error::new(ErrorKind::InvalidInput, reason).with_hint(hint))
            }
            None => Ok(None),
        }
    }

    /// Returns a SHA-256 hash of the graph and the inputs. The hash does not depend on the name of
    /// the loss.
    #[doc(hidden)]
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        let text = json::encode(&(self.program.graph(), self.program.inputs())).unwrap_or_default();
        Sha256::digest(&text).into()
    }
}

impl fmt::Debug for CustomLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomLoss")
            .field("name", &self.name())
            .field("inputs", &self.program.inputs())
            .field("registered", &self.registered)
            .finish_non_exhaustive()
    }
}

/// Compares the graph, the inputs and the registration. Names are not compared.
impl PartialEq for CustomLoss {
    fn eq(&self, other: &Self) -> bool {
        self.registered == other.registered && self.program == other.program
    }
}

/// Returns whether a tensor has the rank `rank`. A tensor without a shape can be a scalar, because
/// protobuf encodes a scalar without a shape.
fn has_rank(tensor: &TensorData, rank: u8) -> bool {
    tensor.rank() == usize::from(rank) || (rank == 0 && tensor.may_be_scalar())
}
