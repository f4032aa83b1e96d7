//! Checks of the documentation about tests: `docs/deviations.md` names existing tests for every
//! deviation, the guide documents the workflow, and every fixture is used. `cargo xtask scenarios`
//! checks `docs/scenarios.md`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the Rust files under `folder`, in a fixed order.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                files.insert(path);
            }
        }
    }
    files.into_iter().collect()
}

/// Test that a document names: file relative to `crates`, and function.
struct NamedTest<'a> {
    file: &'a str,
    function: &'a str,
}

impl<'a> NamedTest<'a> {
    /// Parses a list of the form `` `file` `function`, `file` `function` ``.
    fn list(cell: &'a str) -> Vec<Self> {
        cell.split(", ")
            .map(|test| {
                let names: Vec<&str> =
                    test.split('`').filter(|part| !part.trim().is_empty()).collect();
                let [file, function] = names[..] else {
                    panic!("{test:?} does not name a file and a test")
                };
                Self { file, function }
            })
            .collect()
    }

    /// Returns the doc comment and the attributes of the test.
    ///
    /// # Panics
    /// If the function does not exist or is not a test.
    fn attributes(&self) -> Vec<String> {
        let Self { file, function } = self;
        let text = fs::read_to_string(root().join("crates").join(file)).unwrap_or_default();
        let at = text.find(&format!("fn {function}("));
        let at = at.unwrap_or_else(|| panic!("{file} has no test {function}"));
        let start_of_line = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let attributes: Vec<String> = text[..start_of_line]
            .lines()
            .rev()
            .map(str::trim)
            .take_while(|line| line.starts_with("///") || line.starts_with("#["))
            .map(str::to_owned)
            .collect();
        let is_test =
            |line: &String| line.starts_with("#[test") || line.starts_with("#[tokio::test");
        assert!(attributes.iter().any(is_test), "{function} in {file} is not a test");
        attributes
    }
}

/// Returns the cells of the rows of a table whose header starts with `first`.
fn table_rows<'a>(document: &'a str, first: &str) -> Vec<Vec<&'a str>> {
    let cells = |row: &'a str| row.split('|').map(str::trim).collect::<Vec<_>>();
    document
        .lines()
        .skip_while(|line| !line.starts_with(&format!("| {first} |")))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(cells)
        .collect()
}

#[test]
fn every_deviation_has_an_existing_test() {
    let document = fs::read_to_string(root().join("docs/deviations.md")).unwrap();
    let rows = table_rows(&document, "Id");
    assert!(rows.len() > 30, "the table was not found");
    for row in rows {
        let [_, _, other, ours, tests, _] = row[..] else { panic!("{row:?} has other columns") };
        assert!(!other.is_empty() && !ours.is_empty(), "{row:?} lacks a description");
        for test in NamedTest::list(tests) {
            test.attributes();
        }
    }
}

/// Covers P6C.7.
#[test]
fn no_test_asserts_on_real_time() {
    // Time in tests is tokio's, which is paused. Fuzzers measure how long they run, and the tests in
    // a browser, which `cargo xtask browser` runs, how long a page takes.
    let in_browser = |path: &PathBuf| path.components().any(|part| part.as_os_str() == "browser");
    for path in sources(&root().join("crates")).into_iter().filter(|path| !in_browser(path)) {
        let text = fs::read_to_string(&path).unwrap();
        let in_tests = path.components().any(|part| part.as_os_str() == "tests");
        let tests = if in_tests { 0 } else { text.find("\nmod tests {").unwrap_or(text.len()) };
        let name = path.strip_prefix(root()).unwrap().to_string_lossy();
        let text = text[tests..].replace("#[test]", "#[tokio::test]");
        for test in text.split("#[tokio::test").skip(1).filter(|part| part.contains(".elapsed()")) {
            let (attribute, rest) = test.split_once(']').unwrap();
            let paused = attribute.contains("start_paused = true");
            let reads_the_date = test.contains("UNIX_EPOCH.elapsed()");
            let function = rest.split("fn ").nth(1).unwrap().split('(').next().unwrap();
            assert!(paused || reads_the_date, "{name}: {function} asserts on real time");
        }
    }
}

/// Covers P6B.6.
#[test]
fn the_guide_documents_the_workflow_and_concurrency() {
    let guide = fs::read_to_string(root().join("docs/client.md")).unwrap();
    let chapter = guide.split("\n## Workflow and concurrency\n").nth(1).expect("the chapter");
    let chapter = chapter.split("\n## ").next().unwrap();
    // The example runs as a documentation test: it is neither ignored nor only compiled.
    let example = chapter.split("\n```rust\n").nth(1).expect("an example that runs");
    let example = example.split("\n```\n").next().unwrap();
    let calls = ["create_lora_training_client", "step(", "save_weights_and_get_sampling_client"];
    for call in calls.into_iter().chain(["sample(", "finish("]) {
        assert!(example.contains(call), "the example does not call {call}");
    }
    assert!(example.contains("assert"), "the example checks its results");
    let operations: Vec<&str> =
        table_rows(chapter, "Operations").into_iter().map(|row| row[1]).collect();
    for word in ["model", "models", "samples", "services"] {
        let named = operations.iter().any(|row| row.split(' ').any(|part| part == word));
        assert!(named, "the table of concurrent operations does not mention {word}");
    }
    let library = fs::read_to_string(root().join("crates/client/src/lib.rs")).unwrap();
    assert!(library.contains("#[doc = include_str!(\"../../../docs/client.md\")]"));
}

/// Covers X17.
#[test]
fn every_fixture_is_read_by_a_test() {
    let text: String = sources(&root().join("crates"))
        .iter()
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    for folder in ["behaviour", "semantics"] {
        for entry in fs::read_dir(root().join("fixtures").join(folder)).unwrap() {
            let file = entry.unwrap().file_name().into_string().unwrap();
            if file == "README.md" {
                continue;
            }
            // Read by name, or listed in the table of the wire crate's tests.
            let uses = [
                format!("cases(\"{file}\")"),
                format!("load(\"{file}\")"),
                format!("semantics(\"{file}\")"),
                format!("load(\"../../fixtures/semantics/{file}\")"),
                format!("(\"{file}\", "),
            ];
            assert!(uses.iter().any(|call| text.contains(call)), "no test reads {folder}/{file}");
        }
    }
    // Tests read all files of these folders and fail for a file that they do not use.
    for (folder, file, function) in [
        ("wire", "wire/tests/it/golden.rs", "all_recorded_exchanges_round_trip"),
        (
            "sdk",
            "client/tests/it/replay.rs",
            "the_recorded_program_of_the_python_sdk_sends_the_same_requests",
        ),
        ("cli", "cli/tests/it/replay.rs", "recorded_commands_behave_like_the_python_cli"),
        ("servers", "client/tests/it/recorded_server.rs", "skyrl_0_4_trains_and_samples"),
    ] {
        assert!(root().join("fixtures").join(folder).is_dir());
        NamedTest { file, function }.attributes();
    }
    let known = ["behaviour", "cli", "sdk", "semantics", "servers", "wire"];
    for entry in fs::read_dir(root().join("fixtures")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(name == "README.md" || known.contains(&&*name), "no test reads fixtures/{name}");
    }
}
