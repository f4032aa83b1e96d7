//! `cargo xtask record`: records the official Python SDK as fixtures.
//!
//! The recorders are Python programs in `xtask/record`. They run one release of the SDK against
//! servers on the loopback interface and write new fixtures to the target folder. `report.py`
//! compares them with the checked-in ones, which are replaced only if everything was recorded.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;

use crate::fixtures::{self, Origin};
use crate::python::{self, Packages};
use crate::step::{Step, XtaskError, root, target, tool};
use crate::test_server::{MODEL, TestServer, golden_model};

const RECORDERS: &str = "xtask/record";
/// Pinned packages that the SDK depends on. Their releases change headers and tables, too.
const REQUIREMENTS: &str = "xtask/record/requirements.txt";
/// File with the version of the recorded SDK.
const VERSION_FILE: &str = "fixtures/sdk/sdk.json";
const TORCH: &str = "torch==2.15.0";
/// Program of `--graphs`.
const GRAPHS: &str = "graphs.py";
/// File in which a recorder lists the cases that it could not record, with the reasons.
const NOT_RECORDED: &str = "not-recorded.json";

/// Arguments of `cargo xtask record`.
#[derive(Args)]
pub(crate) struct RecordArgs {
    /// Version of the SDK [default: the version of the fixtures]
    #[arg(long, value_name = "VERSION")]
    sdk: Option<String>,
    /// Print the changes only, and leave the fixtures as they are
    #[arg(long)]
    compare: bool,
    /// Record the traced custom losses as well, which needs torch (6 GB of disk)
    #[arg(long)]
    graphs: bool,
    /// Write the changes to this Markdown file as well
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

pub(crate) fn run(args: &RecordArgs) -> Result<(), XtaskError> {
    let recorded = recorded_version()?;
    let version = args.sdk.as_ref().unwrap_or(&recorded);
    println!("recording tinker {version}; the fixtures are of {recorded}");
    let python = environment(version, args.graphs)?;
    TestServer::build()?;
    let new = target().join("record/new");
    // An earlier run may have left a part of a recording.
    let _ = fs::remove_dir_all(&new);
    record(&python, &new)?;
    if args.graphs {
        recorder("custom losses", &python, GRAPHS)
            .argument(root().join(fixtures::FOLDER))
            .argument(new.join("semantics"))
            .run()?;
    }
    let is_recorded = |program: &str| {
        let name = program.strip_prefix(RECORDERS).map(|name| name.trim_start_matches('/'));
        name.is_some_and(|name| name != GRAPHS || args.graphs)
    };
    let report =
        args.report.as_ref().map_or_else(|| new.join("changes.md"), |path| root().join(path));
    recorder("changes", &python, "report.py")
        .argument(root().join(fixtures::FOLDER))
        .argument(&new)
        .argument(report)
        .run()?;
    list_others(is_recorded)?;
    if args.compare {
        println!("\nthe fixtures are unchanged; the new recording is in {}", new.display());
        return Ok(());
    }
    let missing = not_recorded(&new)?;
    if !missing.is_empty() {
        let missing = missing.join("\n  ");
        let hint = "Adapt the recorders, or pass --compare to see the other changes.";
        let message = format!("the fixtures are unchanged: not recorded:\n  {missing}\n{hint}");
        return Err(XtaskError::new(message));
    }
    replace(&new, &root().join(fixtures::FOLDER), &fixtures::origins()?, is_recorded)
}

/// Returns the version of the SDK that the fixtures were recorded with.
fn recorded_version() -> Result<String, XtaskError> {
    let sdk: Value = serde_json::from_str(&read(&root().join(VERSION_FILE))?)
        .map_err(|error| XtaskError::new(format!("cannot read {VERSION_FILE}: {error}")))?;
    let missing = || XtaskError::new(format!("{VERSION_FILE} has no version"));
    sdk["version"].as_str().map(str::to_owned).ok_or_else(missing)
}

/// Returns a Python interpreter with the SDK. The recordings contain tracebacks, which differ
/// between releases of Python.
fn environment(version: &str, torch: bool) -> Result<PathBuf, XtaskError> {
    let valid = |character: char| character.is_ascii_alphanumeric() || character == '.';
    if version.is_empty() || !version.chars().all(valid) {
        let message =
            format!("invalid version of the SDK `{version}`; expected, for example, 0.36.0");
        return Err(XtaskError::new(message));
    }
    #[expect(clippy::disallowed_methods, reason = "an option of this command")]
    let interpreter = std::env::var("PYTHON311").unwrap_or_else(|_| "python3.11".to_owned());
    let sdk = format!("tinker=={version}");
    let requirements = read(&root().join(REQUIREMENTS))?;
    let lines = requirements.lines().filter(|line| !line.starts_with('#'));
    let torch = torch.then_some(TORCH);
    let names: Vec<&str> = std::iter::once(&*sdk).chain(lines).chain(torch).collect();
    let packages = Packages { interpreter: &interpreter, ..Packages::wheels(&names) };
    let folder = if torch.is_some() { format!("{version}-torch") } else { version.to_owned() };
    python::environment(&Path::new("record").join(folder), &packages)
        .map_err(|error| XtaskError::new(format!("cannot install tinker {version}: {error}")))
}

/// Creates a step that runs a recorder.
fn recorder(title: &str, python: &Path, program: &str) -> Step {
    tool(title, python, &[&format!("{RECORDERS}/{program}")])
        // Fix the iteration order of sets, and write no `__pycache__`.
        .variable("PYTHONHASHSEED", "0")
        .variable("PYTHONDONTWRITEBYTECODE", "1")
}

/// Writes a new recording to the folder `new`.
fn record(python: &Path, new: &Path) -> Result<(), XtaskError> {
    let server = TestServer::start(&target().join("record/data"), &[golden_model()], true)?;
    let exchanges = recorder("exchanges with our server", python, "exchanges.py");
    exchanges.arguments(&[&server.url, MODEL]).argument(new.join("sdk")).run()?;
    drop(server);
    recorder("signatures", python, "signatures.py").argument(new.join("sdk")).run()?;
    for group in ["wire", "behaviour", "cli"] {
        recorder(group, python, &format!("{group}.py"))
            .argument(root().join(fixtures::FOLDER))
            .argument(new.join(group))
            .run()?;
    }
    Ok(())
}

/// Prints which fixtures this run did not record.
fn list_others(is_recorded: impl Fn(&str) -> bool) -> Result<(), XtaskError> {
    println!("\nnot recorded by this run (see fixtures/README.md):");
    for origin in fixtures::origins()? {
        let writer = origin.program.as_deref().unwrap_or("written by hand");
        if !is_recorded(writer) && !origin.pattern.ends_with("README.md") {
            println!("    {}: {writer}", origin.pattern);
        }
    }
    Ok(())
}

/// Returns what the recorders could not record, with the reasons.
fn not_recorded(new: &Path) -> Result<Vec<String>, XtaskError> {
    let mut missing = Vec::new();
    for file in fixtures::files(new)?.iter().filter(|file| file.ends_with(NOT_RECORDED)) {
        let reasons: BTreeMap<String, String> = serde_json::from_str(&read(&new.join(file))?)
            .map_err(|error| XtaskError::new(format!("cannot read {file}: {error}")))?;
        let group = file.split('/').next().unwrap_or_default();
        missing.extend(reasons.iter().map(|(name, reason)| format!("{group}: {name}: {reason}")));
    }
    Ok(missing)
}

/// Replaces the files of `folder` that come from the recorders that `is_recorded` accepts by those of
/// `new`. Removes such files that `new` does not have, and keeps all others.
fn replace(
    new: &Path,
    folder: &Path,
    origins: &[Origin],
    is_recorded: impl Fn(&str) -> bool,
) -> Result<(), XtaskError> {
    let is_recorded = |file: &String| {
        let origin = fixtures::origin(origins, file);
        origin.and_then(|origin| origin.program.as_deref()).is_some_and(&is_recorded)
    };
    let failed =
        |path: &Path, error| XtaskError::new(format!("cannot write {}: {error}", path.display()));
    let after: Vec<String> = fixtures::files(new)?.into_iter().filter(is_recorded).collect();
    for file in fixtures::files(folder)?.into_iter().filter(is_recorded) {
        if !after.contains(&file) {
            let path = folder.join(&file);
            fs::remove_file(&path).map_err(|error| failed(&path, error))?;
        }
    }
    for file in &after {
        let path = folder.join(file);
        fs::copy(new.join(file), &path).map_err(|error| failed(&path, error))?;
    }
    println!("\nwrote {} fixtures; read the changes with `git diff fixtures`", after.len());
    Ok(())
}

fn read(path: &Path) -> Result<String, XtaskError> {
    fs::read_to_string(path)
        .map_err(|error| XtaskError::new(format!("cannot read {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a folder with these files, whose content is `text`.
    fn folder(name: &str, files: &[&str], text: &str) -> PathBuf {
        let folder = target().join(format!("tmp/record-{}-{name}", std::process::id()));
        for file in files {
            let path = folder.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    #[test]
    fn recording_replaces_only_the_files_of_its_recorders() {
        let program = |name: &str| Some(format!("{RECORDERS}/{name}"));
        let origin = |pattern: &str, program| Origin { pattern: pattern.to_owned(), program };
        let origins = [
            origin("wire/*.response.json", None),
            origin("wire/*.json", program("wire.py")),
            origin("semantics/*.json", program(GRAPHS)),
        ];
        let before = ["wire/a.json", "wire/gone.json", "wire/a.response.json", "semantics/x.json"];
        let old = folder("old", &before, "old");
        let new = folder("new", &["wire/a.json", "wire/b.json", "wire/not-listed.txt"], "new");
        replace(&new, &old, &origins, |name| name.ends_with("wire.py")).unwrap();
        let after: Vec<(String, String)> = fixtures::files(&old)
            .unwrap()
            .into_iter()
            .map(|file| (fs::read_to_string(old.join(&file)).unwrap(), file))
            .collect();
        let expected = [
            ("old", "semantics/x.json"),
            ("new", "wire/a.json"),
            ("old", "wire/a.response.json"),
            ("new", "wire/b.json"),
        ];
        assert_eq!(after, expected.map(|(text, file)| (text.to_owned(), file.to_owned())));
        fs::remove_dir_all(old).unwrap();
        fs::remove_dir_all(new).unwrap();
    }

    #[test]
    fn failures_of_recorders_are_listed_with_their_reasons() {
        let new = folder("failed", &["wire/not-recorded.json"], r#"{"audit": "no route"}"#);
        assert_eq!(not_recorded(&new).unwrap(), ["wire: audit: no route"]);
        fs::remove_dir_all(new).unwrap();
    }

    #[test]
    fn version_that_is_not_a_version_is_refused() {
        for version in ["", "0.36.0; rm", "../0.36.0"] {
            let error = environment(version, false).unwrap_err().to_string();
            assert!(error.contains("invalid version"), "{error}");
        }
    }
}
