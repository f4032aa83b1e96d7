//! Losses of the caller's own.
//!
//! There are two ways. A *traced* loss ([`CustomLoss`]) is described once, term by term; it runs on
//! the server where the server offers that, and here otherwise, and its gradient is worked out for
//! you. A *computed* loss ([`LossValue`]) is any Rust function of the log-probabilities that brings
//! its own gradient; see
//! [`TrainingClient::forward_backward_custom`](crate::TrainingClient::forward_backward_custom).

mod array;
pub mod regularize;
mod run;
mod step;
mod trace;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use tinkex_wire::{
    ApiRequest as _, Arg, CreateCustomLoss, CustomLossInput, Datum, Graph, LossId, Node, SessionId,
    TensorData, TensorValues, codec::json, is_metric_name, loss_input,
};

use crate::error::{Error, ErrorKind, Result};

use array::{Array, Size};
use step::Step;
pub use trace::{Factor, Term, Trace};

/// The name of the first input of every loss.
pub(crate) const LOGPROBS: &str = "logprobs";
/// A sparse input is written out up to this size.
const MOST_CELLS: usize = 1 << 26;

/// What a loss came to over a batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossValue {
    /// The loss.
    pub loss: f64,
    /// For each datum, how the loss changes with each of its log-probabilities.
    pub gradients: Vec<Vec<f32>>,
    /// Numbers to report with it.
    pub metrics: BTreeMap<String, f64>,
}

/// A loss described term by term: a function of each datum's log-probabilities and of any other
/// loss inputs, summed over the batch.
///
/// ```
/// use tinkex::loss::CustomLoss;
///
/// // REINFORCE with a penalty for leaving the policy that sampled.
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
/// [`ServiceClient::create_custom_loss`](crate::ServiceClient::create_custom_loss) hands it to the
/// server; without that it is computed here, which takes another pass.
#[derive(Clone)]
pub struct CustomLoss {
    traced: Arc<Traced>,
    on_server: Option<(SessionId, LossId)>,
}

struct Traced {
    name: String,
    inputs: Vec<(String, u8)>,
    steps: Vec<Step>,
    loss: usize,
    metrics: Vec<(String, usize)>,
}

impl CustomLoss {
    /// Traces a loss. The closure names its inputs first, `logprobs` before all others, and returns
    /// a single number.
    ///
    /// # Errors
    /// If an input or metric has a name or rank that is not allowed, or the loss is not a single
    /// number.
    pub fn trace<F>(name: impl Into<String>, describe: F) -> Result<Self>
    where
        F: for<'t> FnOnce(&'t Trace) -> Term<'t>,
    {
        let trace = Trace::default();
        let loss = describe(&trace).at();
        let state = trace.into_state();
        let name = name.into();
        let wrong =
            |why: String| Error::new(ErrorKind::InvalidInput, format!("loss {name:?}: {why}"));
        if let Some(fault) = state.fault {
            return Err(wrong(fault));
        }
        if state.ranks[loss] != 0 {
            return Err(wrong("it is not a single number; take its sum or mean".to_owned()));
        }
        for (i, (metric, _)) in state.metrics.iter().enumerate() {
            if !is_metric_name(metric) {
                let form = "`custom/`, 1 to 64 of a-z 0-9 _ . / -, then `:sum` or `:mean`";
                return Err(wrong(format!("metric {metric:?} is not {form}")));
            }
            if state.metrics[..i].iter().any(|(other, _)| other == metric) {
                return Err(wrong(format!("metric {metric:?} is reported twice")));
            }
        }
        let (inputs, steps, metrics) = (state.inputs, state.steps, state.metrics);
        let traced = Arc::new(Traced { name, inputs, steps, loss, metrics });
        let custom = Self { traced, on_server: None };
        // The rules about inputs are the server's, and known to the request.
        custom.upload(SessionId::from(""), 0).validate()?;
        Ok(custom)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.traced.name
    }

    /// What it reads of each datum, and how many dimensions that has.
    pub fn inputs(&self) -> impl ExactSizeIterator<Item = (&str, u8)> {
        self.traced.inputs.iter().map(|(name, rank)| (name.as_str(), *rank))
    }

    /// Whether the server computes it.
    #[must_use]
    pub fn is_on_server(&self) -> bool {
        self.on_server.is_some()
    }

    /// Computes the loss over a batch here, given the log-probabilities of each datum.
    ///
    /// # Errors
    /// If an input is missing, has another rank, or does not fit the others.
    pub fn evaluate(&self, data: &[Datum], logprobs: &[TensorData]) -> Result<LossValue> {
        let mut total = LossValue::default();
        for (i, (datum, logprobs)) in data.iter().zip(logprobs).enumerate() {
            let in_datum = |why: String| {
                let why = format!("loss {:?} of datum {i}: {why}", self.name());
                Error::new(ErrorKind::InvalidInput, why)
            };
            let inputs = self.read(datum, logprobs).map_err(in_datum)?;
            let traced = &*self.traced;
            let values = run::forward(&traced.steps, inputs).map_err(in_datum)?;
            let loss = values[traced.loss].values[0];
            if !loss.is_finite() {
                return Err(in_datum(format!("it is {loss}")));
            }
            total.loss += loss;
            let gradient = run::gradient(&traced.steps, &values, traced.loss, 0);
            #[expect(clippy::cast_possible_truncation, reason = "the wire carries 32 bits")]
            total.gradients.push(gradient.values.iter().map(|value| *value as f32).collect());
            for (name, at) in &traced.metrics {
                *total.metrics.entry(name.clone()).or_default() += values[*at].values[0];
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "no batch has 2^53 datums")]
        let datums = data.len().max(1) as f64;
        for (name, value) in &mut total.metrics {
            if name.ends_with(":mean") {
                *value /= datums;
            }
        }
        Ok(total)
    }

    /// Checks that every datum has what the loss reads.
    pub(crate) fn check(&self, data: &[Datum]) -> Result<()> {
        for (i, datum) in data.iter().enumerate() {
            for (name, rank) in self.inputs() {
                let tensor = if name == LOGPROBS { loss_input::TARGET_TOKENS } else { name };
                let fits = datum.loss_input(tensor).is_some_and(|tensor| has_rank(tensor, rank));
                if !fits {
                    let why = format!(
                        "loss {:?} needs {tensor:?} of rank {rank} in datum {i}",
                        self.name()
                    );
                    return Err(Error::new(ErrorKind::InvalidInput, why));
                }
            }
        }
        Ok(())
    }

    fn read(
        &self,
        datum: &Datum,
        logprobs: &TensorData,
    ) -> std::result::Result<Vec<Array>, String> {
        self.inputs()
            .map(|(name, rank)| {
                let tensor = if name == LOGPROBS { Some(logprobs) } else { datum.loss_input(name) };
                let tensor = tensor.ok_or_else(|| format!("it has no input {name:?}"))?;
                array(tensor, rank).ok_or_else(|| format!("{name:?} is not of rank {rank}"))
            })
            .collect()
    }

    /// The request that hands it to the server.
    pub(crate) fn upload(&self, session_id: SessionId, n: u32) -> CreateCustomLoss {
        let traced = &*self.traced;
        let inputs =
            self.inputs().map(|(name, rank)| CustomLossInput { name: name.to_owned(), rank });
        CreateCustomLoss {
            session_id,
            custom_loss_seq_id: n,
            name: traced.name.clone(),
            inputs: inputs.collect(),
            graph: traced.graph(),
        }
    }

    /// The same loss, computed by the server of that session.
    pub(crate) fn on_server(&self, session_id: SessionId, loss_id: LossId) -> Self {
        Self { traced: Arc::clone(&self.traced), on_server: Some((session_id, loss_id)) }
    }

    /// Its id, if the server of that session computes it.
    ///
    /// # Errors
    /// If it belongs to another session.
    pub(crate) fn id_in(&self, session: &SessionId) -> Result<Option<&LossId>> {
        match &self.on_server {
            Some((owner, id)) if owner == session => Ok(Some(id)),
            Some((owner, _)) => {
                let why = format!("loss {:?} belongs to session {owner}", self.name());
                let hint = "call create_custom_loss in this session too";
                Err(Error::new(ErrorKind::InvalidInput, why).with_hint(hint))
            }
            None => Ok(None),
        }
    }

    /// Tells losses apart by what they compute.
    pub(crate) fn fingerprint(&self) -> [u8; 32] {
        let upload = self.upload(SessionId::from(""), 0);
        let text = json::encode(&(upload.graph, upload.inputs)).unwrap_or_default();
        Sha256::digest(&text).into()
    }
}

impl Traced {
    fn graph(&self) -> Graph {
        let steps = self.steps.iter().enumerate();
        let mut nodes: Vec<Node> = steps.map(|(at, step)| step.node(at, &self.inputs)).collect();
        let node = |at: usize| Arg::node(&step::node_name(at, &self.inputs));
        let metrics = self.metrics.iter().map(|(name, at)| (name.as_str(), node(*at)));
        nodes.push(Node::output(Arg::tuple([node(self.loss), Arg::dict(metrics)])));
        Graph::new(nodes)
    }
}

impl fmt::Debug for CustomLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomLoss")
            .field("name", &self.name())
            .field("inputs", &self.traced.inputs)
            .field("on_server", &self.on_server)
            .finish_non_exhaustive()
    }
}

/// Two are the same if they compute the same in the same place.
impl PartialEq for CustomLoss {
    fn eq(&self, other: &Self) -> bool {
        let (one, two) = (&*self.traced, &*other.traced);
        self.on_server == other.on_server
            && one.steps == two.steps
            && (one.loss, &one.inputs, &one.metrics) == (two.loss, &two.inputs, &two.metrics)
    }
}

fn has_rank(tensor: &TensorData, rank: u8) -> bool {
    tensor.rank() == usize::from(rank) || (rank == 0 && tensor.may_be_scalar())
}

fn array(tensor: &TensorData, rank: u8) -> Option<Array> {
    if !has_rank(tensor, rank) {
        return None;
    }
    let tensor = tensor.to_dense(MOST_CELLS).ok()?;
    let values = match tensor.values() {
        TensorValues::Float32(values) => values.iter().map(|value| f64::from(*value)).collect(),
        #[expect(clippy::cast_precision_loss, reason = "token ids are small")]
        TensorValues::Int64(values) => values.iter().map(|value| *value as f64).collect::<Vec<_>>(),
    };
    let size = match rank {
        2 => Size { rows: tensor.rows(), cols: values.len().checked_div(tensor.rows())? },
        _ => Size { rows: 1, cols: values.len() },
    };
    Some(Array { size, values })
}
