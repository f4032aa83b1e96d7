//! [`StopConditions`]: tokens and strings that end a completion.

use std::sync::Arc;

use crate::{Error, Result};

/// Tokens and strings that end a completion.
///
/// Strings are matched on the bytes of the tokens, so that a match may start inside one token and
/// end inside another. The prompt is not searched. Cheap to clone.
///
/// ```
/// use tinkex_engine::decode::StopConditions;
///
/// let stop = StopConditions::new([2], ["\n\n"])?;
/// let mut matcher = stop.matcher();
/// assert!(!matcher.push(10, b"one\n"));
/// assert!(matcher.push(11, b"\ntwo"));
/// # Ok::<_, tinkex_engine::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct StopConditions(Arc<StopSet>);

#[derive(Debug, Default)]
struct StopSet {
    tokens: Vec<u32>,
    strings: Vec<StopString>,
}

/// A stop string with its Knuth-Morris-Pratt failure function.
#[derive(Debug)]
struct StopString {
    bytes: Vec<u8>,
    /// For every prefix of `bytes`, the length of its longest proper prefix that is also a suffix.
    borders: Vec<usize>,
}

impl StopConditions {
    /// Creates stop conditions from tokens and strings.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a string is empty.
    pub fn new<T: AsRef<[u8]>>(
        tokens: impl IntoIterator<Item = u32>,
        strings: impl IntoIterator<Item = T>,
    ) -> Result<Self> {
        let mut inner = StopSet { tokens: tokens.into_iter().collect(), strings: Vec::new() };
        for string in strings {
            let bytes = string.as_ref().to_vec();
            if bytes.is_empty() {
                return Err(Error::invalid("stop", "a stop string must not be empty"));
            }
            inner.strings.push(StopString { borders: borders(&bytes), bytes });
        }
        Ok(Self(Arc::new(inner)))
    }

    /// Returns whether there are stop strings, for which [`StopMatcher::push`] needs the bytes of
    /// tokens.
    #[must_use]
    pub fn reads_bytes(&self) -> bool {
        !self.0.strings.is_empty()
    }

    /// Creates a matcher for one completion.
    #[must_use]
    pub fn matcher(&self) -> StopMatcher {
        StopMatcher { stop: self.clone(), matched: vec![0; self.0.strings.len()] }
    }
}

/// Matches the tokens of one completion against [`StopConditions`].
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stop: StopConditions,
    /// For each stop string, the length of its longest prefix that is a suffix of the bytes so far.
    matched: Vec<usize>,
}

impl StopMatcher {
    /// Adds the next token and its bytes. Returns whether the completion ends with it.
    pub fn push(&mut self, token: u32, bytes: &[u8]) -> bool {
        let mut ends = self.stop.0.tokens.contains(&token);
        for (string, matched) in self.stop.0.strings.iter().zip(&mut self.matched) {
            for &byte in bytes {
                if *matched == string.bytes.len() {
                    *matched = string.borders[*matched - 1];
                }
                *matched = extend(&string.bytes, &string.borders, *matched, byte);
                ends |= *matched == string.bytes.len();
            }
        }
        ends
    }
}

/// Returns the Knuth-Morris-Pratt failure function of `bytes`, which must not be empty.
fn borders(bytes: &[u8]) -> Vec<usize> {
    let mut all = vec![0];
    for &byte in &bytes[1..] {
        let last = all[all.len() - 1];
        let next = extend(bytes, &all, last, byte);
        all.push(next);
    }
    all
}

/// Returns the length of the matched prefix of `bytes` after one more byte.
fn extend(bytes: &[u8], borders: &[usize], mut matched: usize, byte: u8) -> usize {
    while matched > 0 && bytes[matched] != byte {
        matched = borders[matched - 1];
    }
    matched + usize::from(bytes[matched] == byte)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_empty_string_is_refused() {
        assert!(matches!(StopConditions::new([], [""]), Err(Error::Invalid { .. })));
        assert!(!StopConditions::default().matcher().push(0, b"x"));
        assert!(!StopConditions::default().reads_bytes());
    }

    #[test]
    fn a_stop_token_matches_without_bytes() {
        let mut matcher = StopConditions::new([7, 9], [] as [&str; 0]).unwrap().matcher();
        assert_eq!([1, 7, 9].map(|token| matcher.push(token, b"")), [false, true, true]);
    }

    proptest! {
        /// The matcher agrees with a search of the whole text, however it is divided into tokens.
        #[test]
        fn strings_are_found_across_tokens(
            texts in prop::collection::vec("[ab]{1,5}", 1..4),
            parts in prop::collection::vec("[ab]{0,4}", 0..20),
        ) {
            let mut matcher = StopConditions::new([], &texts).unwrap().matcher();
            let mut whole = String::new();
            for part in parts {
                let before = whole.len();
                whole.push_str(&part);
                let want = texts.iter().any(|text| {
                    let ends_here = |at: usize| at + text.len() > before;
                    let is_at = |at: usize| whole[at..].starts_with(text.as_str());
                    (0..whole.len()).any(|at| is_at(at) && ends_here(at))
                });
                prop_assert_eq!(matcher.push(0, part.as_bytes()), want, "{} in {}", part, whole);
            }
        }
    }
}
