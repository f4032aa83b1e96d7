//! [`Env`]: the environment, as it was.

use std::collections::HashMap;
use std::path::PathBuf;

/// A snapshot of environment variables.
///
/// An empty variable counts as unset.
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
    /// No variables at all.
    #[must_use]
    pub fn empty() -> Self {
        Self::default()
    }

    /// The variables of this process, as they are now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
    pub fn of_process() -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self(std::env::vars_os().filter_map(text).collect())
    }

    /// These variables and no others.
    pub fn from_pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        Self(pairs.into_iter().map(owned).collect())
    }

    /// A variable, unless it is unset or empty.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// A variable that is set, even to nothing.
    pub(crate) fn raw(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// The user's home folder.
    pub(crate) fn home(&self) -> Option<PathBuf> {
        self.get("HOME").or_else(|| self.get("USERPROFILE")).map(PathBuf::from)
    }
}

impl std::fmt::Debug for Env {
    /// Names the variables without what is in them.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Env").field(&self.0.len()).finish()
    }
}
