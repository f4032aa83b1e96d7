//! What people read, as files to look at: a change of words shows as a change of a file.
//!
//! A snapshot that does not fit is written beside the old one as `NAME.new`; if it is right, move it
//! over.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::capture;
use crate::replay::{self, ReplayOutput};

fn check(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/snapshots").join(name);
    let known = fs::read_to_string(&path).unwrap_or_default();
    let new = path.with_extension("txt.new");
    if known == text {
        // One of before may be there.
        let _ = fs::remove_file(new);
        return;
    }
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&new, text).unwrap();
    let at = known.lines().zip(text.lines()).take_while(|(a, b)| a == b).count();
    let line = |text: &str| text.lines().nth(at).unwrap_or_default().to_owned();
    panic!(
        "{name} is not what it was, from line {}:\n- {}\n+ {}\nif that is right: mv {} {}",
        at + 1,
        line(&known),
        line(text),
        new.display(),
        path.display()
    );
}

/// A line and what came of it, without what differs from time to time.
fn tell(text: &mut String, line: &[String], outcome: &ReplayOutput) {
    let steady = |text: &str| {
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
    let words = ["tinkex"].into_iter().chain(line.iter().skip(1).map(String::as_str));
    let words: Vec<_> = words.collect();
    writeln!(text, "$ {}", words.join(" ")).unwrap();
    write!(text, "{}{}", steady(&outcome.out), steady(&outcome.err)).unwrap();
    writeln!(text, "[exit {}]\n", outcome.exit).unwrap();
}

/// Every command's help teaches: what it does, its options, and examples where they help.
#[tokio::test(start_paused = true)]
async fn help_is_as_it_was() {
    let mut text = String::new();
    let mut open: Vec<Vec<String>> = vec![Vec::new()];
    while let Some(command) = open.pop() {
        let mut line = vec!["tinkex".to_owned()];
        line.extend(command.iter().cloned());
        line.push("--help".to_owned());
        let outcome = replay::run_line(&line).await;
        assert_eq!(outcome.exit, 0, "{line:?}");
        // The global options are told once.
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
        let mut below: Vec<_> = names.filter_map(|line| line.split_whitespace().next()).collect();
        below.retain(|name| *name != "help");
        let teaches = !below.is_empty() || outcome.out.contains("Example");
        assert!(teaches, "{line:?} has no example");
        for name in below.into_iter().rev() {
            open.push(command.iter().cloned().chain([name.to_owned()]).collect());
        }
    }
    check("help.txt", &text);
}

/// All failures of the captures, for people and for programs.
#[tokio::test(start_paused = true)]
async fn failures_are_as_they_were() {
    let mut text = String::new();
    for capture in capture::all().iter().filter(|capture| !replay::is_elsewhere(capture)) {
        for json in [false, true] {
            let outcome = replay::run(capture, json, capture.name.contains("prompt")).await;
            if outcome.exit != 0 {
                tell(&mut text, &capture.line(json), &outcome);
            }
        }
    }
    check("failures.txt", &text);
}

/// Results in every form.
#[tokio::test(start_paused = true)]
async fn results_are_as_they_were() {
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
    for capture in capture::all().iter().filter(|one| shown.contains(&one.name.as_str())) {
        for format in ["table", "json", "csv", "plain"] {
            let mut line = capture.line(false);
            line.splice(1..1, ["--format".to_owned(), format.to_owned()]);
            let outcome = replay::run_as(capture, &line, false).await;
            assert_eq!(outcome.exit, 0, "{line:?}: {}", outcome.err);
            tell(&mut text, &line, &outcome);
        }
    }
    check("results.txt", &text);
}
