//! [`Datum`]: one training example.

mod build;
mod json;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::ids::SequenceId;
use crate::input::ModelInput;
use crate::tensor::TensorData;

pub use build::{DatumBuilder, PerTokenValues};
pub(crate) use json::DatumFields;

/// Names of the inputs of the built-in losses.
pub mod loss_input {
    /// Token to predict at each position.
    pub const TARGET_TOKENS: &str = "target_tokens";
    /// Weight of each position.
    pub const WEIGHTS: &str = "weights";
    /// Log-probabilities under the sampling policy.
    pub const LOGPROBS: &str = "logprobs";
    /// Advantage of each token.
    pub const ADVANTAGES: &str = "advantages";
    /// Lower clip bound per position.
    pub const CLIP_LOW: &str = "clip_low_threshold";
    /// Upper clip bound per position.
    pub const CLIP_HIGH: &str = "clip_high_threshold";
    /// Mask of the positions that contribute to the importance ratio of the sequence.
    pub const SEQUENCE_RATIO_MASK: &str = "sequence_ratio_mask";

    pub(crate) const ALL: [&str; 7] =
        [TARGET_TOKENS, WEIGHTS, LOGPROBS, ADVANTAGES, CLIP_LOW, CLIP_HIGH, SEQUENCE_RATIO_MASK];
}

/// One training example: a model input and the input tensors of the loss.
///
/// The tensors are aligned with the input: element `i` refers to the token that follows position
/// `i`. [`Datum::supervised`], [`Datum::completion`] and [`Datum::rollout`] align whole sequences;
/// [`Datum::builder`] expects aligned tensors.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::Datum;
///
/// // Train the completion 30, 31 of the prompt 10, 11, 12.
/// let datum = Datum::completion([10, 11, 12], [30, 31])?;
/// assert_eq!(datum.model_input().to_tokens().unwrap()[..], [10, 11, 12, 30]);
/// assert_eq!(datum.loss_input("target_tokens").unwrap().as_i64().unwrap(), [11, 12, 30, 31]);
/// assert_eq!(datum.loss_input("weights").unwrap().as_f32().unwrap(), [0.0, 0.0, 1.0, 1.0]);
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
///
/// With serde, a datum has the JSON form of the API. Reading checks the same rules as the builder.
#[derive(Clone, Debug, PartialEq)]
pub struct Datum {
    model_input: ModelInput,
    // A list instead of a map: there are two to four entries, and insertion order is preserved.
    loss_inputs: Vec<(Cow<'static, str>, TensorData)>,
    provenance: Option<Box<Provenance>>,
}

impl Datum {
    pub(crate) fn from_parts(
        model_input: ModelInput,
        loss_inputs: Vec<(Cow<'static, str>, TensorData)>,
        provenance: Option<Box<Provenance>>,
    ) -> Self {
        Self { model_input, loss_inputs, provenance }
    }

    /// Returns the model input.
    #[must_use]
    pub fn model_input(&self) -> &ModelInput {
        &self.model_input
    }

    /// Returns the loss input `name`.
    #[must_use]
    pub fn loss_input(&self, name: &str) -> Option<&TensorData> {
        self.loss_inputs().find(|(key, _)| *key == name).map(|(_, tensor)| tensor)
    }

    /// Iterates over all loss inputs in insertion order.
    pub fn loss_inputs(&self) -> impl Iterator<Item = (&str, &TensorData)> + ExactSizeIterator {
        self.loss_inputs.iter().map(|(name, tensor)| (&**name, tensor))
    }

    /// Returns the provenance of the tokens, if it was set.
    #[must_use]
    pub fn provenance(&self) -> Option<&Provenance> {
        self.provenance.as_deref()
    }
}

/// Origin of a datum's tokens. Each list of spans covers its field completely.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Provenance {
    /// Spans of the model input.
    pub model_input: Vec<ProvenanceSpan>,
    /// Spans of the loss inputs.
    pub loss_inputs: Vec<ProvenanceSpan>,
}

/// Consecutive tokens that originate from a sampled sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProvenanceSpan {
    /// Part of the sequence.
    pub source: SpanSource,
    /// Id of the sequence.
    pub sequence_id: SequenceId,
    /// Position of the first token within the part.
    pub offset: u64,
    /// Number of tokens.
    pub length: u64,
}

/// Part of a sampled sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum SpanSource {
    /// Prompt of the sequence.
    Prompt,
    /// Sampled tokens.
    Sampled,
}

impl ProvenanceSpan {
    /// Creates a span of the prompt of a sampled sequence.
    #[must_use]
    pub fn prompt(sequence_id: impl Into<SequenceId>, offset: u64, length: u64) -> Self {
        Self { source: SpanSource::Prompt, sequence_id: sequence_id.into(), offset, length }
    }

    /// Creates a span of sampled tokens.
    #[must_use]
    pub fn sampled(sequence_id: impl Into<SequenceId>, offset: u64, length: u64) -> Self {
        Self { source: SpanSource::Sampled, sequence_id: sequence_id.into(), offset, length }
    }
}
