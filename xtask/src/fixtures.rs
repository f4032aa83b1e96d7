//! Origin of the files under `fixtures`, as `fixtures/README.md` states it.
//!
//! The first row of its table whose pattern matches a file says what writes the file: a program of
//! the repository, or `by hand`.

use std::fs;
use std::path::Path;

use crate::step::{XtaskError, root};

pub(crate) const FOLDER: &str = "fixtures";
const DOCUMENT: &str = "fixtures/README.md";
const BY_HAND: &str = "by hand";

/// Row of the table.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Path relative to `fixtures`; `*` stands for any characters except `/`.
    pub(crate) pattern: String,
    /// Path of the program that writes the files, or `None` for files that are written by hand.
    pub(crate) program: Option<String>,
}

/// Reads the table.
pub(crate) fn origins() -> Result<Vec<Origin>, XtaskError> {
    let text = fs::read_to_string(root().join(DOCUMENT))
        .map_err(|error| XtaskError::new(format!("cannot read {DOCUMENT}: {error}")))?;
    parse(&text)
}

fn parse(document: &str) -> Result<Vec<Origin>, XtaskError> {
    let rows = document.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let invalid = || XtaskError::new(format!("{DOCUMENT}: invalid row: {row}"));
        let mut cells = row.split('|').skip(1).map(str::trim);
        let mut code = || cells.next()?.strip_prefix('`')?.strip_suffix('`').map(str::to_owned);
        let pattern = code().ok_or_else(invalid)?;
        let writer = row.split('|').nth(2).map(str::trim).ok_or_else(invalid)?;
        let program = match writer {
            BY_HAND => None,
            program => Some(program.trim_matches('`').to_owned()),
        };
        Ok(Origin { pattern, program })
    })
    .collect()
}

/// Returns the origin of a file, whose path is relative to `fixtures`.
pub(crate) fn origin<'a>(origins: &'a [Origin], path: &str) -> Option<&'a Origin> {
    origins.iter().find(|origin| matches(&origin.pattern, path))
}

/// Returns whether `pattern` matches all of `path`.
fn matches(pattern: &str, path: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else {
        return pattern == path;
    };
    let Some(path) = path.strip_prefix(start) else {
        return false;
    };
    let end = path.find('/').unwrap_or(path.len());
    (0..=end).filter(|at| path.is_char_boundary(*at)).any(|at| matches(rest, &path[at..]))
}

/// Returns the paths of all files under a folder, relative to it, in order.
pub(crate) fn files(folder: &Path) -> Result<Vec<String>, XtaskError> {
    let failed = |error| XtaskError::new(format!("cannot read {}: {error}", folder.display()));
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            found.extend(files(&path)?.into_iter().map(|inner| format!("{name}/{inner}")));
        } else {
            found.push(name);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fixture_is_recorded_or_listed_as_written_by_hand() {
        let origins = origins().unwrap();
        let files = files(&root().join(FOLDER)).unwrap();
        for file in &files {
            assert!(origin(&origins, file).is_some(), "{DOCUMENT} does not say what writes {file}");
        }
        for row in &origins {
            let used = files.iter().any(|file| origin(&origins, file) == Some(row));
            assert!(used, "{DOCUMENT}: no file belongs to {}", row.pattern);
            if let Some(program) = row.program.as_ref().filter(|program| !program.contains(' ')) {
                assert!(root().join(program).is_file(), "{DOCUMENT}: {program} does not exist");
            }
        }
    }

    #[test]
    fn pattern_matches_names_within_one_folder() {
        for (pattern, path, expected) in [
            ("wire/*.request.json", "wire/a.request.json", true),
            ("wire/*.request.json", "wire/a.request.decoded.json", false),
            ("wire/*.json", "wire/sub/a.json", false),
            ("*/README.md", "cli/README.md", true),
            ("cli/*", "cli/a.txt", true),
            ("cli/*", "wire/a.txt", false),
            ("a*b*c", "axbyc", true),
            ("a*b*c", "axbyd", false),
        ] {
            assert_eq!(matches(pattern, path), expected, "{pattern} {path}");
        }
    }

    #[test]
    fn row_without_a_pattern_is_refused() {
        assert!(parse("| `a | by hand |").is_err());
        let origins =
            parse("| Files | Written by |\n| `a/*` | by hand |\n| `b` | `x.py` |").unwrap();
        assert_eq!(origin(&origins, "a/c").unwrap().program, None);
        assert_eq!(origin(&origins, "b").unwrap().program.as_deref(), Some("x.py"));
    }
}
