//! Snapshots of everything the program prints: help, errors and results.
//!
//! If the output differs from a snapshot, the test writes it beside the snapshot as `NAME.new` and
//! fails. If the new text is right, move it over the snapshot.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::capture;
use crate::replay::{self, ReplayOutput};
use crate::replay_cases::ReplayCase;

fn check(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/snapshots").join(name);
    let expected = fs::read_to_string(&path).unwrap_or_default();
    let new = path.with_extension("txt.new");
    if expected == text {
        // Remove the file of an earlier failure.
        let _ = fs::remove_file(new);
        return;
    }
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&new, text).unwrap();
    let at = expected.lines().zip(text.lines()).take_while(|(a, b)| a == b).count();
    let line = |text: &str| text.lines().nth(at).unwrap_or_default().to_owned();
    panic!(
        "{name} differs from line {}:\n- {}\n+ {}\nto accept the new text: mv {} {}",
        at + 1,
        line(&expected),
        line(text),
        new.display(),
        path.display()
    );
}

/// Appends a command and its output, with paths and retry counts replaced by fixed text.
fn append(text: &mut String, line: &[String], outcome: &ReplayOutput) {
    let stable = |text: &str| {
        let text = text.replace(outcome.work.path().to_str().unwrap(), "/home/me");
        let text = text.replace(outcome.home.path().to_str().unwrap(), "/home/me");
        let lines = text.lines().map(|line| match line.split_once(" after ") {
            Some((start, rest)) => match rest.split_once(" s)") {
                Some((_, rest)) => format!("{start} after some attempts (some s){rest}\n"),
                None => format!("{line}\n"),
            },
            None => format!("{line}\n"),
        });
        lines.collect::<String>()
    };
    let args = ["tinkex"].into_iter().chain(line.iter().skip(1).map(String::as_str));
    let args: Vec<_> = args.collect();
    writeln!(text, "$ {}", args.join(" ")).unwrap();
    write!(text, "{}{}", stable(&outcome.out), stable(&outcome.err)).unwrap();
    writeln!(text, "[exit {}]\n", outcome.exit).unwrap();
}

/// Every command without subcommands must have an example.
#[tokio::test(start_paused = true)]
async fn help_matches_the_snapshot() {
    let mut text = String::new();
    let mut pending: Vec<Vec<String>> = vec![Vec::new()];
    while let Some(command) = pending.pop() {
        let mut line = vec!["tinkex".to_owned()];
        line.extend(command.iter().cloned());
        line.push("--help".to_owned());
        let outcome = replay::run_line(&line).await;
        assert_eq!(outcome.exit, 0, "{line:?}");
        // Print the global options only once.
        let shown = match (command.is_empty(), outcome.out.find("Global options:")) {
            (false, Some(at)) => {
                let after =
                    outcome.out[at..].find("\n\n").map_or("", |end| &outcome.out[at + end..]);
                format!("{}(global options){after}", &outcome.out[..at])
            }
            _ => outcome.out.clone(),
        };
        writeln!(text, "$ {}\n{shown}", line.join(" ")).unwrap();
        let commands = if command.is_empty() {
            outcome.out.split("Global options:\n").next().unwrap_or_default()
        } else {
            let list = outcome.out.split("Commands:\n").nth(1).unwrap_or_default();
            list.split("\n\n").next().unwrap_or_default()
        };
        let names = commands.lines().filter(|line| line.starts_with("  "));
        let names = names.filter(|line| !line.starts_with("    "));
        let mut subcommands: Vec<_> =
            names.filter_map(|line| line.split_whitespace().next()).collect();
        subcommands.retain(|name| *name != "help");
        let has_example = !subcommands.is_empty() || outcome.out.contains("Example");
        assert!(has_example, "{line:?} has no example");
        for name in subcommands.into_iter().rev() {
            pending.push(command.iter().cloned().chain([name.to_owned()]).collect());
        }
    }
    check("help.txt", &text);
}

/// Errors of all recordings, as text and as JSON.
#[tokio::test(start_paused = true)]
async fn errors_match_the_snapshot() {
    let mut text = String::new();
    for capture in capture::all().iter().filter(|capture| !replay::is_replayed_elsewhere(capture)) {
        // One deletion runs without a terminal, for the error about the missing confirmation.
        let at_terminal =
            capture.name != "checkpoint-delete-run-id" && ReplayCase::of(&capture.name).at_terminal;
        for json in [false, true] {
            let outcome = replay::run(capture, json, at_terminal).await;
            if outcome.exit != 0 {
                append(&mut text, &capture.line(json), &outcome);
            }
        }
    }
    check("failures.txt", &text);
}

/// Selected results in every format.
#[tokio::test(start_paused = true)]
async fn results_match_the_snapshot() {
    let shown = [
        "run-list",
        "run-info",
        "checkpoint-list",
        "checkpoint-info",
        "model-list",
        "auth-whoami",
        "billing-checkpoint-storage",
        "checkpoint-publish",
        "checkpoint-set-ttl",
    ];
    let mut text = String::new();
    for capture in capture::all().iter().filter(|capture| shown.contains(&capture.name.as_str())) {
        for format in ["table", "json", "csv", "plain"] {
            let mut line = capture.line(false);
            line.splice(1..1, ["--format".to_owned(), format.to_owned()]);
            let outcome = replay::run_as(capture, &line, false).await;
            assert_eq!(outcome.exit, 0, "{line:?}: {}", outcome.err);
            append(&mut text, &line, &outcome);
        }
    }
    check("results.txt", &text);
}
