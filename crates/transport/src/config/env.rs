//! [`Env`]: a snapshot of environment variables.

use std::collections::HashMap;
use std::path::PathBuf;

/// Snapshot of environment variables. An empty variable counts as unset.
///
/// ```
/// use tinkex::Env;
///
/// let env = Env::from_pairs([("TINKER_BASE_URL", "http://localhost:8000"), ("TINKER_API_KEY", "")]);
/// assert_eq!(env.get("TINKER_BASE_URL"), Some("http://localhost:8000"));
/// assert_eq!(env.get("TINKER_API_KEY"), None);
/// ```
#[derive(Clone, Default)]
pub struct Env(HashMap<String, String>);

impl Env {
    /// Creates a snapshot without variables.
    #[must_use]
    pub fn empty() -> Self {
        Self::default()
    }

    /// Takes a snapshot of the variables of this process. Variables that are not UTF-8 are ignored.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "all environment variables are read here")]
    pub fn from_process() -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self(std::env::vars_os().filter_map(text).collect())
    }

    /// Creates a snapshot of the given variables.
    pub fn from_pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        Self(pairs.into_iter().map(owned).collect())
    }

    /// Returns a variable, unless it is unset or empty.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Returns a variable, even if it is empty.
    pub fn raw(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Returns the user's home folder.
    pub fn home(&self) -> Option<PathBuf> {
        self.get("HOME").or_else(|| self.get("USERPROFILE")).map(PathBuf::from)
    }
}

/// Returns whether the value of a variable means "on": 1, true, yes or on, in any case.
pub fn is_on(value: &str) -> bool {
    ["1", "true", "yes", "on"].iter().any(|on| value.eq_ignore_ascii_case(on))
}

impl std::fmt::Debug for Env {
    /// Shows the number of variables; names and values may be secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Env").field(&self.0.len()).finish()
    }
}
