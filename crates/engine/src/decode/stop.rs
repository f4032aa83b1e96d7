//! [`StopConditions`]: tokens and strings that end a completion.

use std::sync::Arc;

use aho_corasick::Anchored;
use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::contiguous::NFA;

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
    /// Tokens in ascending order.
    tokens: Vec<u32>,
    /// Aho-Corasick automaton of the strings, if there are any. Each completion needs only one state
    /// of it, however many strings there are.
    strings: Option<NFA>,
}

impl StopConditions {
    /// Creates stop conditions from tokens and strings.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a string is empty, or the strings are too large for an automaton.
    pub fn new<T: AsRef<[u8]>>(
        tokens: impl IntoIterator<Item = u32>,
        strings: impl IntoIterator<Item = T>,
    ) -> Result<Self> {
        let mut tokens: Vec<u32> = tokens.into_iter().collect();
        tokens.sort_unstable();
        tokens.dedup();
        let strings: Vec<T> = strings.into_iter().collect();
        if strings.iter().any(|string| string.as_ref().is_empty()) {
            return Err(Error::invalid("stop", "a stop string must not be empty"));
        }
        let strings = if strings.is_empty() {
            None
        } else {
            let automaton = NFA::new(&strings);
            Some(automaton.map_err(|error| Error::invalid("stop", error.to_string()))?)
        };
        Ok(Self(Arc::new(StopSet { tokens, strings })))
    }

    /// Returns whether there are stop strings, for which [`StopMatcher::push`] needs the bytes of
    /// tokens.
    #[must_use]
    pub fn reads_bytes(&self) -> bool {
        self.0.strings.is_some()
    }

    /// Returns the memory of the conditions in bytes. Clones and matchers share it.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let strings = self.0.strings.as_ref().map_or(0, Automaton::memory_usage);
        self.0.tokens.len() * size_of::<u32>() + strings
    }

    /// Creates a matcher for one completion.
    #[must_use]
    pub fn matcher(&self) -> StopMatcher {
        let start = |strings: &NFA| strings.start_state(Anchored::No).unwrap_or_default();
        StopMatcher { state: self.0.strings.as_ref().map(start), stop: self.clone() }
    }
}

/// Matches the tokens of one completion against [`StopConditions`].
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stop: StopConditions,
    /// State of the automaton after the bytes so far.
    state: Option<StateID>,
}

impl StopMatcher {
    /// Adds the next token and its bytes. Returns whether the completion ends with it.
    pub fn push(&mut self, token: u32, bytes: &[u8]) -> bool {
        let mut ends = self.stop.0.tokens.binary_search(&token).is_ok();
        if let Some(strings) = &self.stop.0.strings
            && let Some(state) = &mut self.state
        {
            for &byte in bytes {
                *state = strings.next_state(Anchored::No, *state, byte);
                ends |= strings.is_match(*state);
            }
        }
        ends
    }
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
