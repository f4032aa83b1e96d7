//! [`Tokens`]: a shared sequence of token ids.

use std::fmt;
use std::iter::FusedIterator;
use std::ops::{Deref, Range, RangeBounds};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::slice::SharedSlice;

/// Token ids. Clones and sub-slices share the memory.
///
/// Conversion from `Vec<u32>` or `Vec<i32>` does not copy. Ids are signed 32-bit integers on the
/// wire; an id above `i32::MAX` is encoded as the negative number with the same bits.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::Tokens;
///
/// let tokens = Tokens::from([1, 2, 3]);
/// assert_eq!(tokens.slice(..2), [1, 2]);
/// assert_eq!(Vec::from(tokens.clone()), vec![1, 2, 3]);
/// assert_eq!(tokens.into_iter().max(), Some(3));
/// ```
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Tokens(SharedSlice<u32>);

impl Tokens {
    /// Returns a sub-slice that shares the memory.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        Self(self.0.slice(range))
    }
}

impl Deref for Tokens {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.0
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl From<Vec<u32>> for Tokens {
    fn from(ids: Vec<u32>) -> Self {
        Self(ids.into())
    }
}

impl From<SharedSlice<u32>> for Tokens {
    fn from(ids: SharedSlice<u32>) -> Self {
        Self(ids)
    }
}

impl From<Vec<i32>> for Tokens {
    fn from(ids: Vec<i32>) -> Self {
        Self(bytemuck::allocation::cast_vec::<i32, u32>(ids).into())
    }
}

impl From<&Vec<u32>> for Tokens {
    fn from(ids: &Vec<u32>) -> Self {
        Self(ids.as_slice().into())
    }
}

impl<const N: usize> From<&[u32; N]> for Tokens {
    fn from(ids: &[u32; N]) -> Self {
        Self(ids.as_slice().into())
    }
}

impl From<&[u32]> for Tokens {
    fn from(ids: &[u32]) -> Self {
        Self(ids.into())
    }
}

impl From<&[i32]> for Tokens {
    fn from(ids: &[i32]) -> Self {
        Self(bytemuck::cast_slice::<i32, u32>(ids).into())
    }
}

impl<const N: usize> From<[u32; N]> for Tokens {
    fn from(ids: [u32; N]) -> Self {
        Self(ids.into())
    }
}

impl<const N: usize> From<[i32; N]> for Tokens {
    fn from(ids: [i32; N]) -> Self {
        Vec::from(ids).into()
    }
}

impl From<&Self> for Tokens {
    fn from(tokens: &Self) -> Self {
        tokens.clone()
    }
}

/// Compares with other sequences of token ids, in both directions.
macro_rules! compare_with {
    ($($(const $n:ident)? $other:ty),* $(,)?) => {$(
        impl$(<const $n: usize>)? PartialEq<$other> for Tokens {
            fn eq(&self, other: &$other) -> bool {
                **self == other[..]
            }
        }

        impl$(<const $n: usize>)? PartialEq<Tokens> for $other {
            fn eq(&self, other: &Tokens) -> bool {
                self[..] == **other
            }
        }
    )*};
}

compare_with!([u32], &[u32], Vec<u32>, const N [u32; N], const N &[u32; N]);

/// Copies the ids, because clones may share them.
impl From<Tokens> for Vec<u32> {
    fn from(tokens: Tokens) -> Self {
        tokens.to_vec()
    }
}

impl From<&Tokens> for Vec<u32> {
    fn from(tokens: &Tokens) -> Self {
        tokens.to_vec()
    }
}

impl AsRef<[u32]> for Tokens {
    fn as_ref(&self) -> &[u32] {
        self
    }
}

/// Owned iterator over the ids of [`Tokens`]. Copies nothing.
#[derive(Clone, Debug)]
pub struct TokensIntoIter {
    tokens: Tokens,
    range: Range<usize>,
}

impl Iterator for TokensIntoIter {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        self.range.next().map(|index| self.tokens[index])
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.range.size_hint()
    }
}

impl DoubleEndedIterator for TokensIntoIter {
    fn next_back(&mut self) -> Option<u32> {
        self.range.next_back().map(|index| self.tokens[index])
    }
}

impl ExactSizeIterator for TokensIntoIter {}

impl FusedIterator for TokensIntoIter {}

impl IntoIterator for Tokens {
    type Item = u32;
    type IntoIter = TokensIntoIter;

    fn into_iter(self) -> TokensIntoIter {
        let range = 0..self.len();
        TokensIntoIter { tokens: self, range }
    }
}

impl<'a> IntoIterator for &'a Tokens {
    type Item = &'a u32;
    type IntoIter = std::slice::Iter<'a, u32>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl FromIterator<u32> for Tokens {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        Self(ids.into_iter().collect())
    }
}

impl Serialize for Tokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(bytemuck::cast_slice::<u32, i32>(self))
    }
}

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::<i32>::deserialize(deserializer).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversion_from_vectors_does_not_copy() {
        let ids = vec![5_u32, 6, 7];
        let at = ids.as_ptr();
        let tokens = Tokens::from(ids);
        assert_eq!(tokens.as_ptr(), at);
        assert_eq!(tokens.slice(1..).as_ptr(), tokens[1..].as_ptr());

        let ids = vec![5_i32, -1];
        let at = ids.as_ptr().cast::<u32>();
        assert_eq!(Tokens::from(ids).as_ptr(), at);
    }

    #[test]
    fn tokens_compare_with_and_convert_to_ordinary_sequences() {
        let tokens = Tokens::from([1, 2, 3]);
        let same = vec![1_u32, 2, 3];
        assert_eq!(tokens, same);
        assert_eq!(same, tokens);
        assert_eq!(tokens, same[..]);
        assert_eq!(tokens, &same[..]);
        assert_eq!(tokens, [1, 2, 3]);
        assert_eq!([1, 2, 3], tokens);
        assert_eq!(tokens, &[1, 2, 3]);
        assert!(tokens != [1, 2] && tokens != vec![3, 2, 1]);
        assert_eq!(Vec::<u32>::from(&tokens), same);
        let part = tokens.slice(1..);
        assert_eq!(part.clone().into_iter().len(), 2);
        assert_eq!(part.into_iter().rev().collect::<Vec<_>>(), [3, 2]);
        let mut total = 0;
        for token in tokens {
            total += token;
        }
        assert_eq!(total, 6);
    }
}
