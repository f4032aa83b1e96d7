//! `cargo xtask record`: records the exchanges of the official Python SDK with a new server.
//!
//! The recorded calls are in `crates/server/tests/python/record.py`. The recording replaces
//! `fixtures/sdk`, so that `git diff fixtures/sdk` shows what a release of the SDK changes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use clap::Args;

use crate::python::{self, Packages};
use crate::step::{XtaskError, root, target, tool};
use crate::test_server::{MODEL, TestServer, golden_model};

const PROGRAM: &str = "crates/server/tests/python/record.py";
const RECORDINGS: &str = "fixtures/sdk";

/// Arguments of `cargo xtask record`.
#[derive(Args)]
pub(crate) struct RecordArgs {
    /// Version of the SDK
    #[arg(long, value_name = "VERSION", default_value = "0.36.0")]
    sdk: String,
}

pub(crate) fn run(args: &RecordArgs) -> Result<(), XtaskError> {
    let version = &args.sdk;
    let folder = Path::new("record").join(version);
    let sdk = format!("tinker=={version}");
    let python = python::environment(&folder, &Packages::wheels(&[&sdk]))?;
    TestServer::build()?;
    let server = TestServer::start(&target().join("record/data"), &[golden_model()], true)?;
    // A failed run must leave the existing recordings as they are.
    let new = target().join("record/new");
    let _ = fs::remove_dir_all(&new);
    tool("recording", &python, &[PROGRAM, &server.url, MODEL]).argument(&new).run()?;
    drop(server);

    let old = root().join(RECORDINGS);
    let before = read(&old)?;
    let after = read(&new)?;
    replace(&old, &after)?;
    report(&before, &after);
    Ok(())
}

/// Returns the contents of the files of a folder by name; empty if the folder does not exist.
fn read(folder: &Path) -> Result<BTreeMap<String, String>, XtaskError> {
    let failed = |error| XtaskError::new(format!("cannot read {}: {error}", folder.display()));
    if !folder.exists() {
        return Ok(BTreeMap::new());
    }
    fs::read_dir(folder)
        .map_err(failed)?
        .map(|entry| {
            let path = entry.map_err(failed)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok((name, fs::read_to_string(&path).map_err(failed)?))
        })
        .collect()
}

/// Replaces the recordings of a folder; keeps its `README.md`.
fn replace(folder: &Path, files: &BTreeMap<String, String>) -> Result<(), XtaskError> {
    let failed = |error| XtaskError::new(format!("cannot write {}: {error}", folder.display()));
    fs::create_dir_all(folder).map_err(failed)?;
    for name in read(folder)?.keys().filter(|name| name.ends_with(".json")) {
        fs::remove_file(folder.join(name)).map_err(failed)?;
    }
    for (name, text) in files {
        fs::write(folder.join(name), text).map_err(failed)?;
    }
    Ok(())
}

/// Prints which recordings were added, removed and changed, with the number of changed lines.
fn report(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) {
    let mut changes = 0;
    let mut print = |name: &str, change: String| {
        changes += 1;
        println!("    {name}: {change}");
    };
    println!("\n==> changes of {RECORDINGS}");
    for name in before.keys().filter(|name| name.ends_with(".json")) {
        if !after.contains_key(name) {
            print(name, "removed".to_owned());
        }
    }
    for (name, new) in after {
        match before.get(name) {
            None => print(name, format!("added, {} lines", new.lines().count())),
            Some(old) if old != new => {
                let removed = missing_lines(old, new);
                let added = missing_lines(new, old);
                print(name, format!("changed, +{added} -{removed} lines"));
            }
            Some(_) => {}
        }
    }
    match changes {
        0 => println!("    none: all {} files are the same", after.len()),
        n => println!("    {n} files differ; read them with `git diff {RECORDINGS}`"),
    }
}

/// Counts the lines of `text` that `other` does not have, respecting how often they occur.
fn missing_lines(text: &str, other: &str) -> usize {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for line in other.lines() {
        *counts.entry(line).or_default() += 1;
    }
    let is_missing = |line: &&str| match counts.get_mut(*line) {
        Some(count) if *count > 0 => {
            *count -= 1;
            false
        }
        _ => true,
    };
    text.lines().filter(is_missing).count()
}
