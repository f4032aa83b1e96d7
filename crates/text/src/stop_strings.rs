//! [`StopStrings`]: finds stop strings in a text that arrives in pieces.

use std::sync::Arc;

/// Searches a text for the first stop string, and withholds text that could be the start of one.
///
/// The match that ends first wins, and of several such matches the longest, so that the result does
/// not depend on how the text is divided into pieces.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopStrings {
    /// Shared with clones: all completions of a request have the same stop strings.
    strings: Arc<[StopString]>,
    /// For each string, the length in bytes of its longest prefix that is a suffix of the text so
    /// far.
    matched: Vec<usize>,
    /// Text that could be the start of a stop string: as long as the longest partial match.
    withheld: String,
    /// Index of the stop string that was found.
    found: Option<usize>,
}

#[derive(Debug)]
struct StopString {
    text: String,
    /// Knuth-Morris-Pratt failure function: for every prefix of the text, the length in bytes of
    /// its longest proper prefix that is also a suffix.
    borders: Vec<usize>,
}

impl StopStrings {
    /// Creates a search. Empty strings are ignored: they would match before the first character.
    pub(crate) fn new(strings: impl IntoIterator<Item = String>) -> Self {
        let strings = strings.into_iter().filter(|text| !text.is_empty());
        let strings: Arc<[StopString]> = strings.map(StopString::new).collect();
        Self { matched: vec![0; strings.len()], strings, ..Self::default() }
    }

    /// Returns the stop string that was found.
    pub(crate) fn found(&self) -> Option<&str> {
        Some(&self.strings[self.found?].text)
    }

    /// Adds text; returns what is certain not to belong to a stop string. After a stop string
    /// nothing is returned.
    pub(crate) fn push(&mut self, piece: String) -> String {
        if self.found.is_some() {
            return String::new();
        }
        if self.strings.is_empty() || piece.is_empty() {
            return piece;
        }
        let before = self.withheld.len();
        let mut text = std::mem::take(&mut self.withheld);
        text.push_str(&piece);
        for (at, byte) in piece.bytes().enumerate() {
            let end = before + at + 1;
            let mut longest: Option<(usize, usize)> = None;
            for (index, (string, matched)) in self.strings.iter().zip(&mut self.matched).enumerate()
            {
                let len = string.text.len();
                *matched = extend(string.text.as_bytes(), &string.borders, *matched, byte);
                if *matched == len && longest.is_none_or(|(other, _)| other < len) {
                    longest = Some((len, index));
                }
            }
            if let Some((len, index)) = longest {
                self.found = Some(index);
                // A partial match is withheld, so a match never starts in text already returned.
                text.truncate(end.saturating_sub(len));
                return text;
            }
        }
        let partial = self.matched.iter().copied().max().unwrap_or(0);
        // A partial match starts at a character boundary, as stop strings do.
        self.withheld = text.split_off(text.len().saturating_sub(partial));
        text
    }

    /// Returns the text that was withheld, once no more text follows.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.withheld)
    }
}

impl StopString {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut borders = vec![0; bytes.len()];
        for at in 1..bytes.len() {
            borders[at] = extend(bytes, &borders, borders[at - 1], bytes[at]);
        }
        Self { text, borders }
    }
}

/// Returns the length of the matched prefix of `bytes` after one more byte. `matched` is less than
/// the number of bytes.
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

    /// Returns the text before the first stop string, and the stop string.
    fn search(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let mut search = StopStrings::new(stops.iter().map(|stop| (*stop).to_owned()));
        let mut text: String =
            pieces.iter().map(|piece| search.push((*piece).to_owned())).collect();
        text.push_str(&search.finish());
        (text, search.found().map(str::to_owned))
    }

    #[test]
    fn text_that_could_be_the_start_of_a_stop_string_waits() {
        let mut stops = StopStrings::new(["</end>".to_owned(), "\n\n".to_owned()]);
        let pieces = ["a <", "/", "e", "x\n", "b</end", ">c"];
        let returned = pieces.map(|piece| stops.push(piece.to_owned()));
        assert_eq!(returned, ["a ", "", "", "</ex", "\nb", ""]);
        assert_eq!(stops.finish(), "");
        assert_eq!(stops.found(), Some("</end>"));
    }

    #[test]
    fn withheld_text_is_returned_at_the_end() {
        assert_eq!(search(&["stop"], &["a st", "o"]), ("a sto".to_owned(), None));
        assert_eq!(
            search(&["", "x"], &["a"]),
            ("a".to_owned(), None),
            "an empty string is ignored"
        );
    }

    #[test]
    fn of_overlapping_stop_strings_the_one_that_ends_first_wins() {
        for pieces in [&["xabcd"][..], &["xabc", "d"], &["x", "a", "b", "c", "d"]] {
            let found = search(&["abcd", "bc"], pieces);
            assert_eq!(found, ("xa".to_owned(), Some("bc".to_owned())), "{pieces:?}");
            let found = search(&["c", "abc", "bc"], pieces);
            assert_eq!(found, ("x".to_owned(), Some("abc".to_owned())), "{pieces:?}");
        }
    }

    proptest! {
        /// The text before the stop string does not depend on the division into pieces: a search of
        /// the whole text finds the same one.
        #[test]
        fn pieces_do_not_change_the_result(
            stops in prop::collection::vec("[abé]{1,4}", 1..4),
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let whole = pieces.concat();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let first = stops
                .iter()
                .filter_map(|stop| Some((whole.find(stop)? + stop.len(), stop.len())))
                .min_by_key(|(end, len)| (*end, usize::MAX - len));
            let expected = first.map_or(&*whole, |(end, len)| &whole[..end - len]);
            let (text, found) = search(&stops, &pieces);
            prop_assert_eq!(&text, expected);
            prop_assert_eq!(found.is_some(), first.is_some());
            prop_assert_eq!(search(&stops, &[&whole]), (text, found));
        }
    }
}
