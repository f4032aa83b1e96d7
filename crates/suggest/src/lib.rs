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

/// Maximum edit distance of a misspelt name.
const MAX_MISSPELLING: usize = 2;

/// Returns the name of which `name` is a misspelling, if there is one: a name whose edit distance
/// from `name` is at most 2 and at most a third of the characters of the longer of the two. Ignores
/// the case of letters.
///
/// Unlike [`nearest_names`], finds no name that only resembles `name`, so that a program can reject
/// `name` for it.
///
/// ```
/// use tinkex_suggest::misspelt_name;
///
/// let inputs = ["target_tokens", "weights"];
/// assert_eq!(misspelt_name("weight", inputs), Some("weights"));
/// assert_eq!(misspelt_name("mask", inputs), None);
/// ```
pub fn misspelt_name<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let nearest = nearest_names(name, names).into_iter().next()?;
    let [wanted, candidate] = [comparable(name), comparable(nearest)];
    let distance = strsim::generic_levenshtein(&wanted, &candidate);
    let max = MAX_MISSPELLING.min(wanted.len().max(candidate.len()) / 3);
    (distance <= max).then_some(nearest)
}

/// Returns the names that are most similar to `name`, nearest first, at most three.
///
/// Leaves out names whose edit distance from `name` exceeds half of the characters of the longer
/// of the two names. Ignores the case of letters.
pub fn nearest_names<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
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

/// Returns the start of a name in lower case.
fn comparable(name: &str) -> Vec<char> {
    name.chars().take(MAX_COMPARED).flat_map(char::to_lowercase).collect()
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
    fn a_misspelt_name_differs_in_at_most_two_characters() {
        let inputs = ["target_tokens", "weights", "logprobs", "advantages"];
        for (name, expected) in [
            ("weight", Some("weights")),
            ("Weights", Some("weights")),
            ("wieghts", Some("weights")),
            ("log_probs", Some("logprobs")),
            ("target_token", Some("target_tokens")),
            ("targets", None),
            ("logits", None),
            ("ref_logprobs", None),
            ("rewards", None),
            ("mask", None),
            ("", None),
        ] {
            assert_eq!(misspelt_name(name, inputs), expected, "{name}");
        }
        assert_eq!(misspelt_name("a", ["b"]), None, "two short names");
    }

    #[test]
    fn at_most_three_names_are_suggested() {
        let names = ["run-1", "run-2", "run-3", "run-4"];
        assert_eq!(nearest_names("run-0", names), ["run-1", "run-2", "run-3"]);
    }
}
