//! What was sampled.

use std::fmt;

use bytes::Bytes;
use serde::de::Error as _;
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::DecodeError;
use crate::ids::SequenceId;
use crate::input::Tokens;
use crate::slice::SharedSlice;
use crate::tensor::{TensorData, same_bits};

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
    #[serde(default)]
    pub prompt_cache_hit_tokens: u32,
    /// Log-probabilities of the tokens that were asked about, in the request's layout; 0 where
    /// nothing was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_prompt_logprobs: Option<TensorData>,
    /// Other tokens drawn at each prompt position after the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_alt_tokens: Option<PromptAltTokens>,
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
    /// [`Ticket::sample_sequence_ids`](crate::Ticket::sample_sequence_ids).
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

/// Log-probabilities, one per position; some may be missing.
///
/// A missing one is NaN in memory and on the wire, null in JSON, `None` here.
///
/// ```
/// use tinkex_wire::Logprobs;
///
/// let logprobs = Logprobs::from(vec![f32::NAN, -0.25]);
/// assert_eq!(logprobs.get(0), None);
/// assert_eq!(logprobs.get(1), Some(-0.25));
/// assert_eq!(logprobs.iter().flatten().sum::<f32>(), -0.25);
/// ```
#[derive(Clone, Default)]
pub struct Logprobs(SharedSlice<f32>);

impl Logprobs {
    /// How many positions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no positions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The log-probability at a position, unless it is missing.
    #[must_use]
    pub fn get(&self, position: usize) -> Option<f32> {
        self.0.get(position).copied().and_then(known)
    }

    /// All positions in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Option<f32>> {
        self.0.iter().copied().map(known)
    }

    /// The numbers as they are, NaN for missing.
    #[must_use]
    pub fn as_slice(&self) -> &[f32] {
        &self.0
    }

    /// The numbers as they are, shared; to put into a [`Datum`](crate::Datum).
    #[must_use]
    pub fn shared(&self) -> SharedSlice<f32> {
        self.0.clone()
    }
}

fn known(logprob: f32) -> Option<f32> {
    (!logprob.is_nan()).then_some(logprob)
}

impl From<Vec<f32>> for Logprobs {
    fn from(numbers: Vec<f32>) -> Self {
        Self(numbers.into())
    }
}

impl From<SharedSlice<f32>> for Logprobs {
    fn from(numbers: SharedSlice<f32>) -> Self {
        Self(numbers)
    }
}

impl From<&Logprobs> for SharedSlice<f32> {
    fn from(logprobs: &Logprobs) -> Self {
        logprobs.shared()
    }
}

impl PartialEq for Logprobs {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().zip(other.iter()).all(|(a, b)| a == b)
    }
}

impl fmt::Debug for Logprobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl Serialize for Logprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for Logprobs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let numbers = Vec::<Option<f32>>::deserialize(deserializer)?;
        Ok(Self(numbers.into_iter().map(|number| number.unwrap_or(f32::NAN)).collect()))
    }
}

/// The likeliest tokens at each position, likeliest first.
///
/// ```
/// use tinkex_wire::TopkLogprobs;
///
/// let topk = TopkLogprobs::from_rows(2, [None, Some(vec![(7, -0.5), (8, -1.0)])]);
/// assert!(topk.row(0).is_none());
/// assert_eq!(topk.row(1).unwrap().collect::<Vec<_>>(), [(7, -0.5), (8, -1.0)]);
/// ```
#[derive(Clone)]
pub struct TopkLogprobs {
    pub(crate) k: u32,
    pub(crate) length: u32,
    pub(crate) token_ids: Tokens,
    pub(crate) logprobs: SharedSlice<f32>,
}

/// Fills the cells of a row that has fewer tokens than the others.
pub(crate) const PADDING: (u32, f32) = (0, -99_999.0);

impl TopkLogprobs {
    /// From rows of at most `k` tokens each; `None` for a position that was not computed.
    ///
    /// # Panics
    /// If there are more than `u32::MAX` rows.
    pub fn from_rows(k: u32, rows: impl IntoIterator<Item = Option<Vec<(u32, f32)>>>) -> Self {
        let width = k as usize;
        let (mut token_ids, mut logprobs) = (Vec::new(), Vec::new());
        let mut length = 0_u32;
        for row in rows {
            let cells = row.unwrap_or_default().into_iter().chain(std::iter::repeat(PADDING));
            for (token, logprob) in cells.take(width) {
                token_ids.push(token);
                logprobs.push(logprob);
            }
            length = length.checked_add(1).expect("at most u32::MAX rows");
        }
        Self { k, length, token_ids: token_ids.into(), logprobs: logprobs.into() }
    }

    /// How many positions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length as usize
    }

    /// Whether there are no positions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// How many tokens a position has at most.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k as usize
    }

    /// The tokens at a position with their log-probabilities, unless that was not computed.
    #[must_use]
    pub fn row(&self, position: usize) -> Option<impl ExactSizeIterator<Item = (u32, f32)>> {
        let range = position.checked_mul(self.k())?..(position + 1).checked_mul(self.k())?;
        let tokens = self.token_ids.get(range.clone())?;
        let logprobs = self.logprobs.get(range)?;
        let filled = tokens.iter().zip(logprobs).rposition(|(t, l)| (*t, *l) != PADDING)? + 1;
        if (tokens[0], logprobs[0]) == PADDING {
            return None;
        }
        Some(tokens[..filled].iter().copied().zip(logprobs[..filled].iter().copied()))
    }

    /// All positions in order.
    pub fn rows(
        &self,
    ) -> impl ExactSizeIterator<Item = Option<impl ExactSizeIterator<Item = (u32, f32)>>> {
        (0..self.len()).map(|position| self.row(position))
    }
}

impl PartialEq for TopkLogprobs {
    fn eq(&self, other: &Self) -> bool {
        (self.k, self.length, &self.token_ids) == (other.k, other.length, &other.token_ids)
            && same_bits(&self.logprobs, &other.logprobs)
    }
}

impl fmt::Debug for TopkLogprobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TopkLogprobs")
            .field("k", &self.k)
            .field("length", &self.length)
            .field("token_ids", &self.token_ids)
            .field("logprobs", &self.logprobs)
            .finish()
    }
}

// JSON, as servers before protobuf results sent it: rows of [token, logprob] pairs, or null.

impl Serialize for TopkLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.len()))?;
        for row in self.rows() {
            list.serialize_element(&row.map(Iterator::collect::<Vec<_>>))?;
        }
        list.end()
    }
}

impl<'de> Deserialize<'de> for TopkLogprobs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let rows = Vec::<Option<Vec<(u32, f32)>>>::deserialize(deserializer)?;
        let widest = rows.iter().flatten().map(Vec::len).max().unwrap_or(1).max(1);
        // Rows are padded to the widest one: a single long row must not blow up all others.
        let cells: usize = rows.iter().flatten().map(Vec::len).sum::<usize>() + rows.len();
        if widest.saturating_mul(rows.len()) > cells.saturating_mul(64) {
            return Err(D::Error::custom("rows of too different lengths"));
        }
        let k = u32::try_from(widest).map_err(|_| D::Error::custom("row too long"))?;
        Ok(Self::from_rows(k, rows))
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
