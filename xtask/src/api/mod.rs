//! `cargo xtask api`: compares the public API of the crate `tinkex` with `docs/api.txt`.
//!
//! The list is generated from the JSON output of rustdoc, so that it contains what macros generate
//! and what other crates of the workspace contribute by `pub use`. The output format is unstable:
//! the list is compared only if rustdoc writes the version that [`document`] reads.

mod document;
mod list;
mod types;

use std::collections::BTreeMap;
use std::process::{Command, ExitCode};

use crate::step::{XtaskError, cargo, root, target};
use crate::test::skipped;

use document::Documents;

const LIST: &str = "docs/api.txt";
/// Crate whose API is listed.
const CRATE: &str = "tinkex";
/// Variable that makes xtask run as rustdoc; see [`run_as_rustdoc`].
const AS_RUSTDOC: &str = "TINKEX_XTASK_AS_RUSTDOC";

/// Compares the public API with the list, or writes the list.
pub(crate) fn check(fix: bool) -> Result<(), XtaskError> {
    generate_json()?;
    let documents = Documents::new(target().join("doc"));
    let version = documents.get(CRATE)?.format_version();
    if version != document::FORMAT_VERSION {
        let known = document::FORMAT_VERSION;
        skipped("public API", &format!("rustdoc writes JSON version {version}, not {known}"));
        return Ok(());
    }
    let found = list::public_items(&documents, CRATE)?;
    check_iterators(&found)?;
    let path = root().join(LIST);
    if fix {
        println!("    {LIST}: {} lines", found.lines().count());
        return std::fs::write(&path, found)
            .map_err(|error| XtaskError::new(format!("cannot write {LIST}: {error}")));
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    if found == expected {
        println!("    {} lines", found.lines().count());
        return Ok(());
    }
    let changes = changes(&expected, &found);
    Err(XtaskError::new(format!(
        "the public API of {CRATE} differs from {LIST}:\n{changes}\n  \
         If the change is intended, run `cargo xtask api --fix` and commit {LIST}."
    )))
}

/// Checks that the documentation shows the item type of every returned iterator. rustdoc omits it
/// for a type of another crate if the trait inherits the item type, as `ExactSizeIterator` does.
fn check_iterators(list: &str) -> Result<(), XtaskError> {
    let faults: Vec<&str> =
        list.lines().filter(|line| line.contains("impl ExactSizeIterator<")).collect();
    if faults.is_empty() {
        return Ok(());
    }
    Err(XtaskError::new(format!(
        "rustdoc shows no item type for these iterators; return \
         `impl Iterator<Item = T> + ExactSizeIterator`:\n{}",
        faults.join("\n")
    )))
}

/// Writes `target/doc/CRATE.json` for all crates of the workspace.
///
/// Builds the same crates and features as `cargo xtask doc`, so that no dependency is compiled again.
fn generate_json() -> Result<(), XtaskError> {
    let xtask = std::env::current_exe()
        .map_err(|error| XtaskError::new(format!("cannot find the program of xtask: {error}")))?;
    cargo("public API", &["doc", "--workspace", "--all-features", "--no-deps", "--locked"])
        .variable("RUSTDOCFLAGS", "-Z unstable-options --output-format json")
        .variable("RUSTDOC", xtask)
        .variable(AS_RUSTDOC, "1")
        .run()
}

/// Runs rustdoc with the arguments of this process, if cargo started xtask as rustdoc.
///
/// rustdoc accepts unstable options if `RUSTC_BOOTSTRAP` is set. It must not be set for cargo:
/// build scripts that read it would run again, and their dependents be compiled again.
pub(crate) fn run_as_rustdoc() -> Option<ExitCode> {
    #[expect(clippy::disallowed_methods, reason = "set by xtask itself")]
    std::env::var_os(AS_RUSTDOC)?;
    let arguments = std::env::args_os().skip(1);
    let status = Command::new("rustdoc").args(arguments).env("RUSTC_BOOTSTRAP", "1").status();
    Some(match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cannot run rustdoc: {error}");
            ExitCode::FAILURE
        }
    })
}

/// Lines of an item by its first line.
fn items(list: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut items: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut item = "";
    for line in list.lines() {
        if !line.starts_with(' ') {
            item = line;
        }
        items.entry(item).or_default().push(line);
    }
    items
}

/// Returns the removed and added lines, each below the item that it belongs to.
fn changes(expected: &str, found: &str) -> String {
    let expected = items(expected);
    let found = items(found);
    let mut output = String::new();
    for item in expected.keys().chain(found.keys().filter(|item| !expected.contains_key(*item))) {
        let old = expected.get(item).map_or(&[][..], Vec::as_slice);
        let new = found.get(item).map_or(&[][..], Vec::as_slice);
        if old == new {
            continue;
        }
        let is_new = old.is_empty();
        let is_removed = new.is_empty();
        if !is_new && !is_removed {
            output.push_str(&format!("    {item}\n"));
        }
        for line in old.iter().filter(|line| !new.contains(line)) {
            output.push_str(&format!("  - {line}\n"));
        }
        for line in new.iter().filter(|line| !old.contains(line)) {
            output.push_str(&format!("  + {line}\n"));
        }
    }
    output
}

#[cfg(test)]
mod tests {
    use super::{changes, check_iterators};

    #[test]
    fn iterators_whose_item_type_rustdoc_omits_are_found() {
        let complete = "  fn iter(&self) -> impl Iterator<Item = u32> + ExactSizeIterator\n";
        check_iterators(complete).unwrap();
        let line = "  fn rows(&self) -> Option<impl ExactSizeIterator<Item = u32>>";
        let error = check_iterators(&format!("{complete}{line}\n")).unwrap_err();
        assert!(error.to_string().ends_with(line), "{error}");
    }

    #[test]
    fn changes_are_listed_below_their_item() {
        let old = "struct a::A\n  fn f()\n  fn g()\nstruct a::B\n";
        let new = "struct a::A\n  fn f()\n  fn h()\nstruct a::C\n  fn i()\n";
        let expected = "    struct a::A\n  -   fn g()\n  +   fn h()\n  - struct a::B\n  + struct a::C\n  +   fn i()\n";
        assert_eq!(changes(old, new), expected);
    }
}
