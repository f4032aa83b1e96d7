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

/// A comment that mentions a deviation from the Python SDK names the row that gives the reason.
#[test]
fn every_deviation_in_a_comment_has_a_row() {
    let document = fs::read_to_string(root().join("docs/deviations.md")).unwrap();
    let rows = table_rows(&document, "Id");
    let ids: BTreeSet<&str> = rows.iter().flat_map(|row| row[1].split(", ")).collect();
    let mut comments = 0;
    for path in sources(&root().join("crates")) {
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for (number, line) in lines.iter().enumerate() {
            let words = line.trim_start_matches(['/', '!']).trim_start();
            if !line.starts_with("//")
                || !["Unlike the Python SDK", "Unlike in the Python SDK"]
                    .iter()
                    .any(|start| words.contains(start))
            {
                continue;
            }
            comments += 1;
            let rest = lines[number..].iter().take_while(|line| line.starts_with("//"));
            let comment = rest.copied().collect::<Vec<_>>().join(" ");
            let mut named = comment.split(['(', ')']).filter(|part| ids.contains(part));
            let place = format!("{}:{}", path.display(), number + 1);
            assert!(named.next().is_some(), "{place} names no row of docs/deviations.md");
        }
    }
    assert!(comments > 5, "the comments were not found");
}

/// Function of a test file: its attributes and its text up to the next function.
struct Function {
    attributes: Vec<String>,
    text: String,
}

impl Function {
    /// Splits the text of a test file.
    fn all_of(text: &str) -> Vec<Self> {
        let starts_function = |line: &str| {
            let line =
                line.trim_start().trim_start_matches("pub(crate) ").trim_start_matches("pub ");
            line.trim_start_matches("async ").starts_with("fn ")
        };
        let mut functions = Vec::new();
        let mut attributes = Vec::new();
        for line in text.lines() {
            if starts_function(line) {
                let text = String::new();
                functions.push(Self { attributes: std::mem::take(&mut attributes), text });
            } else if line.trim_start().starts_with("#[") {
                attributes.push(line.trim().to_owned());
            }
            if let Some(function) = functions.last_mut() {
                function.text.push_str(line);
                function.text.push('\n');
            }
        }
        functions
    }

    fn is_test(&self) -> bool {
        let marks = ["#[test", "#[tokio::test"];
        self.attributes.iter().any(|line| marks.iter().any(|mark| line.starts_with(mark)))
    }

    /// Returns whether time stands still in the test unless all tasks wait.
    fn is_paused(&self) -> bool {
        self.attributes.iter().any(|line| line.contains("start_paused = true"))
    }

    /// Returns the names of variables that hold a point in time or a duration that was measured. A
    /// single point in time measures nothing: a test of a function with the time as a parameter
    /// starts with one.
    fn measured(&self) -> BTreeSet<&str> {
        let is_single =
            CLOCKS.iter().map(|clock| self.text.matches(clock).count()).sum::<usize>() == 1;
        if is_single && !self.text.contains(".elapsed()") {
            return BTreeSet::new();
        }
        let reads_clock = |statement: &&str| CLOCKS.iter().any(|clock| statement.contains(clock));
        self.text.split(';').filter(reads_clock).filter_map(assigned_variable).collect()
    }

    /// Returns the arguments of the assertions.
    fn assertions(&self) -> Vec<&str> {
        let starts = self.text.match_indices("assert").map(|(at, _)| &self.text[at..]);
        let macros = starts.filter_map(|rest| {
            let (name, arguments) = rest.split_once('(')?;
            ["assert!", "assert_eq!", "assert_ne!"].contains(&name).then_some(arguments)
        });
        macros
            .map(|arguments| {
                let mut depth = 1;
                let end = arguments.find(|c| {
                    depth += i32::from(c == '(') - i32::from(c == ')');
                    depth == 0
                });
                &arguments[..end.unwrap_or(arguments.len())]
            })
            .collect()
    }

    /// Returns whether an assertion depends on a clock.
    fn asserts_on_time(&self) -> bool {
        let measured = self.measured();
        self.assertions().iter().any(|assertion| {
            let mut words = assertion.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            CLOCKS.iter().any(|clock| assertion.contains(clock))
                || words.any(|word| measured.contains(word))
        })
    }
}

/// Returns the variable that a statement declares, or the list that it adds an element to.
fn assigned_variable(statement: &str) -> Option<&str> {
    let declared = statement.rsplit_once("let ").map(|(_, rest)| rest.trim_start_matches("mut "));
    let variable = match declared {
        Some(declared) => declared,
        None => statement.split_once(".push(")?.0.rsplit(char::is_whitespace).next()?,
    };
    let name = variable.split(|c: char| !(c.is_alphanumeric() || c == '_')).next();
    name.filter(|name| !name.is_empty())
}

/// Calls that read a clock.
const CLOCKS: [&str; 3] = [".elapsed()", "Instant::now()", "SystemTime::now()"];

/// Returns the names of the functions of a test file that assert on time although it may be real
/// time: not in a test whose time is paused, nor in a file all of whose tests are paused.
fn assertions_on_real_time(text: &str) -> Vec<String> {
    let functions = Function::all_of(text);
    let all_paused = functions.iter().filter(|f| f.is_test()).all(Function::is_paused);
    let is_real = |f: &&Function| !f.is_paused() && (f.is_test() || !all_paused);
    let found = functions.iter().filter(is_real).filter(|f| f.asserts_on_time());
    found.map(|f| f.text.lines().next().unwrap_or_default().trim().to_owned()).collect()
}

/// Covers P6C.7.
#[test]
fn no_test_asserts_on_real_time() {
    let files = ["crates", "xtask", "fuzz"].map(|folder| sources(&root().join(folder)));
    for path in files.into_iter().flatten() {
        let text = fs::read_to_string(&path).unwrap();
        let is_test_file = path.components().any(|part| part.as_os_str() == "tests")
            || path.file_name().is_some_and(|name| name == "tests.rs");
        let tests = if is_test_file { 0 } else { text.find("\nmod tests {").unwrap_or(text.len()) };
        let found = assertions_on_real_time(&text[tests..]);
        assert!(found.is_empty(), "{} asserts on real time: {found:?}", path.display());
    }
}

/// Covers P6C.7.
#[test]
fn assertions_on_real_time_are_found() {
    let paused = "#[tokio::test(start_paused = true)]";
    for (attribute, body, expected) in [
        ("#[test]", "let took = start.elapsed();\nCHECK!(took < LIMIT);", 1),
        ("#[test]", "times.push(start.elapsed());\nCHECK!(times.iter().all(ok));", 1),
        ("#[tokio::test]", "CHECK_eq!(\n    start.elapsed(),\n    SECOND\n);", 1),
        ("#[test]", "let end = Instant::now() + WAIT;\nwhile !done(end) {}\nCHECK!(done);", 0),
        (paused, "CHECK_eq!(start.elapsed(), SECOND);", 0),
    ] {
        // This file is searched too, so it must not contain such an assertion.
        let body = body.replace("CHECK", "assert");
        let text = format!("{attribute}\nfn takes_time() {{\n{body}\n}}\n");
        assert_eq!(assertions_on_real_time(&text).len(), expected, "{text}");
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
