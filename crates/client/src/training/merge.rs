//! Putting the outputs of a batch's chunks together again.

use std::collections::BTreeMap;

use tinkex_wire::{ForwardBackwardOutput, LossOutputs};

/// What a pass over a batch computed.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct BatchOutput {
    /// What kind of outputs these are.
    pub output_type: String,
    /// Tensors for each datum, in the order of the data.
    pub outputs: LossOutputs,
    /// Numbers about the whole batch.
    pub metrics: BTreeMap<String, MetricValue>,
}

impl BatchOutput {
    /// The loss, summed over the batch: the metric `loss:sum`, or from a server without it the sum
    /// of what it says of each token (`elementwise_loss`). None if it says neither.
    #[must_use]
    pub fn loss(&self) -> Option<f64> {
        if let Some(told) = self.metrics.get("loss:sum") {
            return Some(told.as_f64());
        }
        if self.outputs.is_empty() {
            return None;
        }
        self.outputs.iter().try_fold(0.0, |sum, datum| {
            let tokens = datum.f32("elementwise_loss")?;
            Some(sum + tokens.iter().copied().map(f64::from).sum::<f64>())
        })
    }
}

/// A number about a piece of work.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum MetricValue {
    /// A number.
    Number(f64),
    /// A checksum, exact to the bit.
    Checksum(u64),
}

impl MetricValue {
    /// As a number; a checksum loses its low bits.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "said in the line above")]
    pub fn as_f64(self) -> f64 {
        match self {
            Self::Number(number) => number,
            Self::Checksum(sum) => sum as f64,
        }
    }
}

/// Joins the outputs of all chunks, in the order of the data.
pub(crate) fn merge(chunks: Vec<ForwardBackwardOutput>) -> BatchOutput {
    let metrics = {
        let parts: Vec<ChunkMetrics<'_>> = chunks
            .iter()
            .map(|chunk| ChunkMetrics {
                metrics: &chunk.metrics,
                datums: chunk.loss_fn_outputs.len(),
            })
            .collect();
        reduce(&parts)
    };
    let mut chunks = chunks.into_iter();
    let Some(first) = chunks.next() else { return BatchOutput::default() };
    let mut outputs = first.loss_fn_outputs;
    for chunk in chunks {
        outputs.append(chunk.loss_fn_outputs);
    }
    BatchOutput { output_type: first.loss_fn_output_type, outputs, metrics }
}

struct ChunkMetrics<'a> {
    metrics: &'a BTreeMap<String, f64>,
    datums: usize,
}

/// Joins metrics by what the last part of their name says. A name that one chunk lacks, or whose
/// last part is unknown, is left out: a finished result is never lost over a metric.
fn reduce(parts: &[ChunkMetrics<'_>]) -> BTreeMap<String, MetricValue> {
    let mut joined = BTreeMap::new();
    let Some(first) = parts.first() else { return joined };
    for name in first.metrics.keys() {
        let values: Option<Vec<f64>> =
            parts.iter().map(|part| part.metrics.get(name).copied()).collect();
        let Some(values) = values else { continue };
        match name.rsplit_once(':').map(|(_, reduction)| reduction) {
            Some("unique") => {
                for (i, value) in values.into_iter().enumerate() {
                    let name = if i == 0 { name.clone() } else { format!("{name}_{i}") };
                    joined.insert(name, MetricValue::Number(value));
                }
            }
            Some("hash2") => {
                let sum = values.into_iter().map(checksum).fold(0_u64, u64::wrapping_add);
                joined.insert(name.clone(), MetricValue::Checksum(sum));
            }
            Some(reduction) => {
                if let Some(number) = number(reduction, &values, parts) {
                    joined.insert(name.clone(), MetricValue::Number(number));
                }
            }
            // Nothing says how to join it, so it stays only if there is nothing to join.
            None if parts.len() == 1 => {
                joined.insert(name.clone(), MetricValue::Number(values[0]));
            }
            None => {}
        }
    }
    joined
}

fn number(reduction: &str, values: &[f64], parts: &[ChunkMetrics<'_>]) -> Option<f64> {
    Some(match reduction {
        "sum" => values.iter().sum(),
        "min" => values.iter().copied().fold(f64::INFINITY, f64::min),
        "max" => largest(values),
        "mean" => mean(values, parts),
        "slack" => largest(values) - mean(values, parts),
        _ => return None,
    })
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

/// Weighted by how many datums each chunk had; 0 if there were none at all.
#[expect(clippy::cast_precision_loss, reason = "no batch has 2^53 datums")]
fn mean(values: &[f64], parts: &[ChunkMetrics<'_>]) -> f64 {
    let weights = parts.iter().map(|part| part.datums as f64);
    let total: f64 = weights.clone().sum();
    if total == 0.0 {
        return 0.0;
    }
    values.iter().zip(weights).map(|(value, weight)| value * weight).sum::<f64>() / total
}

/// The value as a 64-bit integer, negative ones wrapped around.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "wrapping is meant")]
fn checksum(value: f64) -> u64 {
    if value < 0.0 { (value.trunc() as i64).cast_unsigned() } else { value.trunc() as u64 }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::fixture;

    fn close(a: f64, b: f64) -> bool {
        a == b || (a - b).abs() <= 1e-12 * a.abs().max(b.abs())
    }

    /// Covers T3.1.1, T3.1.2, T3.1.3.
    #[test]
    fn metrics_are_joined_as_in_the_reference() {
        for case in fixture::cases("metrics_reduction.json") {
            let chunks = case["chunks"].as_array().unwrap();
            let metrics: Vec<BTreeMap<String, f64>> = chunks
                .iter()
                .map(|c| serde_json::from_value(c["metrics"].clone()).unwrap())
                .collect();
            let parts: Vec<ChunkMetrics<'_>> = metrics
                .iter()
                .zip(chunks)
                .map(|(metrics, chunk)| {
                    let datums = usize::try_from(chunk["num_outputs"].as_u64().unwrap()).unwrap();
                    ChunkMetrics { metrics, datums }
                })
                .collect();
            let joined = reduce(&parts);
            let Some(expected) = case["expected"].as_object() else {
                // The reference loses the whole result here; we do not.
                assert!(case["expected_error"].is_string(), "{case}");
                continue;
            };
            assert_eq!(
                joined.keys().collect::<Vec<_>>(),
                expected.keys().collect::<Vec<_>>(),
                "{}",
                case["id"]
            );
            for (name, value) in expected {
                match (joined[name], value) {
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
    fn odd_names_and_no_datums_do_not_lose_a_result() {
        let metrics: BTreeMap<String, f64> = [("loss", 1.0), ("a:b:sum", 2.0), ("m:mean", 3.0)]
            .map(|(k, v)| (k.to_owned(), v))
            .into();
        let part = || ChunkMetrics { metrics: &metrics, datums: 0 };
        let one = reduce(&[part()]);
        assert_eq!(one["loss"], MetricValue::Number(1.0));
        assert_eq!(one["m:mean"], MetricValue::Number(0.0));
        let two = reduce(&[part(), part()]);
        assert_eq!((two.get("loss"), two["a:b:sum"]), (None, MetricValue::Number(4.0)));
    }
}
