//! `cargo xtask scenarios`: keeps the tests in `docs/scenarios.md` current.
//!
//! The document is the test plan: a row for every scenario and quality gate. A test names the
//! scenarios that it covers in its doc comment, as `/// Covers T1.2.3, X4.`. The last column of the
//! tables is generated from these comments. The check fails if a scenario has no test, if a comment
//! names an unknown scenario, or if the column is out of date.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::step::{XtaskError, root};

const DOCUMENT: &str = "docs/scenarios.md";
/// Folders with tests. The document names files relative to the first.
const FOLDERS: [&str; 2] = ["crates", "xtask"];
/// Header of the table of scenarios, whose rows need a test.
const SCENARIO_HEADER: &str = "| Id | Given, when, then | Tests |";
/// Start of the header of every table whose last column is generated.
const HEADER_START: &str = "| Id |";

/// Test that covers a scenario.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CoveringTest {
    file: String,
    /// Position in the file, so that the tests of a file are listed in its order.
    line: usize,
    function: String,
}

/// Tests by the id of the scenario that they cover.
type Coverage = BTreeMap<String, BTreeSet<CoveringTest>>;

pub(crate) fn check(fix: bool) -> Result<(), XtaskError> {
    println!("\n==> scenarios: tests in {DOCUMENT}");
    let mut coverage = Coverage::new();
    for folder in FOLDERS {
        for path in sources(&root().join(folder))? {
            let source = read(&path)?;
            let name = path.strip_prefix(root()).unwrap_or(&path);
            let name = name.strip_prefix(FOLDERS[0]).unwrap_or(name).display().to_string();
            find_covering_tests(&name, &source, &mut coverage)?;
        }
    }
    let path = root().join(DOCUMENT);
    let document = read(&path)?;
    let updated = with_tests(&document, &coverage)?;
    if updated == document {
        println!("    {} scenarios and gates have tests", coverage.len());
        return Ok(());
    }
    if fix {
        println!("    {DOCUMENT} updated");
        return std::fs::write(&path, updated)
            .map_err(|error| XtaskError::new(format!("cannot write {DOCUMENT}: {error}")));
    }
    let changed = document.lines().zip(updated.lines()).find(|(old, new)| old != new);
    let row = changed.map_or("", |(_, new)| new);
    Err(XtaskError::new(format!(
        "{DOCUMENT} is out of date\n  expected: {row}\n  Run `cargo xtask scenarios --fix`."
    )))
}

/// Adds the tests of a file that name scenarios.
fn find_covering_tests(
    file: &str,
    source: &str,
    coverage: &mut Coverage,
) -> Result<(), XtaskError> {
    let mut lines = source.lines().map(str::trim).enumerate();
    while let Some((line, text)) = lines.next() {
        let Some(ids) = text.strip_prefix("/// Covers ") else { continue };
        let mut is_test = false;
        let mut function = None;
        for (_, text) in lines.by_ref() {
            is_test |= text.starts_with("#[test") || text.starts_with("#[tokio::test");
            function = text.split_once("fn ").and_then(|(_, rest)| rest.split('(').next());
            if function.is_some() {
                break;
            }
        }
        let Some(function) = function.filter(|_| is_test) else {
            let message = format!("{file}:{}: `Covers` is not the comment of a test", line + 1);
            return Err(XtaskError::new(message));
        };
        for id in ids.trim_end_matches('.').split(", ") {
            let test = CoveringTest { file: file.to_owned(), line, function: function.to_owned() };
            coverage.entry(id.to_owned()).or_default().insert(test);
        }
    }
    Ok(())
}

/// Returns the document with the tests of every row.
///
/// # Errors
/// If an id has two rows or none, or a scenario has no test.
fn with_tests(document: &str, coverage: &Coverage) -> Result<String, XtaskError> {
    let mut output = String::new();
    let mut faults = Vec::new();
    let mut known = BTreeSet::new();
    let mut table = None;
    for line in document.lines() {
        if line.starts_with(HEADER_START) {
            table = Some(line);
        } else if !line.starts_with('|') {
            table = None;
        }
        let row = row_id(line).filter(|_| table.is_some_and(|header| header != line));
        let Some(id) = row else {
            output.push_str(line);
            output.push('\n');
            continue;
        };
        if !known.insert(id) {
            faults.push(format!("{id} has two rows"));
        }
        let tests = coverage.get(id).map(list);
        if tests.is_none() && table == Some(SCENARIO_HEADER) {
            faults.push(format!("no test has the comment `Covers {id}.`"));
        }
        let tests = tests.unwrap_or_else(|| "–".to_owned());
        let other_cells =
            line.trim_end_matches('|').rsplit_once('|').map_or(line, |(left, _)| left);
        output.push_str(&format!("{other_cells}| {tests} |\n"));
    }
    for (id, tests) in coverage.iter().filter(|(id, _)| !known.contains(id.as_str())) {
        faults.push(format!("{} covers {id}, which has no row", list(tests)));
    }
    if faults.is_empty() {
        return Ok(output);
    }
    Err(XtaskError::new(format!("{DOCUMENT}:\n  {}", faults.join("\n  "))))
}

/// Returns the id of a row; `None` for the line between header and rows.
fn row_id(line: &str) -> Option<&str> {
    let id = line.strip_prefix("| ")?.split(" |").next()?;
    (!id.is_empty()).then_some(id)
}

fn list(tests: &BTreeSet<CoveringTest>) -> String {
    let name = |test: &CoveringTest| format!("`{}` `{}`", test.file, test.function);
    tests.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// Returns the Rust files under `folder`, in a fixed order.
fn sources(folder: &Path) -> Result<Vec<PathBuf>, XtaskError> {
    let failed = |error| XtaskError::new(format!("cannot read {}: {error}", folder.display()));
    let mut files = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.insert(path);
            }
        }
    }
    Ok(files.into_iter().collect())
}

fn read(path: &Path) -> Result<String, XtaskError> {
    std::fs::read_to_string(path)
        .map_err(|error| XtaskError::new(format!("cannot read {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::{Coverage, find_covering_tests, with_tests};

    const DOCUMENT: &str = "\
# Plan

| Id | Given, when, then | Tests |
|---|---|---|
| T1 | given a request, then a response | old |

| Id | What holds | Steps | Tests |
|---|---|---|---|
| Q1 | formatted | `fmt` |  |
";

    fn coverage(comment: &str) -> Coverage {
        let source = format!("    /// Covers {comment}\n    #[test]\n    fn holds() {{}}\n");
        let mut coverage = Coverage::new();
        find_covering_tests("client/tests/it/a.rs", &source, &mut coverage).unwrap();
        coverage
    }

    #[test]
    fn the_last_column_has_the_tests_of_each_row() {
        let updated = with_tests(DOCUMENT, &coverage("T1.")).unwrap();
        let row = "| T1 | given a request, then a response | `client/tests/it/a.rs` `holds` |";
        assert!(updated.contains(row), "{updated}");
        assert!(updated.contains("| Q1 | formatted | `fmt` | – |"), "{updated}");
        assert_eq!(with_tests(&updated, &coverage("T1.")).unwrap(), updated, "nothing to change");
    }

    #[test]
    fn scenarios_without_tests_and_tests_of_unknown_scenarios_are_reported() {
        let error = with_tests(DOCUMENT, &coverage("Q1, T2.")).unwrap_err().to_string();
        assert!(error.contains("no test has the comment `Covers T1.`"), "{error}");
        assert!(error.contains("`holds` covers T2, which has no row"), "{error}");
    }

    #[test]
    fn the_comment_must_belong_to_a_test() {
        let mut coverage = Coverage::new();
        let error = find_covering_tests("a.rs", "/// Covers T1.\nfn helper() {}", &mut coverage);
        assert!(error.unwrap_err().to_string().contains("a.rs:1"));
    }
}
