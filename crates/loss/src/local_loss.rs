//! [`LocalLoss`]: a loss that is computed from the log-probabilities of a forward pass.
//!
//! A forward pass returns the log-probabilities, [`LocalLoss::compute`] evaluates the loss and its
//! gradient, and a second pass trains with the server's cross entropy. Cross entropy is the sum of
//! −logprob · weight. With −gradient as the weights, its gradient equals the gradient of the custom
//! loss.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;

use tinkex_transport::error::{Error, ErrorKind, Result};
use tinkex_wire::loss_input::{TARGET_TOKENS, WEIGHTS};
use tinkex_wire::{Datum, LossOutputs, Provenance, TensorData};

use crate::custom_loss::{LOGPROBS, LossValue};

/// Name of the metric with the custom loss.
const LOSS: &str = "loss:sum";
/// Name of the metric with the weighted cross entropy, which has the same gradient as the custom
/// loss.
const SURROGATE: &str = "surrogate_loss:sum";

/// Error returned by a caller's loss function.
type LossError = Box<dyn StdError + Send + Sync>;

/// Loss that is computed in this process, for one batch.
pub struct LocalLoss(Box<LossFunction>);

/// Loss function that is called for one batch.
type LossFunction =
    dyn FnOnce(&[Datum], &[TensorData]) -> std::result::Result<LossValue, LossError> + Send;

/// Loss that was computed in this process, with its metrics.
#[derive(Debug)]
pub struct LossResult {
    loss: f64,
    metrics: BTreeMap<String, f64>,
}

impl LocalLoss {
    /// Creates a loss from the function `loss`, which computes the value and the gradients from the
    /// data and the log-probabilities of each datum.
    pub fn new<F>(loss: F) -> Self
    where
        F: FnOnce(&[Datum], &[TensorData]) -> std::result::Result<LossValue, LossError>
            + Send
            + 'static,
    {
        Self(Box::new(loss))
    }

    /// Computes the loss from the outputs of a forward pass. Returns the loss, and the data of the
    /// second pass, which accumulates the gradient of the loss.
    ///
    /// The loss function runs on tokio's blocking thread pool, because it may take long or panic
    /// and must not delay the tasks that do I/O.
    ///
    /// # Errors
    /// [`ErrorKind::Decode`] if `outputs` lacks the log-probabilities of a datum;
    /// [`ErrorKind::InvalidInput`] if the loss function fails, panics, or returns a value that is
    /// not finite or gradients of other lengths than the log-probabilities.
    pub async fn compute(
        self,
        outputs: &LossOutputs,
        data: Vec<Datum>,
    ) -> Result<(LossResult, Vec<Datum>)> {
        let logprobs = logprobs(outputs, data.len())?;
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
    /// Adds the custom loss and its metrics to the metrics of the second pass. The loss that the
    /// server computed in that pass, a weighted cross entropy, is renamed to `surrogate_loss:sum`.
    pub fn add_to<V: From<f64>>(self, metrics: &mut BTreeMap<String, V>) {
        if let Some(surrogate) = metrics.remove(LOSS) {
            metrics.insert(SURROGATE.to_owned(), surrogate);
        }
        metrics.extend(self.metrics.into_iter().map(|(name, value)| (name, V::from(value))));
        metrics.insert(LOSS.to_owned(), V::from(self.loss));
    }
}

impl fmt::Debug for LocalLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LocalLoss")
    }
}

/// Returns the data of the forward pass whose log-probabilities [`LocalLoss::compute`] needs. The
/// loss inputs of each datum are its target tokens, and its weights or zeros.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] if a datum has no target tokens.
pub fn forward_data(data: &[Datum]) -> Result<Vec<Datum>> {
    with_weights(data, None)
}

/// Returns the sum of the losses of all tokens, or `None` if the output of a datum has no token
/// losses.
#[must_use]
pub fn token_loss(outputs: &LossOutputs) -> Option<f64> {
    if outputs.is_empty() {
        return None;
    }
    outputs.iter().try_fold(0.0, |sum, datum| {
        let tokens = datum.f32("elementwise_loss")?;
        Some(sum + tokens.iter().copied().map(f64::from).sum::<f64>())
    })
}

/// Returns the data with target tokens and weights as its only loss inputs.
///
/// With a gradient, the weights are −gradient. Without a gradient (for the forward pass, before the
/// gradient is known), the weights are the datum's own weights, or zeros if the datum has none.
fn with_weights(
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
                let Provenance { model_input, loss_inputs, .. } = provenance.clone();
                builder = builder.provenance(model_input, loss_inputs);
            }
            Ok(builder.build()?)
        })
        .collect()
}

/// Returns weights of 0 in the shape of the targets. The values of the weights do not matter,
/// because a forward pass accumulates no gradient.
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

/// Returns the log-probabilities of each of `count` data.
///
/// # Errors
/// [`ErrorKind::Decode`] if the output of a datum has no log-probabilities.
fn logprobs(outputs: &LossOutputs, count: usize) -> Result<Vec<TensorData>> {
    let found: Vec<TensorData> =
        outputs.iter().filter_map(|output| output.tensor(LOGPROBS)).collect();
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
