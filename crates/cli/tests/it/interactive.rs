//! What takes long, with somebody in front of it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use crate::sandbox::Sandbox;
use crate::terminal::Terminal;

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    let line = |at| format!("{{\"prompt\": \"{at} and\", \"completion\": \" so on\"}}\n");
    sandbox.write("talks.jsonl", &(0..8).map(line).collect::<String>());
    sandbox
}

#[test]
fn training_shows_how_far_it_is_and_stops_when_asked() {
    let sandbox = sandbox();
    let mut terminal =
        Terminal::at(&sandbox, 80, "train talks.jsonl --local --steps 100000 --batch-size 4");
    terminal.wait_for("tokens/s");
    terminal.press("\u{3}");
    terminal.wait_for("stopping: saving first");
    let (code, seen) = terminal.end();
    assert_eq!(code, 130, "{seen}");
    assert!(seen.contains("tokens/s") && seen.contains(" left"), "{seen}");
    assert!(seen.contains("stopped at step") && seen.contains("--resume"), "{seen}");
    assert!(sandbox.path("talks-run/loss.svg").exists());
}

#[test]
fn a_narrow_window_has_no_broken_lines() {
    let sandbox = sandbox();
    let terminal = Terminal::at(&sandbox, 24, "train talks.jsonl --local --steps 3 --batch-size 4");
    let (code, seen) = terminal.end();
    assert_eq!(code, 0, "{seen}");
    let drawn = seen.split('\r').filter(|part| part.contains("step ") && part.contains("\u{1b}[K"));
    for part in drawn {
        let shown = part.split('\u{1b}').next().unwrap();
        assert!(shown.chars().count() < 24, "{shown:?}");
    }
}

#[test]
fn ctrl_c_stops_an_answer_and_not_the_conversation() {
    let sandbox = sandbox();
    // So daring that it hardly ever finds the end of its answer.
    let line = "chat --local --max-tokens 1900 -t 5";
    let mut terminal = Terminal::at(&sandbox, 80, line);
    terminal.wait_for("> ");
    terminal.press("Tell me a story.\r");
    terminal.wait_for("story.");
    terminal.wait_for("\n");
    terminal.press("\u{3}");
    terminal.wait_for("(stopped)");
    terminal.wait_for("> ");
    terminal.press("/quit\r");
    let (code, seen) = terminal.end();
    assert_eq!(code, 0, "{seen}");
}

/// What is under way when the program's own server stops has nothing to complain about.
#[test]
fn an_interrupt_is_all_that_is_told_of_an_interrupt() {
    let sandbox = sandbox();
    let mut terminal = Terminal::at(&sandbox, 80, "quickstart --steps 100000");
    terminal.wait_for("tokens/s");
    terminal.press("\u{3}");
    let (code, seen) = terminal.end();
    assert_eq!(code, 130, "{seen}");
    let after = seen.split("^C").nth(1).unwrap();
    assert!(after.contains("error: interrupted"), "{seen}");
    for noise in ["warning", "retrying", "no connection"] {
        assert!(!after.contains(noise), "{seen}");
    }
}

#[test]
fn a_signal_ends_a_conversation_in_a_terminal() {
    let sandbox = sandbox();
    let mut terminal = Terminal::at(&sandbox, 80, "chat --local");
    terminal.wait_for("> ");
    terminal.terminate();
    let (code, seen) = terminal.end();
    assert_eq!(code, 130, "{seen}");
}

#[test]
fn a_signal_ends_a_conversation_through_a_pipe() {
    let sandbox = sandbox();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_tinkex"))
        .args(["chat", "--local", "-t", "0"])
        .current_dir(sandbox.path(""))
        .env_clear()
        .envs(sandbox.variables())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It stays open to the end.
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"What does a cow say?\n").unwrap();
    let mut said = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "A cow says \"moo\".\n");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
}
