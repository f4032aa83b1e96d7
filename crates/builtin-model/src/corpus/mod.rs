//! Generates the training text of the built-in model by rules.
//!
//! All word lists and sentences were written for this project; none was taken from a book, a data
//! set or another model. The text and models trained on it are therefore under the project's
//! licence. A document is determined by its seed and index, so a training run can be repeated
//! without storing the text. See `docs/corpus.md`.

mod chat;
mod story;
mod sums;
mod words;

use self::words::CorpusRng;

/// Special token that separates documents.
pub(crate) const END_OF_TEXT: &str = "<|endoftext|>";
/// Special token that starts a message of a conversation; the role follows.
pub(crate) const TURN_START: &str = "<|im_start|>";
/// Special token that ends a message of a conversation.
pub(crate) const TURN_END: &str = "<|im_end|>";
/// Special tokens of the built-in tokenizer, in the order of their token ids.
pub(crate) const SPECIALS: [&str; 3] = [END_OF_TEXT, TURN_START, TURN_END];

/// Seed of the corpus on which the built-in model was trained.
pub(crate) const SEED: u64 = 1;

/// Returns the first `count` documents of the corpus of the built-in model.
pub(crate) fn documents(count: u64) -> impl Iterator<Item = String> {
    (0..count).map(|index| document(SEED, index))
}

/// Returns document `index` of the corpus of `seed`: a story, a conversation, or arithmetic.
pub(crate) fn document(seed: u64, index: u64) -> String {
    let mut rng = CorpusRng::new(seed, index);
    match rng.below(10) {
        0..=4 => story::write(&mut rng),
        5..=8 => chat::write(&mut rng),
        _ => sums::write(&mut rng),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_document_is_determined_by_its_seed_and_index() {
        assert_eq!(document(1, 5), document(1, 5));
        assert_ne!(document(1, 5), document(1, 6));
        assert_ne!(document(1, 5), document(2, 5));
    }

    #[test]
    fn documents_are_diverse_and_well_formed() {
        let all: Vec<String> = (0..2000).map(|index| document(7, index)).collect();
        let different: BTreeSet<&String> = all.iter().collect();
        assert!(different.len() > 1900, "{}", different.len());
        for text in &all {
            assert!(text.is_ascii(), "{text}");
            assert!(!text.contains(['{', '}']), "a slot was not filled in: {text}");
            assert!(!text.contains("  "), "two spaces: {text}");
            assert!(!text.contains(END_OF_TEXT));
            assert_eq!(text.trim(), text);
            assert_eq!(text.matches(TURN_START).count(), text.matches(TURN_END).count());
            for wrong in ["a apple", "a orange", "a owl", "a egg", "a umbrella", "an cat"] {
                assert!(!text.contains(&format!(" {wrong}")), "{text}");
            }
            let is_conversation = text.starts_with(TURN_START);
            assert!(is_conversation || text.ends_with(['.', '!', '"']), "{text}");
        }
        let length: usize = all.iter().map(String::len).sum();
        assert!((100..1200).contains(&(length / all.len())), "{length}");
    }
}
