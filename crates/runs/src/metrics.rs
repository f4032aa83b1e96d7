//! [`MetricsLine`]: metrics of a step or of an evaluation.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::metric;

/// Line of `metrics.jsonl`: the metrics of a step or of an evaluation, by name.
///
/// A step and the evaluation after that step have one line each. The names of evaluation metrics
/// start with `eval_`. Values that are not finite are not written. A reader ignores fields that are
/// not numbers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetricsLine {
    /// Number of finished steps.
    pub step: u64,
    values: BTreeMap<String, f64>,
}

impl MetricsLine {
    /// Creates a line without metrics.
    #[must_use]
    pub fn new(step: u64) -> Self {
        Self { step, values: BTreeMap::new() }
    }

    /// Adds a metric.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: f64) -> Self {
        self.values.insert(name.into(), value);
        self
    }

    /// Adds a metric, if it has a value.
    #[must_use]
    pub fn with_optional(self, name: &str, value: Option<f64>) -> Self {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }

    /// Adds metrics with a prefix before their names.
    #[must_use]
    pub fn with_all(
        mut self,
        prefix: &str,
        values: impl IntoIterator<Item = (String, f64)>,
    ) -> Self {
        self.values
            .extend(values.into_iter().map(|(name, value)| (format!("{prefix}{name}"), value)));
        self
    }

    /// Returns the value of a metric.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).copied()
    }

    /// Returns all metrics in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.values.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// Returns whether the line belongs to an evaluation instead of a step.
    #[must_use]
    pub fn is_evaluation(&self) -> bool {
        !self.values.is_empty()
            && self.values.keys().all(|name| name.starts_with(metric::EVAL_PREFIX))
    }
}

impl Serialize for MetricsLine {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("step", &self.step)?;
        for (name, value) in &self.values {
            if let Some(count) = whole_number(*value) {
                map.serialize_entry(name, &count)?;
            } else if value.is_finite() {
                map.serialize_entry(name, value)?;
            }
        }
        map.end()
    }
}

/// Converts a number without a fraction to an integer, so that counts are written without `.0`.
fn whole_number(value: f64) -> Option<i64> {
    /// Integers below this bound are exact as `f64`.
    const MAX_EXACT: f64 = (1_i64 << 53) as f64;
    let is_whole = value.fract() == 0.0 && value.abs() < MAX_EXACT;
    // −0 stays a float: an integer would lose its sign.
    let is_negative_zero = value == 0.0 && value.is_sign_negative();
    #[expect(clippy::cast_possible_truncation, reason = "the value is below 2^53")]
    (is_whole && !is_negative_zero).then_some(value as i64)
}

impl<'de> Deserialize<'de> for MetricsLine {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(LineVisitor)
    }
}

/// Deserializes a [`MetricsLine`].
struct LineVisitor;

/// Value of a field: a number, or any other value, which is ignored.
#[derive(Deserialize)]
#[serde(untagged)]
enum FieldValue {
    Number(f64),
    Other(IgnoredAny),
}

impl<'de> Visitor<'de> for LineVisitor {
    type Value = MetricsLine;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a step and metrics")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<MetricsLine, A::Error> {
        let mut step = None;
        let mut values = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "step" {
                step = Some(map.next_value()?);
            } else if let FieldValue::Number(value) = map.next_value()? {
                values.insert(name, value);
            }
        }
        let step = step.ok_or_else(|| serde::de::Error::missing_field("step"))?;
        Ok(MetricsLine { step, values })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_finite_numbers_are_written_and_only_numbers_are_read() {
        let line = MetricsLine::new(3)
            .with(metric::LOSS, 0.1)
            .with(metric::TOKENS, 12.0)
            .with(metric::KL, f64::NAN)
            .with("zero", -0.0);
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(text, r#"{"step":3,"loss":0.1,"tokens":12,"zero":-0.0}"#);
        let read =
            r#"{"loss":0.1,"checkpoint":"x","nested":{"a":1},"step":3,"kl":null,"tokens":12}"#;
        let read: MetricsLine = serde_json::from_str(read).unwrap();
        assert_eq!(read.iter().collect::<Vec<_>>(), [("loss", 0.1), ("tokens", 12.0)]);
        for wrong in [r#"{"loss":1}"#, r#"{"step":-1}"#, "[1]", "1", r#"{"step":1.5}"#] {
            assert!(serde_json::from_str::<MetricsLine>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_line_belongs_to_a_step_or_to_an_evaluation() {
        assert!(MetricsLine::new(0).with(metric::EVAL_LOSS, 1.0).is_evaluation());
        assert!(!MetricsLine::new(1).with(metric::LOSS, 1.0).is_evaluation());
        assert!(!MetricsLine::new(1).is_evaluation());
    }
}
