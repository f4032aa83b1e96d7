//! Text for the built-in model, written by rules.
//!
//! Every word list and every sentence here was written for this project; nothing was taken from a
//! book, a data set or another model, so the text and what is trained on it are under the project's
//! licence. Document `index` of a `seed` is always the same, so a training run can be repeated
//! without storing its text. See `docs/corpus.md`.

mod chat;
mod story;
mod sums;
mod words;

use self::words::CorpusRng;

/// What separates documents, and ends an answer's turn where nothing else does.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// What begins a turn of a conversation; the speaker's name follows.
pub const TURN_START: &str = "<|im_start|>";
/// What ends a turn of a conversation.
pub const TURN_END: &str = "<|im_end|>";
/// The special tokens of the built-in tokenizer, in their order.
pub const SPECIALS: [&str; 3] = [END_OF_TEXT, TURN_START, TURN_END];

/// Document `index` of the text that belongs to `seed`: a story, a conversation, or sums.
///
/// ```
/// use tinkex_engine::corpus::document;
///
/// assert_eq!(document(1, 5), document(1, 5));
/// assert_ne!(document(1, 5), document(1, 6));
/// ```
#[must_use]
pub fn document(seed: u64, index: u64) -> String {
    let mut pen = CorpusRng::new(seed, index);
    match pen.below(10) {
        0..=4 => story::write(&mut pen),
        5..=8 => chat::write(&mut pen),
        _ => sums::write(&mut pen),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn documents_are_many_and_clean() {
        let all: Vec<String> = (0..2000).map(|index| document(7, index)).collect();
        let different: BTreeSet<&String> = all.iter().collect();
        assert!(different.len() > 1900, "{}", different.len());
        for text in &all {
            assert!(text.is_ascii(), "{text}");
            assert!(!text.contains(['{', '}']), "an empty slot: {text}");
            assert!(!text.contains("  "), "two spaces: {text}");
            assert!(!text.contains(END_OF_TEXT));
            assert_eq!(text.trim(), text);
            assert_eq!(text.matches(TURN_START).count(), text.matches(TURN_END).count());
            for vowel in ["a apple", "a orange", "a owl", "a egg", "a umbrella", "an cat"] {
                assert!(!text.contains(&format!(" {vowel}")), "{text}");
            }
            let of_turns = text.starts_with(TURN_START);
            assert!(of_turns || text.ends_with(['.', '!', '"']), "{text}");
        }
        let length: usize = all.iter().map(String::len).sum();
        assert!((100..1200).contains(&(length / all.len())), "{length}");
    }
}
