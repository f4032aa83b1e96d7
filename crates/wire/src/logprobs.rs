//! Log-probabilities of tokens.

use std::fmt;
use std::sync::Arc;

use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::slice::SharedSlice;
use crate::tokens::Tokens;

/// Log-probabilities, one per position.
///
/// A missing value is NaN in memory and in protobuf, null in JSON, and `None` in this interface.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::Logprobs;
///
/// let logprobs = Logprobs::from(vec![f32::NAN, -0.25]);
/// assert_eq!(logprobs.get(0), None);
/// assert_eq!(logprobs.get(1), Some(-0.25));
/// assert_eq!(logprobs.sum(), -0.25);
/// assert_eq!(logprobs.to_vec(), [None, Some(-0.25)]);
/// ```
#[derive(Clone, Default)]
pub struct Logprobs(SharedSlice<f32>);

impl Logprobs {
    /// Returns the number of positions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns `true` if there are no positions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the log-probability at a position, or `None` if it is missing.
    #[must_use]
    pub fn get(&self, position: usize) -> Option<f32> {
        self.0.get(position).copied().and_then(known)
    }

    /// Iterates over all positions in order.
    pub fn iter(&self) -> impl Iterator<Item = Option<f32>> + ExactSizeIterator {
        self.0.iter().copied().map(known)
    }

    /// Returns the sum of all values that are present: the log-probability of the whole sequence,
    /// or 0 if there are none. Adds in `f64`, so that long sequences lose no precision.
    #[must_use]
    pub fn sum(&self) -> f64 {
        self.iter().flatten().map(f64::from).sum()
    }

    /// Returns a copy of all positions in order; `None` marks a missing value.
    #[must_use]
    pub fn to_vec(&self) -> Vec<Option<f32>> {
        self.iter().collect()
    }

    /// Returns the raw values; NaN marks a missing value.
    #[must_use]
    pub fn as_slice(&self) -> &[f32] {
        &self.0
    }

    /// Returns the raw values as a shared slice, for use in a [`Datum`](crate::Datum).
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

impl From<Logprobs> for SharedSlice<f32> {
    fn from(logprobs: Logprobs) -> Self {
        logprobs.0
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

/// Most likely tokens at each position, in descending order of probability.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::TopkLogprobs;
///
/// let topk = TopkLogprobs::from_rows([None, Some(vec![(7, -0.5), (8, -1.0)])]);
/// assert!(topk.row(0).is_none());
/// assert_eq!(topk.row(1).unwrap().collect::<Vec<_>>(), [(7, -0.5), (8, -1.0)]);
/// ```
#[derive(Clone)]
pub struct TopkLogprobs {
    k: u32,
    length: u32,
    token_ids: Tokens,
    logprobs: SharedSlice<f32>,
    layout: TopkLayout,
}

/// Memory layout of the rows.
#[derive(Clone)]
enum TopkLayout {
    /// Layout of the protobuf message: `k` cells per row, unused cells are [`PADDING`].
    Padded,
    /// Used cells only, with the start of each row and the end of the last one.
    Ragged(Arc<Vec<usize>>),
}

/// Content of an unused cell.
const PADDING: (u32, f32) = (0, -99_999.0);

impl TopkLogprobs {
    /// Creates a table from rows of tokens and log-probabilities; `None` or an empty row marks a
    /// position that was not computed.
    ///
    /// # Panics
    /// Panics if there are more than `u32::MAX` rows or tokens in a row.
    pub fn from_rows(rows: impl IntoIterator<Item = Option<Vec<(u32, f32)>>>) -> Self {
        let mut token_ids = Vec::new();
        let mut logprobs = Vec::new();
        let mut starts = vec![0];
        let mut widest = 1;
        for row in rows {
            let row = row.unwrap_or_default();
            widest = widest.max(row.len());
            for (token, logprob) in row {
                token_ids.push(token);
                logprobs.push(logprob);
            }
            starts.push(token_ids.len());
        }
        Self {
            k: u32::try_from(widest).expect("at most u32::MAX tokens in a row"),
            length: u32::try_from(starts.len() - 1).expect("at most u32::MAX rows"),
            token_ids: token_ids.into(),
            logprobs: logprobs.into(),
            layout: TopkLayout::Ragged(Arc::new(starts)),
        }
    }

    /// Creates a table from the cells of the protobuf message: `k * length` tokens and
    /// log-probabilities.
    pub(crate) fn from_cells(
        k: u32,
        length: u32,
        token_ids: Tokens,
        logprobs: SharedSlice<f32>,
    ) -> Self {
        Self { k, length, token_ids, logprobs, layout: TopkLayout::Padded }
    }

    /// Returns the cells of the protobuf message.
    pub(crate) fn to_cells(&self) -> (Tokens, SharedSlice<f32>) {
        if matches!(self.layout, TopkLayout::Padded) {
            return (self.token_ids.clone(), self.logprobs.clone());
        }
        let row = |position| {
            let cells = self.row(position).into_iter().flatten();
            cells.chain(std::iter::repeat(PADDING)).take(self.k())
        };
        let (tokens, logprobs): (Vec<u32>, Vec<f32>) = (0..self.len()).flat_map(row).unzip();
        (tokens.into(), logprobs.into())
    }

    /// Returns the number of positions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length as usize
    }

    /// Returns `true` if there are no positions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the maximum number of tokens per position.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k as usize
    }

    /// Returns the tokens and log-probabilities at a position, or `None` if they were not computed.
    #[must_use]
    pub fn row(
        &self,
        position: usize,
    ) -> Option<impl Iterator<Item = (u32, f32)> + ExactSizeIterator> {
        if position >= self.len() {
            return None;
        }
        let range = match &self.layout {
            TopkLayout::Padded => position * self.k()..(position + 1) * self.k(),
            TopkLayout::Ragged(starts) => starts[position]..starts[position + 1],
        };
        let tokens = &self.token_ids[range.clone()];
        let logprobs = &self.logprobs[range];
        let used = |(token, logprob): (&u32, &f32)| (*token, *logprob) != PADDING;
        let filled = tokens.iter().zip(logprobs).rposition(used)? + 1;
        // A row that starts with padding was not computed.
        if !used((&tokens[0], &logprobs[0])) {
            return None;
        }
        Some(tokens[..filled].iter().copied().zip(logprobs[..filled].iter().copied()))
    }

    /// Iterates over all positions in order.
    pub fn rows(
        &self,
    ) -> impl Iterator<Item = Option<impl Iterator<Item = (u32, f32)> + ExactSizeIterator>>
    + ExactSizeIterator {
        (0..self.len()).map(|position| self.row(position))
    }
}

impl PartialEq for TopkLogprobs {
    /// Compares the rows, independent of their memory layout.
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len()
            && self.rows().zip(other.rows()).all(|rows| match rows {
                (None, None) => true,
                (Some(a), Some(b)) => {
                    a.len() == b.len()
                        && a.zip(b).all(|(a, b)| (a.0, a.1.to_bits()) == (b.0, b.1.to_bits()))
                }
                _ => false,
            })
    }
}

impl fmt::Debug for TopkLogprobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TopkLogprobs")
            .field("k", &self.k)
            .field("length", &self.length)
            .field("token_ids", &self.token_ids)
            .field("logprobs", &self.logprobs)
            .finish_non_exhaustive()
    }
}

// JSON form of servers without protobuf results: rows of [token, logprob] pairs, or null.

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
        Vec::<Option<Vec<(u32, f32)>>>::deserialize(deserializer).map(Self::from_rows)
    }
}
