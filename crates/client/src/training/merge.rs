//! Merges the outputs of a batch's chunks into one output for the batch.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};
use tinkex_loss::token_loss;
use tinkex_wire::{
    Datum, ForwardBackwardOutput, LossOutputs, TensorData, TensorValues, loss_input,
};

/// Output of [`forward`](crate::TrainingClient::forward) or
/// [`forward_backward`](crate::TrainingClient::forward_backward) over one batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct BatchOutput {
    /// Name of the type of `outputs`, as the server reports it.
    pub output_type: String,
    /// Output tensors of each example, in the order of the batch.
    pub outputs: LossOutputs,
    /// Metrics of the batch by name. The part after the last `:` is the reduction over examples,
    /// for example `loss:sum`.
    ///
    /// A `tinkex` server sends `loss:sum`, `tokens:sum` (number of positions) and `weight:sum` (sum
    /// of the weights of all target tokens; a token without a weight counts 1), and for losses with
    /// thresholds `ratio_clipped:mean`. Other servers may send `loss:sum` alone.
    pub metrics: BTreeMap<String, MetricValue>,
    /// Sum of the weights of all target tokens of the batch, as the client computes it from the
    /// data; a token without a weight counts 1. For built-in losses, a `tinkex` server also sends
    /// it as the metric `weight:sum`. For a loss that the client computes, that metric may differ:
    /// the client replaces the weights of the data in its requests.
    pub weight: f64,
}

impl BatchOutput {
    /// Returns the loss summed over the batch.
    ///
    /// The value is the metric `loss:sum`, or, without that metric, the sum of the
    /// `elementwise_loss` tensors. Returns `None` if the server sent neither.
    #[must_use]
    pub fn loss(&self) -> Option<f64> {
        if let Some(sum) = self.metrics.get("loss:sum") {
            return Some(sum.as_f64());
        }
        token_loss(&self.outputs)
    }

    /// Returns the mean loss per target token: [`loss`](Self::loss) divided by
    /// [`weight`](Self::weight).
    ///
    /// Tokens with weight 0, such as the prompt of [`Datum::completion`](crate::Datum::completion),
    /// do not count, so batches of different sizes can be compared. Returns `None` if the server
    /// sent no loss, or if the weights add up to 0.
    #[must_use]
    pub fn mean_loss(&self) -> Option<f64> {
        self.loss().filter(|_| self.weight != 0.0).map(|loss| loss / self.weight)
    }
}

/// Value of a metric.
///
/// Serde writes a number with a fraction or an exponent and a checksum as an integer, so that
/// reading restores the variant. JSON has no NaN and no infinity: they are written as null, which
/// is read as NaN.
///
/// ```
/// use tinkex::MetricValue;
///
/// let loss = MetricValue::from(1.0 / 3.0);
/// assert_eq!(format!("{loss:.3}"), "0.333");
/// assert_eq!(serde_json::to_string(&MetricValue::from(2.0))?, "2.0");
/// assert_eq!(f64::from(serde_json::from_str::<MetricValue>("2.0")?), 2.0);
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum MetricValue {
    /// Floating-point number.
    Number(f64),
    /// 64-bit checksum (reduction `hash2`), exact in every bit.
    Checksum(u64),
}

impl MetricValue {
    /// Returns the value as a floating-point number. A checksum is rounded to 53 significant bits.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "the documentation states the rounding")]
    pub fn as_f64(self) -> f64 {
        match self {
            Self::Number(number) => number,
            Self::Checksum(sum) => sum as f64,
        }
    }
}

impl From<f64> for MetricValue {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl From<MetricValue> for f64 {
    /// Converts like [`MetricValue::as_f64`].
    fn from(value: MetricValue) -> Self {
        value.as_f64()
    }
}

impl fmt::Display for MetricValue {
    /// Formats the number. Width and precision apply as for `f64` and `u64`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => fmt::Display::fmt(number, f),
            Self::Checksum(sum) => fmt::Display::fmt(sum, f),
        }
    }
}

impl<'de> Deserialize<'de> for MetricValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// JSON forms of a metric: integer, number with a fraction or an exponent, and null.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum MetricForm {
            Checksum(u64),
            Number(f64),
            NotFinite(()),
        }

        Ok(match MetricForm::deserialize(deserializer)? {
            MetricForm::Checksum(sum) => Self::Checksum(sum),
            MetricForm::Number(number) => Self::Number(number),
            MetricForm::NotFinite(()) => Self::Number(f64::NAN),
        })
    }
}

/// Returns the sum of the weights of all target tokens. A token without a weight counts 1, as it
/// does in the loss.
#[expect(clippy::cast_precision_loss, reason = "no batch has 2^53 tokens")]
pub(crate) fn total_weight(data: &[Datum]) -> f64 {
    let weight = |datum: &Datum| {
        let weights = datum.loss_input(loss_input::WEIGHTS).map(TensorData::values);
        if let Some(TensorValues::Float32(weights)) = weights {
            return weights.iter().copied().map(f64::from).sum();
        }
        let targets = datum.loss_input(loss_input::TARGET_TOKENS);
        targets.map_or(0, |targets| targets.values().len()) as f64
    };
    data.iter().map(weight).sum()
}

/// Merges the outputs of all chunks, given in the order of the batch. `weight` is the
/// [`total_weight`] of the batch.
pub(crate) fn merge(chunks: Vec<ForwardBackwardOutput>, weight: f64) -> BatchOutput {
    let metrics = {
        let chunks: Vec<ChunkMetrics<'_>> = chunks
            .iter()
            .map(|chunk| ChunkMetrics {
                metrics: &chunk.metrics,
                datums: chunk.loss_fn_outputs.len(),
            })
            .collect();
        reduce(&chunks)
    };
    let mut chunks = chunks.into_iter();
    let Some(first) = chunks.next() else { return BatchOutput { weight, ..Default::default() } };
    let mut outputs = first.loss_fn_outputs;
    for chunk in chunks {
        outputs.append(chunk.loss_fn_outputs);
    }
    BatchOutput { output_type: first.loss_fn_output_type, outputs, metrics, weight }
}

/// Metrics of one chunk.
struct ChunkMetrics<'a> {
    metrics: &'a BTreeMap<String, f64>,
    /// Number of examples in the chunk.
    datums: usize,
}

/// Reduces metrics over chunks. The suffix of a metric's name after the last `:` is its reduction.
///
/// Omits a metric that a chunk lacks or whose reduction is unknown: a metric must never make a
/// finished result fail.
fn reduce(chunks: &[ChunkMetrics<'_>]) -> BTreeMap<String, MetricValue> {
    let mut reduced = BTreeMap::new();
    let Some(first) = chunks.first() else { return reduced };
    for name in first.metrics.keys() {
        let values: Option<Vec<f64>> =
            chunks.iter().map(|chunk| chunk.metrics.get(name).copied()).collect();
        let Some(values) = values else { continue };
        match name.rsplit_once(':').map(|(_, reduction)| reduction) {
            // Keeps the value of every chunk: `name`, `name_1`, `name_2` and so on.
            Some("unique") => {
                for (i, value) in values.into_iter().enumerate() {
                    let name = if i == 0 { name.clone() } else { format!("{name}_{i}") };
                    reduced.insert(name, MetricValue::Number(value));
                }
            }
            Some("hash2") => {
                let sum = values.into_iter().map(checksum).fold(0_u64, u64::wrapping_add);
                reduced.insert(name.clone(), MetricValue::Checksum(sum));
            }
            Some(reduction) => {
                if let Some(number) = reduce_numbers(reduction, &values, chunks) {
                    reduced.insert(name.clone(), MetricValue::Number(number));
                }
            }
            // A metric without a reduction cannot be merged, so it is kept only if there is a
            // single chunk.
            None if chunks.len() == 1 => {
                reduced.insert(name.clone(), MetricValue::Number(values[0]));
            }
            None => {}
        }
    }
    reduced
}

/// Applies a reduction to the values of all chunks. Returns `None` if the reduction is unknown.
fn reduce_numbers(reduction: &str, values: &[f64], chunks: &[ChunkMetrics<'_>]) -> Option<f64> {
    Some(match reduction {
        "sum" => values.iter().sum(),
        "min" => values.iter().copied().fold(f64::INFINITY, f64::min),
        "max" => max(values),
        "mean" => mean(values, chunks),
        "slack" => max(values) - mean(values, chunks),
        _ => return None,
    })
}

fn max(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

/// Returns the mean weighted by the number of examples per chunk, or 0 without examples.
#[expect(clippy::cast_precision_loss, reason = "no batch has 2^53 examples")]
fn mean(values: &[f64], chunks: &[ChunkMetrics<'_>]) -> f64 {
    let weights = chunks.iter().map(|chunk| chunk.datums as f64);
    let total: f64 = weights.clone().sum();
    if total == 0.0 {
        return 0.0;
    }
    values.iter().zip(weights).map(|(value, weight)| value * weight).sum::<f64>() / total
}

/// Truncates to a 64-bit integer. Negative values wrap around.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "wraps on purpose")]
fn checksum(value: f64) -> u64 {
    if value < 0.0 { (value.trunc() as i64).cast_unsigned() } else { value.trunc() as u64 }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::fixture;
    use crate::training::{OptimOutput, StepOutput};

    fn close(a: f64, b: f64) -> bool {
        a == b || (a - b).abs() <= 1e-12 * a.abs().max(b.abs())
    }

    /// Covers T3.1.1, T3.1.2, T3.1.3.
    #[test]
    fn metrics_are_reduced_as_in_the_python_sdk() {
        for case in fixture::cases("metrics_reduction.json") {
            let chunks = case["chunks"].as_array().unwrap();
            let metrics: Vec<BTreeMap<String, f64>> = chunks
                .iter()
                .map(|c| serde_json::from_value(c["metrics"].clone()).unwrap())
                .collect();
            let chunks: Vec<ChunkMetrics<'_>> = metrics
                .iter()
                .zip(chunks)
                .map(|(metrics, chunk)| {
                    let datums = usize::try_from(chunk["num_outputs"].as_u64().unwrap()).unwrap();
                    ChunkMetrics { metrics, datums }
                })
                .collect();
            let reduced = reduce(&chunks);
            let Some(expected) = case["expected"].as_object() else {
                // The Python SDK raises here, which loses the whole result.
                assert!(case["expected_error"].is_string(), "{case}");
                continue;
            };
            assert_eq!(
                reduced.keys().collect::<Vec<_>>(),
                expected.keys().collect::<Vec<_>>(),
                "{}",
                case["id"]
            );
            for (name, value) in expected {
                match (reduced[name], value) {
                    (MetricValue::Checksum(sum), value) => {
                        assert_eq!(Some(sum), value.as_u64(), "{}", case["id"]);
                    }
                    (MetricValue::Number(number), Value::Number(value)) => {
                        assert!(close(number, value.as_f64().unwrap()), "{}", case["id"]);
                    }
                    (MetricValue::Number(number), _) => assert!(number.is_infinite()),
                }
            }
        }
    }

    #[test]
    fn outputs_are_written_as_json_and_read_back() {
        let record = tinkex_wire::LossRecord::new(2);
        let record = record.field("logprobs", vec![-0.5_f32, -1.0, -2.0], [1, 2]).unwrap();
        let metrics = [
            ("loss:sum", MetricValue::Number(3.0)),
            ("shift:min", MetricValue::Number(-4.0)),
            ("data:hash2", MetricValue::Checksum(u64::MAX)),
            ("small:hash2", MetricValue::Checksum(3)),
        ];
        let metrics: BTreeMap<_, _> = metrics.map(|(name, value)| (name.to_owned(), value)).into();
        let pass = BatchOutput {
            output_type: "TorchLossReturn".to_owned(),
            outputs: record.into(),
            metrics: metrics.clone(),
            weight: 2.0,
        };
        let optim = OptimOutput { metrics };
        let step = StepOutput { pass, optim };
        let text = serde_json::to_string(&step).unwrap();
        assert!(text.contains(r#""data:hash2":18446744073709551615"#), "{text}");
        assert!(text.contains(r#""loss:sum":3.0"#), "{text}");
        let read: StepOutput = serde_json::from_str(&text).unwrap();
        assert_eq!(read, step);
        assert_eq!((read.loss(), read.mean_loss()), (Some(3.0), Some(1.5)));
        let nan = serde_json::to_string(&MetricValue::Number(f64::NAN)).unwrap();
        assert!(serde_json::from_str::<MetricValue>(&nan).unwrap().as_f64().is_nan());
        assert!(serde_json::from_str::<MetricValue>("true").is_err());
    }

    #[test]
    fn the_weight_of_a_batch_counts_tokens_without_a_weight_as_one() {
        let completion = Datum::completion([1, 2], [3, 4]).unwrap();
        let weighted = Datum::supervised([1, 2, 3], vec![9.0, 0.5, 0.25]).unwrap();
        let rollout = Datum::rollout([1, 2], [3], vec![-1.0], 1.0).unwrap();
        let other = Datum::builder([1]).loss_input("mine", vec![1.0]).build().unwrap();
        let data = [completion, weighted, rollout, other];
        let weights = data.each_ref().map(|datum| total_weight(std::slice::from_ref(datum)));
        assert_eq!(weights, [2.0, 0.75, 2.0, 0.0]);
        assert_eq!(total_weight(&data), 4.75);
        let output = BatchOutput::default();
        assert_eq!((output.loss(), output.mean_loss()), (None, None), "no loss, no weight");
    }

    #[test]
    fn metrics_are_formatted_like_numbers() {
        assert_eq!(format!("{:6.2}", MetricValue::Number(1.5)), "  1.50");
        assert_eq!(MetricValue::Checksum(u64::MAX).to_string(), "18446744073709551615");
        assert_eq!(f64::from(MetricValue::Checksum(7)), 7.0);
    }

    #[test]
    fn unknown_reductions_and_empty_chunks_do_not_fail() {
        let metrics: BTreeMap<String, f64> = [("loss", 1.0), ("a:b:sum", 2.0), ("m:mean", 3.0)]
            .map(|(k, v)| (k.to_owned(), v))
            .into();
        let chunk = || ChunkMetrics { metrics: &metrics, datums: 0 };
        let single = reduce(&[chunk()]);
        assert_eq!(single["loss"], MetricValue::Number(1.0));
        assert_eq!(single["m:mean"], MetricValue::Number(0.0));
        let merged = reduce(&[chunk(), chunk()]);
        assert_eq!((merged.get("loss"), merged["a:b:sum"]), (None, MetricValue::Number(4.0)));
    }
}
