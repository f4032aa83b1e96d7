//! Losses that are computed here: a forward pass, the loss, and a backward pass whose weights are
//! the loss's own gradient.
//!
//! The server's cross entropy is the sum of −logprob · weight. With −gradient as weights its
//! gradient is the one we want, whatever the loss.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::sync::Arc;

use tinkex_wire::loss_input::{TARGET_TOKENS, WEIGHTS};
use tinkex_wire::{Datum, LossConfig, LossFn, PassMode, TensorData};

use crate::error::{Error, ErrorKind, Result};
use crate::future::ApiFuture;
use crate::loss::{CustomLoss, LOGPROBS, LossValue};

use super::forward_backward::BatchRequests;
use super::merge::{BatchOutput, MetricValue};
use super::{TrainingClient, TrainingShared};

/// What a function that computes a loss may fail with.
type Failure = Box<dyn StdError + Send + Sync>;

impl TrainingClient {
    /// Adds the gradient of a loss that you compute from the log-probabilities of each datum's
    /// target tokens.
    ///
    /// Takes two passes over the data. Calls made after this one wait in line until both are sent,
    /// so the order of calls is kept; the function runs on a thread where it may take its time, and
    /// must not wait for another call of the same model.
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
    /// A loss that is traced ([`CustomLoss`]) brings its own gradient and goes to
    /// [`TrainingClient::forward_backward`] like any other.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if a datum has no `target_tokens`, or the function fails or
    /// returns gradients that do not fit; nothing was added to the model then.
    pub fn forward_backward_custom<F>(&self, data: Vec<Datum>, loss: F) -> ApiFuture<BatchOutput>
    where
        F: FnOnce(&[Datum], &[TensorData]) -> std::result::Result<LossValue, Failure>
            + Send
            + 'static,
    {
        self.compute(PassMode::ForwardBackward, data, loss).unwrap_or_else(ApiFuture::failed)
    }

    /// Computes a traced loss here.
    pub(super) fn compute_traced(
        &self,
        mode: PassMode,
        data: Vec<Datum>,
        loss: CustomLoss,
    ) -> Result<ApiFuture<BatchOutput>> {
        loss.check(&data)?;
        self.compute(mode, data, move |data, logprobs| Ok(loss.evaluate(data, logprobs)?))
    }

    fn compute<F>(
        &self,
        mode: PassMode,
        data: Vec<Datum>,
        loss: F,
    ) -> Result<ApiFuture<BatchOutput>>
    where
        F: FnOnce(&[Datum], &[TensorData]) -> std::result::Result<LossValue, Failure>
            + Send
            + 'static,
    {
        let inner = Arc::clone(&self.0);
        let forward = inner.plain(PassMode::Forward, with_weights(&data, None)?)?;
        let mut reservation = inner.call_order.reserve();
        Ok(ApiFuture::start(async move {
            let work = async {
                reservation.wait().await;
                let taken = inner.submit_batch(&mut reservation, forward).await;
                let output = inner.poll_batch(taken).await?;
                let logprobs = logprobs(&output, data.len())?;
                let (value, data) = run(loss, data, logprobs).await?;
                if mode == PassMode::Forward {
                    return Ok(with_metrics(output, value.loss, value.metrics));
                }
                let backward = inner.plain(PassMode::ForwardBackward, data)?;
                let taken = inner.submit_batch(&mut reservation, backward).await;
                drop(reservation);
                let output = inner.poll_batch(taken).await?;
                Ok(with_metrics(output, value.loss, value.metrics))
            };
            let answer = inner.session.run_until_closed(work).await;
            inner.session.connection().record_failure(answer)
        }))
    }
}

/// Computes a loss, and the data of the backward pass. It may take long, and may panic: neither is
/// for the threads that send and receive.
async fn run<F>(
    loss: F,
    data: Vec<Datum>,
    logprobs: Vec<TensorData>,
) -> Result<(LossValue, Vec<Datum>)>
where
    F: FnOnce(&[Datum], &[TensorData]) -> std::result::Result<LossValue, Failure> + Send + 'static,
{
    let work = tokio::task::spawn_blocking(move || {
        let value = loss(&data, &logprobs).map_err(|why| {
            let failed = Error::new(ErrorKind::InvalidInput, format!("the loss failed: {why}"));
            failed.with_boxed_source(why)
        })?;
        check(&value, &logprobs)?;
        let data = with_weights(&data, Some((&value, &logprobs)))?;
        Ok((value, data))
    });
    work.await.unwrap_or_else(|why| {
        Err(Error::new(ErrorKind::InvalidInput, format!("the loss panicked: {why}")))
    })
}

impl TrainingShared {
    fn plain(&self, mode: PassMode, data: Vec<Datum>) -> Result<BatchRequests> {
        BatchRequests::new(self, mode, data, &LossFn::CrossEntropy, &LossConfig::new())
    }
}

/// The same data with target tokens and weights alone: −gradient, or, before there is one, whatever
/// weights there are.
fn with_weights(
    data: &[Datum],
    gradients: Option<(&LossValue, &[TensorData])>,
) -> Result<Vec<Datum>> {
    data.iter()
        .enumerate()
        .map(|(i, datum)| {
            let targets = datum.loss_input(TARGET_TOKENS).ok_or_else(|| {
                let why = format!("datum {i} has no {TARGET_TOKENS}");
                Error::new(ErrorKind::InvalidInput, why)
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
                let spans = (provenance.model_input.clone(), provenance.loss_inputs.clone());
                builder = builder.provenance(spans.0, spans.1);
            }
            Ok(builder.build()?)
        })
        .collect()
}

/// Weights for a forward pass, where they do not matter.
fn zeros(targets: &TensorData) -> Result<TensorData> {
    let dims = targets.shape().dims();
    let cells = targets.shape().element_count().unwrap_or(usize::MAX).max(targets.values().len());
    let zeros = TensorData::from(vec![0.0_f32; cells]);
    if dims.is_empty() { Ok(zeros) } else { Ok(zeros.reshape(targets.shape().clone())?) }
}

fn logprobs(output: &BatchOutput, datums: usize) -> Result<Vec<TensorData>> {
    let found: Vec<TensorData> =
        output.outputs.iter().filter_map(|output| output.tensor(LOGPROBS)).collect();
    if found.len() == datums {
        return Ok(found);
    }
    let why = format!("{} log-probabilities for {datums} datums", found.len());
    Err(Error::new(ErrorKind::Decode, format!("the server sent {why}")))
}

fn check(value: &LossValue, logprobs: &[TensorData]) -> Result<()> {
    let wrong = |why: String| Err(Error::new(ErrorKind::InvalidInput, format!("the loss {why}")));
    if !value.loss.is_finite() {
        return wrong(format!("is {}", value.loss));
    }
    if value.gradients.len() != logprobs.len() {
        return wrong(format!(
            "has {} gradients for {} datums",
            value.gradients.len(),
            logprobs.len()
        ));
    }
    for (i, (gradient, logprobs)) in value.gradients.iter().zip(logprobs).enumerate() {
        let len = logprobs.values().len();
        if gradient.len() != len {
            return wrong(format!(
                "has {} numbers as gradient of the {len} of datum {i}",
                gradient.len()
            ));
        }
        if gradient.iter().any(|number| !number.is_finite()) {
            return wrong(format!("has a gradient that is not finite in datum {i}"));
        }
    }
    Ok(())
}

/// The pass's own loss is a stand-in; the loss is what was computed.
fn with_metrics(mut output: BatchOutput, loss: f64, metrics: BTreeMap<String, f64>) -> BatchOutput {
    const LOSS: &str = "loss:sum";
    if let Some(stand_in) = output.metrics.remove(LOSS) {
        output.metrics.insert("surrogate_loss:sum".to_owned(), stand_in);
    }
    let own = metrics.into_iter().map(|(name, value)| (name, MetricValue::Number(value)));
    output.metrics.extend(own);
    output.metrics.insert(LOSS.to_owned(), MetricValue::Number(loss));
    output
}
