//! [`NameFilter`]: selects files by patterns of their names.

/// Selects files by patterns of their names, in which `*` matches any number of characters, `/`
/// included, and `?` matches one character.
///
/// ```
/// use tinkex_files::NameFilter;
///
/// let filter = NameFilter { include: vec!["*.json".to_owned()], exclude: Vec::new() };
/// assert!(filter.selects("config.json") && !filter.selects("README.md"));
/// assert!(NameFilter::default().selects("README.md"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameFilter {
    /// A selected name matches at least one of these patterns. An empty list selects all names.
    pub include: Vec<String>,
    /// A selected name matches none of these patterns.
    pub exclude: Vec<String>,
}

impl NameFilter {
    /// Returns whether the filter selects a name.
    #[must_use]
    pub fn selects(&self, name: &str) -> bool {
        let any =
            |patterns: &[String]| patterns.iter().any(|pattern| matches_pattern(pattern, name));
        (self.include.is_empty() || any(&self.include)) && !any(&self.exclude)
    }

    /// Returns whether the filter has no pattern, so that it selects every name.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.include.is_empty() && self.exclude.is_empty()
    }
}

/// Returns whether `name` matches a glob pattern: `*` matches any number of characters, `/`
/// included, and `?` matches one character.
fn matches_pattern(pattern: &str, name: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    let mut p = 0;
    let mut n = 0;
    // Position of the last `*` in the pattern, and the end of the text that it matches so far.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(character) if *character == '?' || *character == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match &mut star {
                Some((at, end)) => {
                    *end += 1;
                    p = *at + 1;
                    n = *end;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|character| *character == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name) in
            [("*", "x"), ("*.json", "a.json"), ("a?c*", "abcd"), ("*a*b", "xaab"), ("**", "")]
        {
            assert!(matches_pattern(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("*.json", "a.jsonl"), ("a", "ab"), ("?", ""), ("*a", "ab")] {
            assert!(!matches_pattern(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn an_excluded_name_is_not_selected() {
        let patterns = |patterns: &[&str]| patterns.iter().map(|p| (*p).to_owned()).collect();
        let filter = NameFilter { include: patterns(&["a*", "b"]), exclude: patterns(&["*c"]) };
        assert!(["a", "ab", "b"].into_iter().all(|name| filter.selects(name)));
        assert!(!["ac", "c", "bb"].into_iter().any(|name| filter.selects(name)));
        assert!(!filter.is_empty() && NameFilter::default().is_empty());
    }
}
