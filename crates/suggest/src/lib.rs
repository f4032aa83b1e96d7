//! Suggests existing names for a misspelt name.
//!
//! ```
//! use tinkex_suggest::nearest_names;
//!
//! let runs = ["animals", "animals-2", "poems"];
//! assert_eq!(nearest_names("Animls", runs), ["animals", "animals-2"]);
//! ```

#![forbid(unsafe_code)]

/// Maximum number of suggestions.
const MAX_SUGGESTIONS: usize = 3;
/// Maximum number of characters of a name that are compared, because the time of a comparison is
/// quadratic in the number of characters.
const MAX_COMPARED: usize = 200;

/// Returns the names that are most similar to `name`, nearest first, at most three.
///
/// Leaves out names whose edit distance from `name` exceeds half of the characters of the longer
/// of the two names. Ignores the case of letters.
pub fn nearest_names<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let comparable = |name: &str| -> Vec<char> {
        name.chars().take(MAX_COMPARED).flat_map(char::to_lowercase).collect()
    };
    let wanted = comparable(name);
    let mut ranked: Vec<(usize, &str)> = names
        .into_iter()
        .filter_map(|other| {
            let candidate = comparable(other);
            let distance = strsim::generic_levenshtein(&wanted, &candidate);
            let is_similar = distance <= wanted.len().max(candidate.len()) / 2;
            is_similar.then_some((distance, other))
        })
        .collect();
    ranked.sort_unstable();
    ranked.into_iter().take(MAX_SUGGESTIONS).map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_names_are_suggested_nearest_first() {
        let names = ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "tinkex/tiny"];
        assert_eq!(nearest_names("qwen/qwen3-8b", names), ["Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"]);
        assert_eq!(nearest_names("tinkex-tiny", names), ["tinkex/tiny"]);
    }

    #[test]
    fn names_that_differ_in_most_characters_are_not_suggested() {
        let names = ["Qwen/Qwen3-8B", "tinkex/tiny"];
        assert!(nearest_names("tiny", names).is_empty());
        assert!(nearest_names("gpt-4", names).is_empty());
    }

    #[test]
    fn at_most_three_names_are_suggested() {
        let names = ["run-1", "run-2", "run-3", "run-4"];
        assert_eq!(nearest_names("run-0", names), ["run-1", "run-2", "run-3"]);
    }
}
