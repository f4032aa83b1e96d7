//! [`TrainingObjective`]: the loss of a batch and its metrics.

use tinkex_autodiff::LossProgram;

use super::datum::Datum;
use crate::Result;
use crate::loss::{Loss, LossMetrics, LossSums};

/// Loss function of a training batch.
#[derive(Clone, Copy, Debug)]
pub enum TrainingObjective<'a> {
    /// A built-in loss.
    Loss(Loss),
    /// A custom loss.
    Graph(&'a LossProgram),
}

impl From<Loss> for TrainingObjective<'_> {
    fn from(loss: Loss) -> Self {
        Self::Loss(loss)
    }
}

/// Names and values of metrics.
type NamedValues = Vec<(String, f64)>;

/// Result of a forward pass over a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingOutput {
    /// For every datum, the log-probability of every target.
    pub logprobs: Vec<Vec<f32>>,
    /// Names and values of metrics. The first is `loss:sum`.
    pub metrics: Vec<(String, f64)>,
}

/// Loss and metrics of one datum.
#[derive(Clone, Debug)]
pub(super) enum DatumLoss {
    Loss(LossSums),
    Graph { loss: f64, metrics: NamedValues },
}

impl TrainingObjective<'_> {
    /// Returns the loss of a datum and its gradient with respect to every log-probability.
    pub(super) fn evaluate(&self, datum: &Datum<'_>, p: &[f32]) -> Result<(DatumLoss, Vec<f32>)> {
        match self {
            Self::Loss(loss) => {
                let mut grad = vec![0.0; p.len()];
                let out = loss.evaluate(&datum.inputs, p, &mut grad)?;
                Ok((DatumLoss::Loss(out), grad))
            }
            Self::Graph(graph) => {
                let out = graph.evaluate(&datum.graph_inputs(&datum.shape(), p))?;
                Ok((DatumLoss::Graph { loss: out.loss, metrics: out.metrics }, out.gradient))
            }
        }
    }
}

/// Returns the metrics of a batch: sums over the data in their order, and means for names that end
/// with `:mean`. `tokens` has the number of input tokens of each datum.
pub(super) fn report(tokens: &[usize], losses: Vec<DatumLoss>) -> NamedValues {
    let mut built_in = LossMetrics::default();
    let mut custom: Option<NamedValues> = None;
    let mut total = 0.0;
    for (tokens, loss) in tokens.iter().zip(losses) {
        match loss {
            DatumLoss::Loss(out) => built_in.add(*tokens, &out),
            DatumLoss::Graph { loss, metrics } => {
                total += loss;
                match &mut custom {
                    None => custom = Some(metrics),
                    Some(sums) => {
                        for (sum, (_, value)) in sums.iter_mut().zip(metrics) {
                            sum.1 += value;
                        }
                    }
                }
            }
        }
    }
    let Some(mut sums) = custom else { return built_in.named() };
    #[expect(clippy::cast_precision_loss, reason = "batches are small")]
    for (_, sum) in sums.iter_mut().filter(|(name, _)| name.ends_with(":mean")) {
        *sum /= tokens.len() as f64;
    }
    sums.insert(0, ("loss:sum".to_owned(), total));
    sums
}
