//! Custom losses that the client computes.
//!
//! A forward pass returns the log-probabilities, the client computes the loss and its gradient, and
//! a second pass trains with the server's cross entropy. Cross entropy is the sum of
//! −logprob · weight; with −gradient as weights it has the gradient of the custom loss.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use tinkex_wire::loss_input::{TARGET_TOKENS, WEIGHTS};
use tinkex_wire::{Datum, LossConfig, LossFn, PassMode, Provenance, TensorData};

use crate::error::{Error, ErrorKind, Result};
use crate::future::ApiFuture;
use crate::loss::{CustomLoss, LOGPROBS, LossValue};

use super::forward_backward::BatchRequests;
use super::merge::{BatchOutput, MetricValue};
use super::pass::PreparedPass;
use super::{TrainingClient, TrainingShared};

/// Name of the metric with the custom loss.
const LOSS: &str = "loss:sum";
/// Name of the metric with the weighted cross entropy, which has the same gradient as the custom
/// loss.
const SURROGATE: &str = "surrogate_loss:sum";

/// Error returned by a caller's loss function.
pub(super) type LossError = Box<dyn StdError + Send + Sync>;

/// Loss that a function of the caller computes. The function can be called for several batches.
#[derive(Clone)]
pub(super) struct ComputedLoss(pub(super) Arc<SharedLossFunction>);

/// Loss function that can be called for several batches.
type SharedLossFunction =
    dyn Fn(&[Datum], &[TensorData]) -> std::result::Result<LossValue, LossError> + Send + Sync;

/// Compares the identity of the functions.
impl PartialEq for ComputedLoss {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for ComputedLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ComputedLoss")
    }
}

impl TrainingClient {
    /// Accumulates the gradient of a loss that a Rust function computes from the log-probabilities
    /// of each datum's target tokens.
    ///
    /// The data is sent twice: for a forward pass, whose log-probabilities the function receives,
    /// and for the pass that accumulates the gradient. Later calls for the same model are sent
    /// after both. The function runs on tokio's blocking thread pool, so it may take long; it must
    /// not wait for another call of the same model, which would deadlock.
    ///
    /// ```no_run
    /// # async fn run(model: tinkex::TrainingClient, data: Vec<tinkex::Datum>) -> tinkex::Result<()> {
    /// use tinkex::loss::LossValue;
    ///
    /// let pass = model.forward_backward_custom(data, |_, logprobs| {
    ///     let mut value = LossValue::default();
    ///     for logprobs in logprobs.iter().filter_map(|tensor| tensor.as_f32()) {
    ///         value.loss -= logprobs.iter().map(|x| f64::from(*x)).sum::<f64>();
    ///         value.gradients.push(vec![-1.0; logprobs.len()]);
    ///     }
    ///     Ok(value)
    /// });
    /// println!("{:?}", pass.await?.metrics["loss:sum"]);
    /// # Ok(()) }
    /// ```
    ///
    /// For a traced loss ([`CustomLoss`]) the gradient is derived automatically; pass such a loss
    /// to [`TrainingClient::forward_backward`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if a datum has no `target_tokens`, or if the function fails,
    /// panics, or returns a value that is not finite or gradients of other lengths than the
    /// log-probabilities. No gradient is accumulated then.
    pub fn forward_backward_custom<F>(&self, data: Vec<Datum>, loss: F) -> ApiFuture<BatchOutput>
    where
        F: FnOnce(&[Datum], &[TensorData]) -> std::result::Result<LossValue, LossError>
            + Send
            + 'static,
    {
        let pass = self.0.prepare_local(PassMode::ForwardBackward, data, LocalLoss::new(loss));
        match pass {
            Ok(pass) => self.enqueue_pass(pass),
            Err(error) => ApiFuture::failed(error.during("forward_backward_custom")),
        }
    }
}

/// Loss that the client computes.
pub(crate) struct LocalLoss(Box<LossFunction>);

/// Loss function that is called for one batch.
type LossFunction =
    dyn FnOnce(&[Datum], &[TensorData]) -> std::result::Result<LossValue, LossError> + Send;

/// Loss that the client computed, with its metrics.
#[derive(Debug)]
pub(crate) struct LossResult {
    loss: f64,
    metrics: BTreeMap<String, f64>,
}

impl LocalLoss {
    pub(crate) fn new<F>(loss: F) -> Self
    where
        F: FnOnce(&[Datum], &[TensorData]) -> std::result::Result<LossValue, LossError>
            + Send
            + 'static,
    {
        Self(Box::new(loss))
    }

    /// Computes the loss from the output of a forward pass. Returns the loss, and the data of the
    /// second pass, which accumulates the gradient of the loss.
    ///
    /// The loss function runs on the blocking thread pool: it may take long or panic, and must not
    /// delay the tasks that do I/O.
    pub(crate) async fn compute(
        self,
        output: &BatchOutput,
        data: Vec<Datum>,
    ) -> Result<(LossResult, Vec<Datum>)> {
        let logprobs = logprobs(output, data.len())?;
        let work = tokio::task::spawn_blocking(move || {
            let value = (self.0)(&data, &logprobs).map_err(|error| {
                let message = format!("loss function failed: {error}");
                Error::new(ErrorKind::InvalidInput, message).with_boxed_source(error)
            })?;
            validate_loss(&value, &logprobs)?;
            let data = with_weights(&data, Some((&value, &logprobs)))?;
            Ok((LossResult { loss: value.loss, metrics: value.metrics }, data))
        });
        work.await.unwrap_or_else(|error| {
            Err(Error::new(ErrorKind::InvalidInput, format!("loss function panicked: {error}")))
        })
    }
}

impl LossResult {
    /// Adds the custom loss and its metrics to the output of the second pass. The loss that the
    /// server computed in that pass, a weighted cross entropy, is renamed to `surrogate_loss:sum`.
    pub(super) fn add_to(self, mut output: BatchOutput) -> BatchOutput {
        if let Some(surrogate) = output.metrics.remove(LOSS) {
            output.metrics.insert(SURROGATE.to_owned(), surrogate);
        }
        let custom =
            self.metrics.into_iter().map(|(name, value)| (name, MetricValue::Number(value)));
        output.metrics.extend(custom);
        output.metrics.insert(LOSS.to_owned(), MetricValue::Number(self.loss));
        output
    }
}

#[cfg(feature = "upstream")]
impl LossResult {
    /// Replaces the loss and the metrics in an output, like [`add_to`](Self::add_to).
    pub(crate) fn replace_in(
        self,
        mut output: tinkex_wire::ForwardBackwardOutput,
    ) -> tinkex_wire::ForwardBackwardOutput {
        if let Some(surrogate) = output.metrics.remove(LOSS) {
            output.metrics.insert(SURROGATE.to_owned(), surrogate);
        }
        output.metrics.extend(self.metrics);
        output.metrics.insert(LOSS.to_owned(), self.loss);
        output
    }
}

impl TrainingShared {
    /// Prepares a pass with a traced loss that the client computes.
    pub(super) fn prepare_traced(
        &self,
        mode: PassMode,
        data: Vec<Datum>,
        loss: CustomLoss,
    ) -> Result<PreparedPass> {
        loss.check(&data)?;
        let loss = LocalLoss::new(move |data, logprobs| Ok(loss.evaluate(data, logprobs)?));
        self.prepare_local(mode, data, loss)
    }

    /// Prepares a pass with a loss that a function of the caller computes.
    pub(super) fn prepare_computed(
        &self,
        mode: PassMode,
        data: Vec<Datum>,
        loss: &ComputedLoss,
    ) -> Result<PreparedPass> {
        let function = Arc::clone(&loss.0);
        self.prepare_local(
            mode,
            data,
            LocalLoss::new(move |data, logprobs| function(data, logprobs)),
        )
    }

    /// Prepares a pass with a loss that the client computes.
    fn prepare_local(
        &self,
        mode: PassMode,
        data: Vec<Datum>,
        loss: LocalLoss,
    ) -> Result<PreparedPass> {
        let forward = self.cross_entropy(PassMode::Forward, with_weights(&data, None)?)?;
        Ok(PreparedPass::OnClient { mode, forward, data, loss })
    }

    /// Prepares the requests of a cross-entropy pass.
    pub(super) fn cross_entropy(&self, mode: PassMode, data: Vec<Datum>) -> Result<BatchRequests> {
        BatchRequests::new(self, mode, data, &LossFn::CrossEntropy, &LossConfig::new())
    }
}

/// Returns the data with target tokens and weights as its only loss inputs.
///
/// With a gradient, the weights are −gradient. Without one (for the forward pass, before the
/// gradient is known), the weights are the datum's own weights, or zeros if it has none.
pub(crate) fn with_weights(
    data: &[Datum],
    gradients: Option<(&LossValue, &[TensorData])>,
) -> Result<Vec<Datum>> {
    data.iter()
        .enumerate()
        .map(|(i, datum)| {
            let targets = datum.loss_input(TARGET_TOKENS).ok_or_else(|| {
                let message =
                    format!("cannot compute the loss of datum {i}: it has no {TARGET_TOKENS}");
                Error::new(ErrorKind::InvalidInput, message)
            })?;
            let weights = match gradients {
                Some((value, logprobs)) => {
                    let weights: Vec<f32> = value.gradients[i].iter().map(|g| -g).collect();
                    TensorData::from(weights).reshape(logprobs[i].shape().clone())?
                }
                None => match datum.loss_input(WEIGHTS) {
                    Some(weights) => weights.clone(),
                    None => zeros(targets)?,
                },
            };
            let mut builder = Datum::builder(datum.model_input().clone())
                .loss_input(TARGET_TOKENS, targets.clone())
                .loss_input(WEIGHTS, weights);
            if let Some(provenance) = datum.provenance() {
                let Provenance { model_input, loss_inputs } = provenance.clone();
                builder = builder.provenance(model_input, loss_inputs);
            }
            Ok(builder.build()?)
        })
        .collect()
}

/// Returns weights of 0 in the shape of the targets. Their values do not matter, because a forward
/// pass accumulates no gradient.
fn zeros(targets: &TensorData) -> Result<TensorData> {
    let shape = targets.shape();
    let elements = shape.element_count().ok_or_else(|| {
        let message = format!("shape {:?} of {TARGET_TOKENS} is too large", shape.dims());
        Error::new(ErrorKind::InvalidInput, message)
    })?;
    // A tensor without a shape has as many elements as values.
    let zeros = TensorData::from(vec![0.0_f32; elements.max(targets.values().len())]);
    if shape.dims().is_empty() { Ok(zeros) } else { Ok(zeros.reshape(shape.clone())?) }
}

/// Returns the log-probabilities of each datum.
fn logprobs(output: &BatchOutput, count: usize) -> Result<Vec<TensorData>> {
    let found: Vec<TensorData> =
        output.outputs.iter().filter_map(|output| output.tensor(LOGPROBS)).collect();
    if found.len() == count {
        return Ok(found);
    }
    let message = format!(
        "cannot compute the loss: server returned log-probabilities of {} data, expected {count}",
        found.len()
    );
    Err(Error::new(ErrorKind::Decode, message))
}

/// Checks that the loss is finite and its gradient has one finite element per log-probability.
fn validate_loss(value: &LossValue, logprobs: &[TensorData]) -> Result<()> {
    let invalid = |reason: String| {
        let message = format!("loss function returned an invalid result: {reason}");
        Err(Error::new(ErrorKind::InvalidInput, message))
    };
    if !value.loss.is_finite() {
        return invalid(format!("the loss is {}", value.loss));
    }
    if value.gradients.len() != logprobs.len() {
        let got = value.gradients.len();
        let expected = logprobs.len();
        return invalid(format!("it has gradients of {got} data, expected {expected}"));
    }
    for (i, (gradient, logprobs)) in value.gradients.iter().zip(logprobs).enumerate() {
        let got = gradient.len();
        let expected = logprobs.values().len();
        if got != expected {
            return invalid(format!(
                "the gradient of datum {i} has {got} values, expected {expected}"
            ));
        }
        if gradient.iter().any(|derivative| !derivative.is_finite()) {
            return invalid(format!("the gradient of datum {i} is not finite"));
        }
    }
    Ok(())
}
