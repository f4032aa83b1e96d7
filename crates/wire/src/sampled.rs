//! Results of sampling.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize};

use crate::future::SubmitResponse;
use crate::ids::SequenceId;
use crate::logprobs::{Logprobs, TopkLogprobs};
use crate::setters::setters;
use crate::tensor::TensorData;
use crate::tokens::Tokens;
use crate::{DecodeError, DecodeErrorKind};

/// Result of a [`SampleRequest`](crate::SampleRequest).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "sample")]
#[non_exhaustive]
pub struct SampleResponse {
    /// Sampled sequences, one per requested completion.
    pub sequences: Vec<SampledSequence>,
    /// Log-probabilities of the prompt tokens, one per position; missing where not computed.
    #[serde(default)]
    pub prompt_logprobs: Option<Logprobs>,
    /// Most likely tokens at each prompt position.
    #[serde(default)]
    pub topk_prompt_logprobs: Option<TopkLogprobs>,
    /// Number of prompt tokens found in the server's prefix cache.
    #[serde(default, deserialize_with = "or_zero")]
    pub prompt_cache_hit_tokens: u32,
    /// Log-probabilities of the requested target tokens, in the layout of the request; 0 in unused
    /// cells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_prompt_logprobs: Option<TensorData>,
    /// Alternative tokens sampled at each prompt position after the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_alt_tokens: Option<PromptAltTokens>,
}

fn or_zero<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

setters!(SampleResponse {
    sequences: Vec<SampledSequence>;
    prompt_logprobs: Option<Logprobs>;
    topk_prompt_logprobs: Option<TopkLogprobs>;
    prompt_cache_hit_tokens: u32;
    target_prompt_logprobs: Option<TensorData>;
    prompt_alt_tokens: Option<PromptAltTokens>;
});

/// One sampled sequence.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SampledSequence {
    /// Reason why sampling stopped.
    pub stop_reason: StopReason,
    /// Sampled tokens, without the prompt.
    pub tokens: Tokens,
    /// Log-probabilities of the tokens.
    #[serde(default)]
    pub logprobs: Option<Logprobs>,
    /// Most likely tokens at each position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topk_logprobs: Option<TopkLogprobs>,
    /// Id for use in provenance spans. Servers send it in
    /// [`SubmitResponse::sample_sequence_ids`](crate::SubmitResponse::sample_sequence_ids), not
    /// here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence_id: Option<SequenceId>,
}

setters!(SampledSequence {
    stop_reason: StopReason;
    tokens: impl Into<Tokens> => tokens.into();
    logprobs: Option<Logprobs>;
    topk_logprobs: Option<TopkLogprobs>;
});

/// Reason why sampling stopped.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::StopReason;
///
/// assert_eq!(StopReason::Length.to_string(), "length");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum StopReason {
    /// A stop string, a stop token or an end-of-sequence token.
    #[default]
    Stop,
    /// The token limit.
    Length,
    /// A reason that this version does not know. The sequence itself is complete.
    #[serde(other)]
    Unknown,
}

impl StopReason {
    /// Returns the name in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Alternative tokens sampled at each prompt position after the first. Row `i` refers to prompt
/// position `i + 1`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PromptAltTokens {
    /// Tokens, as an `int64` matrix.
    pub tokens: TensorData,
    /// Log-probabilities of the tokens, as a `float32` matrix.
    pub logprobs: TensorData,
}

impl PromptAltTokens {
    /// Creates alternatives from an `int64` matrix of tokens and a `float32` matrix of
    /// log-probabilities.
    #[must_use]
    pub fn new(tokens: TensorData, logprobs: TensorData) -> Self {
        Self { tokens, logprobs }
    }
}

impl SampleResponse {
    /// Sets the sequence ids that the server announced when it accepted the request. Does nothing
    /// if the server announced none.
    ///
    /// # Errors
    /// Returns an error if the number of ids differs from the number of sequences.
    #[doc(hidden)]
    pub fn assign_sequence_ids(&mut self, submitted: &SubmitResponse) -> Result<(), DecodeError> {
        let Some(ids) = &submitted.sample_sequence_ids else { return Ok(()) };
        if ids.len() != self.sequences.len() {
            let detail = format!("{} ids for {} sequences", ids.len(), self.sequences.len());
            return Err(
                DecodeError::new(DecodeErrorKind::Length, detail).within("sample_sequence_ids")
            );
        }
        for (sequence, id) in self.sequences.iter_mut().zip(ids) {
            sequence.sequence_id = Some(id.clone());
        }
        Ok(())
    }

    /// Applies the rules common to JSON and protobuf: checks that there is one log-probability per
    /// token and that element types match, and replaces empty lists by `None`.
    pub(crate) fn normalized(mut self) -> Result<Self, DecodeError> {
        let drop_empty = |logprobs: &mut Option<Logprobs>| {
            if logprobs.as_ref().is_some_and(Logprobs::is_empty) {
                *logprobs = None;
            }
        };
        drop_empty(&mut self.prompt_logprobs);
        for (at, sequence) in self.sequences.iter_mut().enumerate() {
            drop_empty(&mut sequence.logprobs);
            let tokens = sequence.tokens.len();
            if let Some(logprobs) = sequence.logprobs.as_ref().filter(|l| l.len() != tokens) {
                let detail = format!("{} values for {tokens} tokens", logprobs.len());
                let error = DecodeError::new(DecodeErrorKind::Length, detail).within("logprobs");
                return Err(error.at(at).within("sequences"));
            }
        }
        if let Some(alt) = &self.prompt_alt_tokens
            && (alt.tokens.as_i64().is_none() || alt.logprobs.as_f32().is_none())
        {
            let detail = "tokens must be int64 and log-probabilities float32";
            return Err(
                DecodeError::new(DecodeErrorKind::DType, detail).within("prompt_alt_tokens")
            );
        }
        Ok(self)
    }

    /// Encodes the result into one buffer of the exact size.
    #[doc(hidden)]
    #[must_use]
    pub fn to_proto(&self) -> Bytes {
        crate::codec::proto::sample::encode(self)
    }

    /// Decodes a result.
    ///
    /// # Errors
    /// Returns an error that names the invalid field.
    #[doc(hidden)]
    pub fn from_proto(bytes: &[u8]) -> Result<Self, DecodeError> {
        crate::codec::proto::sample::decode(bytes)
    }
}
