//! Suggestions for names that do not exist.

/// Maximum number of suggestions.
const MAX_SUGGESTIONS: usize = 3;
/// Maximum number of characters of a name that are compared.
const MAX_COMPARED: usize = 200;

/// Returns the names that are most similar to `name`, nearest first: at most three, and none that
/// differs in more than half of its characters.
///
/// ```
/// let known = ["animals", "animals-2", "poems"];
/// assert_eq!(tinkex_text::nearest_names("animls", known), ["animals", "animals-2"]);
/// ```
pub fn nearest_names<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let wanted = comparable(name);
    let mut ranked: Vec<(usize, &str)> = names
        .into_iter()
        .filter_map(|other| {
            let candidate = comparable(other);
            let distance = edit_distance(&wanted, &candidate);
            let similar = distance <= wanted.len().max(candidate.len()) / 2;
            similar.then_some((distance, other))
        })
        .collect();
    ranked.sort_unstable();
    ranked.into_iter().take(MAX_SUGGESTIONS).map(|(_, name)| name).collect()
}

fn comparable(name: &str) -> Vec<char> {
    name.chars().take(MAX_COMPARED).flat_map(char::to_lowercase).collect()
}

/// Returns the Levenshtein distance: the number of insertions, deletions and substitutions.
fn edit_distance(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_names_are_suggested_nearest_first() {
        let names = ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "tinkex/tiny"];
        let suggestions = |name: &str| nearest_names(name, names);
        assert_eq!(suggestions("qwen/qwen3-8b"), ["Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"]);
        assert!(suggestions("tiny").is_empty());
        assert_eq!(suggestions("tinkex-tiny"), ["tinkex/tiny"]);
        assert!(suggestions("gpt-4").is_empty());
        assert_eq!(edit_distance(&comparable("kitten"), &comparable("sitting")), 3);
    }
}
