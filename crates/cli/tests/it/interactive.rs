//! Long-running commands in a terminal: progress, Ctrl-C and signals.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use crate::sandbox::Sandbox;
use crate::terminal::Terminal;

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    let example = |at| format!("{{\"prompt\": \"{at} and\", \"completion\": \" so on\"}}\n");
    sandbox.write("data.jsonl", &(0..8).map(example).collect::<String>());
    sandbox
}

#[test]
fn training_shows_progress_and_stops_on_ctrl_c() {
    let sandbox = sandbox();
    let mut terminal =
        Terminal::start_in(&sandbox, 80, "train data.jsonl --local --steps 100000 --batch-size 4");
    terminal.wait_for("tokens/s");
    terminal.press("\u{3}");
    terminal.wait_for("saving a checkpoint");
    let (code, shown) = terminal.end();
    assert_eq!(code, 130, "{shown}");
    assert!(shown.contains("tokens/s") && shown.contains(" left"), "{shown}");
    assert!(shown.contains("stopped at step") && shown.contains("--resume"), "{shown}");
    assert!(sandbox.path("data-run/loss.svg").exists());
}

#[test]
fn progress_fits_into_a_narrow_terminal() {
    let sandbox = sandbox();
    let terminal =
        Terminal::start_in(&sandbox, 24, "train data.jsonl --local --steps 3 --batch-size 4");
    let (code, shown) = terminal.end();
    assert_eq!(code, 0, "{shown}");
    let text = crate::compare::without_escapes(&shown);
    let drawn = || text.split(['\r', '\n']).filter(|line| line.starts_with("step "));
    assert!(drawn().count() > 1, "{shown:?}");
    assert!(drawn().all(|line| line.chars().count() < 24), "{shown:?}");
}

#[test]
fn ctrl_c_stops_the_completion_but_not_the_chat() {
    // A completion may end by itself before the key arrives; at this temperature that is rare.
    let stopped = (0..5).find_map(|_| stop_completion("chat --local --max-tokens 1900 -t 5"));
    let (_sandbox, mut terminal) = stopped.expect("Ctrl-C stops one of five completions");
    terminal.press("/quit\r");
    let (code, shown) = terminal.end();
    assert_eq!(code, 0, "{shown}");
}

/// Starts a chat, presses Ctrl-C during its first completion and waits for the next prompt. Returns
/// `None` if the completion had ended by itself.
fn stop_completion(line: &str) -> Option<(Sandbox, Terminal)> {
    let sandbox = sandbox();
    let mut terminal = Terminal::start_in(&sandbox, 80, line);
    terminal.wait_for("> ");
    terminal.press("Tell me a story.\r");
    terminal.wait_for("story.");
    terminal.wait_for("\n");
    terminal.wait_for_text();
    terminal.press("\u{3}");
    terminal.wait_for("> ");
    terminal.has_shown("(stopped)").then_some((sandbox, terminal))
}

/// The signal arrives while the line is edited, between the line and its completion, or during the
/// completion.
#[test]
fn an_interrupt_at_any_time_does_not_end_the_chat() {
    let sandbox = sandbox();
    let mut terminal = Terminal::start_in(&sandbox, 80, "chat --local --max-tokens 40 -t 5");
    for pause in [0, 20_000, 50_000, 100_000, 200_000, 400_000] {
        terminal.wait_for("> ");
        terminal.press("Tell me a story.\r");
        // Lets the program proceed, without a claim about how far.
        (0..pause).for_each(|_| std::hint::spin_loop());
        terminal.interrupt();
    }
    terminal.wait_for("> ");
    terminal.press("/quit\r");
    let (code, shown) = terminal.end();
    assert_eq!(code, 0, "{shown}");
}

#[test]
fn sigterm_during_a_completion_ends_the_chat() {
    let sandbox = sandbox();
    let mut terminal = Terminal::start_in(&sandbox, 80, "chat --local --max-tokens 1900 -t 5");
    terminal.wait_for("> ");
    terminal.press("Tell me a story.\r");
    terminal.wait_for("story.");
    terminal.wait_for("\n");
    terminal.wait_for_text();
    terminal.terminate();
    let (code, shown) = terminal.end();
    assert_eq!(code, 130, "{shown}");
}

/// Requests that fail because the in-process server stops must not be reported.
#[test]
fn ctrl_c_prints_only_the_interrupt_error() {
    let sandbox = sandbox();
    let mut terminal = Terminal::start_in(&sandbox, 80, "quickstart --steps 100000");
    terminal.wait_for("tokens/s");
    terminal.press("\u{3}");
    let (code, shown) = terminal.end();
    assert_eq!(code, 130, "{shown}");
    let after = shown.split("^C").nth(1).unwrap();
    assert!(after.contains("error:\u{1b}[0m interrupted"), "{shown}");
    for noise in ["warning", "retrying", "no connection"] {
        assert!(!after.contains(noise), "{shown}");
    }
}

#[test]
fn sigterm_ends_a_chat_in_a_terminal() {
    let sandbox = sandbox();
    let mut terminal = Terminal::start_in(&sandbox, 80, "chat --local");
    terminal.wait_for("> ");
    terminal.terminate();
    let (code, shown) = terminal.end();
    assert_eq!(code, 130, "{shown}");
}

#[test]
fn sigterm_ends_a_chat_with_piped_input() {
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
    // Keep the pipe open until the program has ended.
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"What does a cow say?\n").unwrap();
    let mut completion = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut completion).unwrap();
    assert_eq!(completion, "A cow says \"moo\".\n");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
}
