//! Long-running commands in a terminal: progress, Ctrl-C and signals.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use crate::sandbox::Sandbox;
use crate::serve::ServeProcess;
use crate::stalled_stream::StallingProxy;
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
    assert!(sandbox.path("data-run/plot.svg").exists());
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

/// A chat whose completions do not end by themselves: the server sends their first token only.
struct EndlessChat {
    terminal: Terminal,
    _server: ServeProcess,
    _sandbox: Sandbox,
}

impl EndlessChat {
    fn start() -> Self {
        let mut sandbox = sandbox();
        sandbox.key = Some("tml-local");
        let server = ServeProcess::start(&sandbox, &["--port", "0", "--no-key"]);
        let proxy = StallingProxy::start(&server.url);
        let line = format!("chat tinkex/tiny --base-url {}", proxy.url);
        let terminal = Terminal::start_in(&sandbox, 80, &line);
        Self { terminal, _server: server, _sandbox: sandbox }
    }

    /// Waits for the prompt and submits a message.
    fn submit(&mut self) {
        self.terminal.wait_for("> ");
        self.terminal.press("Tell me a story.\r");
        self.terminal.wait_for("story.");
        self.terminal.wait_for("\n");
    }

    /// Submits a message and waits for the first token of its completion.
    fn start_completion(&mut self) {
        self.submit();
        self.terminal.wait_for_text();
    }

    /// Ends the chat with a command.
    fn quit(mut self) {
        self.terminal.wait_for("> ");
        self.terminal.press("/quit\r");
        let (code, shown) = self.terminal.end();
        assert_eq!(code, 0, "{shown}");
    }
}

#[test]
fn ctrl_c_stops_the_completion_but_not_the_chat() {
    let mut chat = EndlessChat::start();
    chat.start_completion();
    chat.terminal.press("\u{3}");
    chat.terminal.wait_for("(stopped)");
    chat.quit();
}

#[test]
fn an_interrupt_between_a_line_and_its_completion_stops_the_completion() {
    let mut chat = EndlessChat::start();
    for _ in 0..3 {
        chat.submit();
        chat.terminal.interrupt();
        chat.terminal.wait_for("(stopped)");
    }
    chat.quit();
}

#[test]
fn an_interrupt_while_a_line_is_edited_does_not_end_the_chat() {
    let mut chat = EndlessChat::start();
    chat.terminal.wait_for("> ");
    chat.terminal.interrupt();
    chat.terminal.press("/reset\r");
    chat.terminal.wait_for("(conversation cleared)");
    chat.quit();
}

#[test]
fn sigterm_during_a_completion_ends_the_chat() {
    let mut chat = EndlessChat::start();
    chat.start_completion();
    chat.terminal.terminate();
    let (code, shown) = chat.terminal.end();
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
