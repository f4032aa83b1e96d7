//! Suggestions for names that do not exist.

/// Maximum number of suggestions.
const MAX_SUGGESTIONS: usize = 3;
/// Maximum number of characters of a name that are compared. The time of a comparison is quadratic.
const MAX_COMPARED: usize = 200;

/// Returns the names that are most similar to `name`, nearest first: at most three, and none that
/// differs in more than half of its characters. The case of letters does not matter.
pub(super) fn nearest_names<'a>(
    name: &str,
    names: impl IntoIterator<Item = &'a str>,
) -> Vec<&'a str> {
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
        let known = ["animals", "animals-2", "poems"];
        assert_eq!(nearest_names("Animls", known), ["animals", "animals-2"]);
        assert!(nearest_names("haiku", known).is_empty());
    }
}
