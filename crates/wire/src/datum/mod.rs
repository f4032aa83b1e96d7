//! [`Datum`]: one training example.

mod build;

use std::borrow::Cow;

use crate::ids::SequenceId;
use crate::input::ModelInput;
use crate::tensor::TensorData;

pub use build::{DatumBuilder, PerTokenValues};

/// The names of the loss inputs that the built-in losses read.
pub mod loss_input {
    /// The token to predict at each position.
    pub const TARGET_TOKENS: &str = "target_tokens";
    /// How much each position counts.
    pub const WEIGHTS: &str = "weights";
    /// Log-probabilities under the policy that sampled.
    pub const LOGPROBS: &str = "logprobs";
    /// How much better than expected each token was.
    pub const ADVANTAGES: &str = "advantages";
    /// Lower clip bound per position.
    pub const CLIP_LOW: &str = "clip_low_threshold";
    /// Upper clip bound per position.
    pub const CLIP_HIGH: &str = "clip_high_threshold";
    /// Which positions count towards a sequence's ratio.
    pub const SEQUENCE_RATIO_MASK: &str = "sequence_ratio_mask";

    pub(crate) const ALL: [&str; 7] =
        [TARGET_TOKENS, WEIGHTS, LOGPROBS, ADVANTAGES, CLIP_LOW, CLIP_HIGH, SEQUENCE_RATIO_MASK];
}

/// One training example: what the model reads, and the tensors its loss needs.
///
/// The tensors are aligned with the input: index `i` speaks about the token that follows position
/// `i`. [`Datum::supervised`], [`Datum::completion`] and [`Datum::rollout`] do that alignment for
/// whole sequences; [`Datum::builder`] takes aligned tensors as they are.
///
/// ```
/// use tinkex_wire::Datum;
///
/// // Learn to answer 30, 31 to the prompt 10, 11, 12.
/// let datum = Datum::completion([10, 11, 12], [30, 31])?;
/// assert_eq!(datum.model_input().to_tokens().unwrap()[..], [10, 11, 12, 30]);
/// assert_eq!(datum.loss_input("target_tokens").unwrap().as_i64().unwrap(), [11, 12, 30, 31]);
/// assert_eq!(datum.loss_input("weights").unwrap().as_f32().unwrap(), [0.0, 0.0, 1.0, 1.0]);
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Datum {
    model_input: ModelInput,
    // A list, not a map: there are two to four, and the order they were given in is kept.
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

    /// What the model reads.
    #[must_use]
    pub fn model_input(&self) -> &ModelInput {
        &self.model_input
    }

    /// The loss input called `name`.
    #[must_use]
    pub fn loss_input(&self, name: &str) -> Option<&TensorData> {
        self.loss_inputs().find(|(key, _)| *key == name).map(|(_, tensor)| tensor)
    }

    /// All loss inputs with their names, in the order they were given.
    pub fn loss_inputs(&self) -> impl ExactSizeIterator<Item = (&str, &TensorData)> {
        self.loss_inputs.iter().map(|(name, tensor)| (&**name, tensor))
    }

    /// Where the tokens came from, if that was said.
    #[must_use]
    pub fn provenance(&self) -> Option<&Provenance> {
        self.provenance.as_deref()
    }
}

/// Where the tokens of a datum came from: each list covers its field from start to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provenance {
    /// The sources of the model input.
    pub model_input: Vec<ProvenanceSpan>,
    /// The sources of the loss inputs.
    pub loss_inputs: Vec<ProvenanceSpan>,
}

/// A run of tokens and the sampled sequence it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProvenanceSpan {
    /// Which part of that sequence.
    pub source: SpanSource,
    /// The sequence.
    pub sequence_id: SequenceId,
    /// Where in that part the run starts.
    pub offset: u64,
    /// How many tokens it has.
    pub length: u64,
}

/// The part of a sampled sequence that a [`ProvenanceSpan`] points into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpanSource {
    /// What was asked.
    Prompt,
    /// What was sampled.
    Sampled,
}

impl ProvenanceSpan {
    /// A run of the prompt of a sampled sequence.
    #[must_use]
    pub fn prompt(sequence_id: impl Into<SequenceId>, offset: u64, length: u64) -> Self {
        Self { source: SpanSource::Prompt, sequence_id: sequence_id.into(), offset, length }
    }

    /// A run of sampled tokens.
    #[must_use]
    pub fn sampled(sequence_id: impl Into<SequenceId>, offset: u64, length: u64) -> Self {
        Self { source: SpanSource::Sampled, sequence_id: sequence_id.into(), offset, length }
    }
}
