//! [`TokenizerId`]: the hub repository of a model's tokenizer.

use std::fmt;

use tinkex_transport::error::{Error, ErrorKind, Result};

/// Public repository with the tokenizer of the Llama 3 models, whose own repositories are gated.
const LLAMA_3: &str = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer";

/// Models whose tokenizer is pinned to a repository and a revision: (model, repository, revision).
const PINNED: [(&str, &str, &str); 5] = [
    (
        "moonshotai/Kimi-K2-Thinking",
        "moonshotai/Kimi-K2-Thinking",
        "612681931a8c906ddb349f8ad0f582cb552189cd",
    ),
    ("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.5", KIMI_K2_5),
    ("moonshotai/Kimi-K2.5-Text-Only", "moonshotai/Kimi-K2.5", KIMI_K2_5),
    ("moonshotai/Kimi-K2.6", "moonshotai/Kimi-K2.6", "b5aabbfb20227ed42becbf5541dbffd213942c58"),
    ("moonshotai/Kimi-K3", "moonshotai/Kimi-K3", "f831ab66814297da540d832a5235f8e904f29d06"),
];
/// Revision of the tokenizer of Kimi K2.5.
const KIMI_K2_5: &str = "4d01dfe0332d63057c186e0b262165819efb6611";

/// Prefixes of the names of tokenizers that are not on a hub.
const NOT_ON_A_HUB: [&str; 2] = ["thinkingmachines/", "TML/"];

/// A tokenizer on a hub: a repository, and optionally a revision of it.
///
/// ```
/// use tinkex_hub::TokenizerId;
///
/// let id = TokenizerId::of_model("Qwen/Qwen3-8B:peft:131072", None)?;
/// assert_eq!(id.repo(), "Qwen/Qwen3-8B");
/// assert_eq!(id.revision(), None);
/// # Ok::<_, tinkex_transport::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TokenizerId {
    repo: String,
    revision: Option<String>,
}

impl TokenizerId {
    /// Creates the id of a repository at its main revision.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if `repo` has characters that no repository name can have.
    pub fn new(repo: impl Into<String>) -> Result<Self> {
        let repo = repo.into();
        check_name(&repo)?;
        Ok(Self { repo, revision: None })
    }

    /// Selects a revision: a branch, a tag or a commit.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if `revision` has characters that no revision can have.
    pub fn at(mut self, revision: impl Into<String>) -> Result<Self> {
        let revision = revision.into();
        if !Self::is_revision(&revision) {
            let message = format!("invalid revision {revision:?} of {}", self.repo);
            return Err(Error::new(ErrorKind::InvalidInput, message)
                .with_hint("Pass the name of a branch or tag, or a commit."));
        }
        self.revision = Some(revision);
        Ok(self)
    }

    pub(crate) fn is_revision(text: &str) -> bool {
        text.split('/').all(is_segment)
    }

    /// Returns the id of a model's tokenizer: `named_by_server` if set, else the tokenizer that the
    /// name of the model determines.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if that tokenizer is not on a hub, or the name is invalid.
    pub fn of_model(model_name: &str, named_by_server: Option<&str>) -> Result<Self> {
        let name = before_colon(model_name);
        let id = match named_by_server {
            Some(id) => id,
            None if name.starts_with("meta-llama/Llama-3") => LLAMA_3,
            None => match *name.split('/').collect::<Vec<_>>() {
                [org, model, _variant] => &name[..=org.len() + model.len()],
                _ => name,
            },
        };
        if NOT_ON_A_HUB.iter().any(|prefix| id.starts_with(prefix)) {
            let message = format!("the tokenizer {id:?} of {model_name:?} is not on a hub");
            let hint = "Load it from a folder with Tokenizer::from_folder, or pass token ids.";
            return Err(Error::new(ErrorKind::InvalidInput, message).with_hint(hint));
        }
        if let Some((_, repo, revision)) = PINNED.iter().find(|(model, ..)| *model == id) {
            return Self::new(*repo)?.at(*revision);
        }
        Self::new(id)
    }

    /// Returns the repository, such as `Qwen/Qwen3-8B`.
    #[must_use]
    pub fn repo(&self) -> &str {
        &self.repo
    }

    /// Returns the revision, unless it is the main one.
    #[must_use]
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }
}

impl fmt::Display for TokenizerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        match &self.revision {
            Some(revision) => write!(f, "@{revision}"),
            None => Ok(()),
        }
    }
}

/// Returns a model name without the suffix that servers append after a colon.
pub fn before_colon(name: &str) -> &str {
    name.split(':').next().unwrap_or(name)
}

/// Checks that a name is safe as part of a path and of a URL. Does not check that the repository
/// exists.
fn check_name(name: &str) -> Result<()> {
    if name.split('/').all(is_segment) {
        return Ok(());
    }
    let message = format!("invalid tokenizer name {name:?}");
    let hint = "Pass a name such as Qwen/Qwen3-8B, or a folder with a tokenizer.json.";
    Err(Error::new(ErrorKind::InvalidInput, message).with_hint(hint))
}

/// Returns whether a text is safe as one segment of a path and of a URL.
fn is_segment(text: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-:+".contains(c);
    !text.is_empty() && text.len() <= 200 && !text.starts_with('.') && text.chars().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    /// Covers T5.2.1, T5.2.2, T5.2.3.
    #[test]
    fn models_have_the_same_tokenizers_as_in_the_python_sdk() {
        for case in fixture::cases("tokenizer_id.json") {
            let named = case["tokenizer_id_from_server"].as_str();
            let id = TokenizerId::of_model(case["model_name"].as_str().unwrap(), named);
            if case.get("error").is_some() {
                let error = id.expect_err("the fixture expects an error");
                assert_eq!(error.kind(), ErrorKind::InvalidInput, "{case}");
                assert!(error.hint().unwrap().as_str().contains("folder"));
                continue;
            }
            let id = id.unwrap();
            assert_eq!(case["tokenizer_id"], *id.repo(), "{case}");
            assert_eq!(case["revision"].as_str(), id.revision(), "{case}");
        }
    }

    #[test]
    fn names_that_are_unsafe_in_paths_and_urls_are_rejected() {
        for name in ["", "../etc", "a/../b", "/etc", "a//b", "a b", "a/b?x=1", "a\\b", ".hidden"] {
            assert!(TokenizerId::new(name).is_err(), "{name:?}");
            assert!(TokenizerId::new("a/b").unwrap().at(name).is_err(), "{name:?}");
        }
        assert_eq!(TokenizerId::new("a/b").unwrap().at("v1").unwrap().to_string(), "a/b@v1");
    }
}
