//! [`Objective`]: what a batch is trained for, and what it reports.

use super::datum::Datum;
use crate::Result;
use crate::loss::graph::Graph;
use crate::loss::{Loss, Metrics};

/// What a batch is trained for.
#[derive(Clone, Copy, Debug)]
pub enum Objective<'a> {
    /// A built-in loss.
    Loss(Loss),
    /// A loss of the caller's own.
    Graph(&'a Graph),
}

impl From<Loss> for Objective<'_> {
    fn from(loss: Loss) -> Self {
        Self::Loss(loss)
    }
}

/// Names and values.
type NamedValues = Vec<(String, f64)>;

/// What a pass over a batch found.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// For every datum the log-probability of every target.
    pub logprobs: Vec<Vec<f32>>,
    /// Names and values; `loss:sum` is always there.
    pub metrics: Vec<(String, f64)>,
}

impl Objective<'_> {
    /// The metrics of a batch, and the slope of its loss by every log-probability.
    pub(super) fn evaluate(
        &self,
        data: &[Datum<'_>],
        logprobs: &[Vec<f32>],
    ) -> Result<(NamedValues, Vec<Vec<f32>>)> {
        match self {
            Self::Loss(loss) => {
                let mut metrics = Metrics::default();
                let mut slopes = Vec::with_capacity(data.len());
                for (i, (datum, p)) in data.iter().zip(logprobs).enumerate() {
                    let mut slope = vec![0.0; p.len()];
                    let out = loss
                        .evaluate(&datum.inputs, p, &mut slope)
                        .map_err(|error| error.in_datum(i))?;
                    metrics.add(datum.tokens.len(), &out);
                    slopes.push(slope);
                }
                Ok((metrics.named(), slopes))
            }
            Self::Graph(graph) => {
                let mut loss = 0.0;
                let mut sums: Vec<(String, f64)> = Vec::new();
                let mut slopes = Vec::with_capacity(data.len());
                for (i, (datum, p)) in data.iter().zip(logprobs).enumerate() {
                    let shape = datum.shape();
                    let out = graph
                        .evaluate(&datum.graph_inputs(&shape, p))
                        .map_err(|error| error.in_datum(i))?;
                    loss += out.loss;
                    slopes.push(out.slope);
                    if sums.is_empty() {
                        sums = out.metrics;
                    } else {
                        for (sum, (_, value)) in sums.iter_mut().zip(out.metrics) {
                            sum.1 += value;
                        }
                    }
                }
                #[expect(clippy::cast_precision_loss, reason = "batches are small")]
                for (_, sum) in sums.iter_mut().filter(|(name, _)| name.ends_with(":mean")) {
                    *sum /= data.len() as f64;
                }
                sums.insert(0, ("loss:sum".to_owned(), loss));
                Ok((sums, slopes))
            }
        }
    }
}
