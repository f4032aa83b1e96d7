//! What was sampled.

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize};

use crate::future::SubmitResponse;
use crate::ids::SequenceId;
use crate::logprobs::{Logprobs, TopkLogprobs};
use crate::tensor::TensorData;
use crate::tokens::Tokens;
use crate::{DecodeError, DecodeErrorKind};

/// The answer to a [`SampleRequest`](crate::SampleRequest).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "sample")]
pub struct SampleResponse {
    /// The samples.
    pub sequences: Vec<SampledSequence>,
    /// The prompt's log-probabilities: one per position, missing where not computed.
    #[serde(default)]
    pub prompt_logprobs: Option<Logprobs>,
    /// The likeliest tokens at each prompt position.
    #[serde(default)]
    pub topk_prompt_logprobs: Option<TopkLogprobs>,
    /// How many prompt tokens the server had already read.
    #[serde(default, deserialize_with = "or_zero")]
    pub prompt_cache_hit_tokens: u32,
    /// Log-probabilities of the tokens that were asked about, in the request's layout; 0 where
    /// nothing was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_prompt_logprobs: Option<TensorData>,
    /// Other tokens drawn at each prompt position after the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_alt_tokens: Option<PromptAltTokens>,
}

fn or_zero<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// One sample.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SampledSequence {
    /// Why it ended.
    pub stop_reason: StopReason,
    /// Its tokens.
    pub tokens: Tokens,
    /// Their log-probabilities.
    #[serde(default)]
    pub logprobs: Option<Logprobs>,
    /// The likeliest tokens at each position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topk_logprobs: Option<TopkLogprobs>,
    /// What provenance spans call it. The server says so when it takes the request, not here: see
    /// [`SubmitResponse::sample_sequence_ids`](crate::SubmitResponse::sample_sequence_ids).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence_id: Option<SequenceId>,
}

/// Why a sample ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StopReason {
    /// At a stop text or token, or the model's own end.
    #[default]
    Stop,
    /// At the token limit.
    Length,
    /// For a reason that this version has no name for. The sample is whole all the same, so it is
    /// not thrown away.
    #[serde(other)]
    Unknown,
}

impl StopReason {
    /// The word in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Unknown => "unknown",
        }
    }
}

/// Other tokens that were drawn at each prompt position after the first: row `i` speaks about
/// position `i + 1`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptAltTokens {
    /// The tokens, as an `int64` matrix.
    pub tokens: TensorData,
    /// Their log-probabilities, as a `float32` matrix.
    pub logprobs: TensorData,
}

impl SampleResponse {
    /// Gives the samples the names that the server announced with the ticket. A server that
    /// announced none leaves them without.
    ///
    /// # Errors
    /// If there are not as many names as samples.
    pub fn assign_sequence_ids(&mut self, ticket: &SubmitResponse) -> Result<(), DecodeError> {
        let Some(names) = &ticket.sample_sequence_ids else { return Ok(()) };
        if names.len() != self.sequences.len() {
            let why = format!("{} names for {} samples", names.len(), self.sequences.len());
            return Err(
                DecodeError::new(DecodeErrorKind::Length, why).within("sample_sequence_ids")
            );
        }
        for (sequence, name) in self.sequences.iter_mut().zip(names) {
            sequence.sequence_id = Some(name.clone());
        }
        Ok(())
    }

    /// What holds for an answer in either form: one log-probability per token, none in place of
    /// empty lists, and types that fit.
    pub(crate) fn settled(mut self) -> Result<Self, DecodeError> {
        let filled = |logprobs: &mut Option<Logprobs>| {
            if logprobs.as_ref().is_some_and(Logprobs::is_empty) {
                *logprobs = None;
            }
        };
        filled(&mut self.prompt_logprobs);
        for (at, sequence) in self.sequences.iter_mut().enumerate() {
            filled(&mut sequence.logprobs);
            let tokens = sequence.tokens.len();
            if let Some(logprobs) = sequence.logprobs.as_ref().filter(|l| l.len() != tokens) {
                let why = format!("{} for {tokens} tokens", logprobs.len());
                let error = DecodeError::new(DecodeErrorKind::Length, why).within("logprobs");
                return Err(error.at(at).within("sequences"));
            }
        }
        if let Some(alt) = &self.prompt_alt_tokens
            && (alt.tokens.as_i64().is_none() || alt.logprobs.as_f32().is_none())
        {
            let why = "tokens must be integers and log-probabilities floating point";
            return Err(DecodeError::new(DecodeErrorKind::DType, why).within("prompt_alt_tokens"));
        }
        Ok(self)
    }

    /// Encodes the answer into one buffer of exactly its size.
    #[must_use]
    pub fn to_proto(&self) -> Bytes {
        crate::codec::proto::sample::encode(self)
    }

    /// Reads an answer.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn from_proto(bytes: &[u8]) -> Result<Self, DecodeError> {
        crate::codec::proto::sample::decode(bytes)
    }
}
