//! [`RunName`]: the name of a training run, kept in its user metadata.

use std::collections::HashSet;
use std::path::Path;
use std::str::FromStr;

use serde_json::Value;
use tinkex::rest::{AccessScope, TrainingRun};
use tinkex::{JsonObject, ServiceClient};

use crate::context::CommandContext;
use crate::error::CommandError;

use super::{LATEST, run};

/// Keys of the user metadata that may contain the name. `tinkex` writes the first.
const NAME_KEYS: [&str; 3] = ["name", "run_name", "display_name"];
/// Maximum length of a name in bytes.
const MAX_LENGTH: usize = 100;
/// Number of runs of the server whose names a new run must not repeat.
const CHECKED_RUNS: usize = 1000;

/// Name of a run: up to 100 bytes of letters, digits and punctuation, without `/`, `:` and spaces.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RunName(String);

impl FromStr for RunName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() || text.len() > MAX_LENGTH {
            return Err(format!("expected 1 to {MAX_LENGTH} bytes"));
        }
        if text == LATEST {
            return Err("`latest` stands for the newest run; choose another name".to_owned());
        }
        match text.chars().find(|c| !is_allowed(*c)) {
            Some(c) => Err(format!("expected a name without {c:?}")),
            None if text.starts_with(['-', '.']) => {
                Err("expected a name that does not start with - or .".to_owned())
            }
            None => Ok(Self(text.to_owned())),
        }
    }
}

/// Returns whether a name may contain the character. Names are parts of references (`NAME/step-30`)
/// and of folder names.
fn is_allowed(c: char) -> bool {
    !c.is_whitespace() && !c.is_control() && !r#"/\:*?"'<>|`$"#.contains(c)
}

impl RunName {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the default name of a run on a file: the name of the file without its extensions.
    pub(crate) fn of_file(file: &Path) -> Self {
        let file = file.file_name().unwrap_or_default().to_string_lossy();
        let stem = file.split('.').find(|part| !part.is_empty()).unwrap_or_default();
        let plain = |c: char| if is_allowed(c) { c } else { '-' };
        let name: String = stem.chars().map(plain).take(MAX_LENGTH / 4).collect();
        name.trim_matches('-').parse().unwrap_or_else(|_| Self("run".to_owned()))
    }

    /// Returns the name for the `number`th run: `animals`, `animals-2`, …
    fn numbered(&self, number: u32) -> Self {
        match number {
            1 => self.clone(),
            _ => Self(format!("{}-{number}", self.0)),
        }
    }
}

impl std::fmt::Display for RunName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the user metadata of a run with the given name.
pub(crate) fn run_metadata(name: Option<&str>) -> JsonObject {
    name.map(|name| (NAME_KEYS[0].to_owned(), Value::from(name))).into_iter().collect()
}

/// Returns the name of a run, if it has one.
pub(crate) fn name_of(run: &TrainingRun) -> Option<&str> {
    let metadata = run.user_metadata.as_ref()?;
    NAME_KEYS.iter().filter_map(|key| metadata.get(key)).find(|name| !name.trim().is_empty())
}

/// Chooses the name of a new run: `named`, or `default` with the first number for which neither a
/// run or base model of the server nor, according to `is_taken`, a folder exists.
///
/// # Errors
///
/// Returns a usage error if a run or base model of the server has the name `named`.
pub(crate) async fn choose_name(
    context: &CommandContext<'_>,
    service: &ServiceClient,
    named: Option<&RunName>,
    default: &RunName,
    is_taken: impl Fn(&RunName) -> bool,
) -> Result<RunName, CommandError> {
    let models = service.server_capabilities().await?.supported_models;
    let models: Vec<String> = models.into_iter().filter_map(|model| model.model_name).collect();
    let runs = run::list_runs(context, &service.rest(), AccessScope::Owned, CHECKED_RUNS).await?;
    let mut names: HashSet<&str> = runs.iter().filter_map(name_of).collect();
    if let Some(name) = named {
        if models.iter().any(|model| model == name.as_str()) {
            let message = format!("a base model of the server is named {name}");
            return Err(CommandError::usage(message).hint("Pass another --name."));
        }
        if names.contains(name.as_str()) {
            let message = format!("a run named {name} already exists");
            let hint = format!(
                "Pass another --name, resume the run with --resume {name}, or start from its \
                 weights with --from {name}."
            );
            return Err(CommandError::usage(message).hint(hint));
        }
        return Ok(name.clone());
    }
    names.extend(models.iter().map(String::as_str));
    let is_free = |name: &RunName| !names.contains(name.as_str()) && !is_taken(name);
    let mut numbered = (1..).map(|number| default.numbered(number));
    numbered.find(is_free).ok_or_else(|| CommandError::usage("no unused name for the run"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_into_references_and_file_names() {
        for good in ["animals", "animals-2", "größe", "v1.5_b"] {
            assert_eq!(good.parse::<RunName>().unwrap().as_str(), good);
        }
        for bad in ["", "latest", "a/b", "a b", "s:train:0", "-x", "..", &"x".repeat(101)] {
            assert!(bad.parse::<RunName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_default_name_is_that_of_the_file() {
        for (file, name) in [
            ("data/animals.jsonl", "animals"),
            ("animals.jsonl.gz", "animals"),
            ("my data.jsonl", "my-data"),
            ("-", "run"),
            ("latest.jsonl", "run"),
            (".jsonl", "jsonl"),
            ("", "run"),
        ] {
            assert_eq!(RunName::of_file(Path::new(file)).as_str(), name, "{file}");
        }
    }
}
