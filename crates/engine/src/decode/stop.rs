//! When a continuation ends.

use std::sync::Arc;

use crate::{Error, Result};

/// What ends a continuation: tokens, and texts.
///
/// Cheap to clone. Texts are matched on the bytes of tokens, so one may begin inside a token and
/// end inside another; what was in the prompt does not count.
///
/// ```
/// use tinkex_engine::decode::StopConditions;
///
/// let stop = StopConditions::new([2], ["\n\n"])?;
/// let mut ends = stop.matcher();
/// assert!(!ends.push(10, b"one\n"));
/// assert!(ends.push(11, b"\ntwo"));
/// # Ok::<_, tinkex_engine::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct StopConditions(Arc<StopSet>);

#[derive(Debug, Default)]
struct StopSet {
    tokens: Vec<u32>,
    texts: Vec<StopText>,
}

/// A text, with the length of the longest beginning that each of its beginnings ends with.
#[derive(Debug)]
struct StopText {
    bytes: Vec<u8>,
    borders: Vec<usize>,
}

impl StopConditions {
    /// Ends at any of these tokens and after any of these texts.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an empty text: it would end everything before it began.
    pub fn new<T: AsRef<[u8]>>(
        tokens: impl IntoIterator<Item = u32>,
        texts: impl IntoIterator<Item = T>,
    ) -> Result<Self> {
        let mut inner = StopSet { tokens: tokens.into_iter().collect(), texts: Vec::new() };
        for text in texts {
            let bytes = text.as_ref().to_vec();
            if bytes.is_empty() {
                return Err(Error::invalid("stop", "an empty text cannot be waited for"));
            }
            inner.texts.push(StopText { borders: borders(&bytes), bytes });
        }
        Ok(Self(Arc::new(inner)))
    }

    /// Whether it waits for texts, so that tokens have to be turned into bytes.
    #[must_use]
    pub fn reads_bytes(&self) -> bool {
        !self.0.texts.is_empty()
    }

    /// Watches one continuation.
    #[must_use]
    pub fn matcher(&self) -> StopMatcher {
        StopMatcher { stop: self.clone(), matched: vec![0; self.0.texts.len()] }
    }
}

/// Watches one continuation for a [`StopConditions`].
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stop: StopConditions,
    /// How much of each text the bytes so far end with.
    matched: Vec<usize>,
}

impl StopMatcher {
    /// Takes in the next token and its bytes; true if the continuation ends here.
    pub fn push(&mut self, token: u32, bytes: &[u8]) -> bool {
        let mut ends = self.stop.0.tokens.contains(&token);
        for (text, matched) in self.stop.0.texts.iter().zip(&mut self.matched) {
            for &byte in bytes {
                if *matched == text.bytes.len() {
                    *matched = text.borders[*matched - 1];
                }
                *matched = extend(&text.bytes, &text.borders, *matched, byte);
                ends |= *matched == text.bytes.len();
            }
        }
        ends
    }
}

/// The border of every beginning of `bytes`.
fn borders(bytes: &[u8]) -> Vec<usize> {
    let mut all = vec![0];
    for &byte in &bytes[1..] {
        let last = all[all.len() - 1];
        let next = extend(bytes, &all, last, byte);
        all.push(next);
    }
    all
}

/// How much of `bytes` is matched after one more byte.
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
    fn an_empty_text_is_refused() {
        assert!(matches!(StopConditions::new([], [""]), Err(Error::Invalid { .. })));
        assert!(!StopConditions::default().matcher().push(0, b"x"));
        assert!(!StopConditions::default().reads_bytes());
    }

    #[test]
    fn a_token_ends_it_whatever_its_bytes() {
        let mut ends = StopConditions::new([7, 9], [] as [&str; 0]).unwrap().matcher();
        assert_eq!([1, 7, 9].map(|token| ends.push(token, b"")), [false, true, true]);
    }

    proptest! {
        /// Cut into tokens in any way, the end is where a search of the whole text finds it.
        #[test]
        fn texts_are_found_across_tokens(
            texts in prop::collection::vec("[ab]{1,5}", 1..4),
            parts in prop::collection::vec("[ab]{0,4}", 0..20),
        ) {
            let mut ends = StopConditions::new([], &texts).unwrap().matcher();
            let mut whole = String::new();
            for part in parts {
                let before = whole.len();
                whole.push_str(&part);
                let want = texts.iter().any(|text| {
                    (0..whole.len()).any(|at| whole[at..].starts_with(text.as_str()) && at + text.len() > before)
                });
                prop_assert_eq!(ends.push(0, part.as_bytes()), want, "{} in {}", part, whole);
            }
        }
    }
}
