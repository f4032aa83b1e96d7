use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::capture::{self, file};
use crate::compare::rows;
use crate::tcp_server::TcpServer;
use crate::terminal::{Terminal, screen};

const KEY: (&str, &str) = ("TINKER_API_KEY", "tml-test-0000");

/// Two runs, as on the recorded screen.
fn two_runs() -> String {
    let mut replies: Value = serde_json::from_str(&file("run-list.reply.json").unwrap()).unwrap();
    let body = &mut replies["replies"][0]["body"];
    body["training_runs"].as_array_mut().unwrap().truncate(2);
    body["cursor"]["total_count"] = 2.into();
    replies.to_string()
}

/// One file of 40,000 bytes.
fn one_file() -> String {
    let base = "http://127.0.0.1:18765/d";
    let urls = serde_json::json!({
        "urls": { "adapter_model.safetensors": format!("{base}/blob/w") },
        "expires": "2099-01-01T00:00:00Z",
    });
    let path = "/api/v1/training_runs/run-1/checkpoints/external_weights/hf/external_weights_urls";
    let reply = |path: &str, key: &str, value: Value| serde_json::json!({ "method": "GET", "path": path, "status": 200, key: value });
    serde_json::json!({ "base_url": base, "replies": [
        reply(path, "body", urls),
        reply("/blob/w", "text", "w".repeat(40_000).into()),
    ]})
    .to_string()
}

/// The recorded screen as rows, without what was drawn over.
fn recorded(name: &str) -> Vec<Vec<String>> {
    rows(&screen(&file(&format!("{name}.txt")).unwrap()), None)
}

/// Every recorded screen has a test here.
#[test]
fn every_recorded_screen_is_replayed() {
    let tests = include_str!("tty.rs");
    for capture in capture::all().iter().filter(|capture| capture.is_terminal()) {
        assert!(tests.contains(&format!("\"{}\"", capture.name)), "{}", capture.name);
    }
}

#[test]
fn a_table_on_a_terminal_has_colours_and_without_them_no_escapes_at_all() {
    let (home, server) = (tempfile::tempdir().unwrap(), TcpServer::start(&two_runs(), None));
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let (code, shown) = Terminal::start(&["run", "list"], env, home.path(), 120).end();
    assert_eq!((code, rows(&screen(&shown), None)), (0, recorded("tty-run-list")), "{shown}");
    for coloured in ["\u{1b}[96mrun-1", "\u{1b}[1mRun ID", "\u{1b}[3m"] {
        assert!(shown.contains(coloured), "{shown}");
    }
    let plain = [("NO_COLOR", "1"), ("TERM", "dumb")];
    for setting in plain {
        let env = env.into_iter().chain([setting]);
        let (code, shown) = Terminal::start(&["run", "list"], env, home.path(), 120).end();
        assert_eq!((code, rows(&shown, None)), (0, recorded("tty-run-list-no-color")));
        assert!(!shown.contains('\u{1b}'), "{shown:?}");
    }
    let (_, shown) = Terminal::start(&["run", "list"], env, home.path(), 50).end();
    let widest = screen(&shown).lines().map(|line| line.chars().count()).max();
    assert!(widest <= Some(50) && shown.contains('…') && shown.contains("run-1"), "{shown}");
}

#[test]
fn pages_are_counted_while_they_come() {
    let replies = file("run-list-all-pages.reply.json").unwrap();
    let (home, server) = (tempfile::tempdir().unwrap(), TcpServer::start(&replies, None));
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let line = ["run", "list", "--limit", "0"];
    let (code, shown) = Terminal::start(&line, env, home.path(), 120).end();
    let expected = recorded("tty-run-list-all-pages");
    assert_eq!((code, rows(&screen(&shown), None)), (0, expected), "{shown}");
    assert!(shown.contains("Fetching all training runs") && shown.contains("3/5"), "{shown}");
    let line = ["run", "list", "--limit", "0", "--color", "never"];
    let (code, shown) = Terminal::start(&line, env, home.path(), 120).end();
    assert_eq!(code, 0, "{shown}");
    assert!(!shown.contains('\u{1b}') && !shown.contains("Fetching"), "{shown:?}");
}

#[test]
fn a_refused_key_is_told_in_words() {
    let replies = file("error-401.reply.json").unwrap();
    let (home, server) = (tempfile::tempdir().unwrap(), TcpServer::start(&replies, None));
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let (code, shown) = Terminal::start(&["run", "list"], env, home.path(), 120).end();
    // As in "tty-error-401", without the literal of another language.
    assert_eq!(code, 3);
    assert!(shown.contains("401: Invalid API key") && !shown.contains("{'"), "{shown}");
    // As "tty-unexpected-error-traceback", which is no accident and needs no traceback.
    let line = ["checkpoint", "publish", "tinker://run-1"];
    let (code, shown) = Terminal::start(&line, env, home.path(), 120).end();
    assert_eq!(code, 2);
    assert!(shown.contains("tinker://run-1") && !shown.contains("Traceback"), "{shown}");
}

#[test]
fn a_key_is_typed_in_stars() {
    let replies = file("auth-login.reply.json").unwrap();
    let (home, server) = (tempfile::tempdir().unwrap(), TcpServer::start(&replies, None));
    let url = server.url();
    let env = [("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let mut terminal = Terminal::start(&["auth", "login"], env, home.path(), 120);
    terminal.wait_for("Paste your API key: ");
    terminal.press("tml-x\u{7f}secret\r");
    let (code, shown) = terminal.end();
    assert_eq!(code, 0, "{shown}");
    assert!(!shown.contains("tml-") && shown.contains("*****\u{8} \u{8}******"), "{shown}");
    let last = |rows: Vec<Vec<String>>| rows.last().unwrap().clone();
    assert_eq!(last(rows(&screen(&shown), None)), last(recorded("tty-auth-login")));
    let stored = fs::read_to_string(home.path().join(".tinker/credentials.json")).unwrap();
    assert!(stored.contains("tml-secret"));

    let home = tempfile::tempdir().unwrap();
    let env = [("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    for keys in ["tml-\u{3}", "\u{4}"] {
        let mut terminal = Terminal::start(&["auth", "login"], env, home.path(), 120);
        terminal.wait_for("Paste your API key: ");
        terminal.press(keys);
        let (code, shown) = terminal.end();
        // "tty-auth-login-ctrl-c" ends with 1.
        assert_eq!(code, if keys.len() > 1 { 130 } else { 3 }, "{shown}");
    }
    assert!(!home.path().join(".tinker").exists());
}

#[test]
fn deleting_asks_and_counts() {
    let replies = file("checkpoint-delete-prompt-y.reply.json").unwrap();
    let (home, server) = (tempfile::tempdir().unwrap(), TcpServer::start(&replies, None));
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let line = [
        "checkpoint",
        "delete",
        "tinker://run-1/weights/0001",
        "tinker://run-1/sampler_weights/final",
    ];
    let mut terminal = Terminal::start(&line, env, home.path(), 120);
    terminal.wait_for("[y/N]: ");
    terminal.press("y\r");
    let (code, shown) = terminal.end();
    let expected = recorded("tty-checkpoint-delete");
    assert_eq!((code, rows(&screen(&shown), None)), (0, expected), "{shown}");
    assert!(shown.contains("Deleting checkpoints") && shown.contains("/2"), "{shown}");

    let before = server.script.seen().len();
    let mut terminal = Terminal::start(&line, env, home.path(), 120);
    terminal.wait_for("[y/N]: ");
    terminal.press("\u{3}");
    let (code, shown) = terminal.end();
    assert_eq!(code, 130, "{shown}");
    assert!(screen(&shown).contains("\nerror: interrupted"), "{shown}");
    assert!(screen(&shown).contains("[y/N]: "), "the question stays: {shown}");
    assert_eq!(server.script.seen().len(), before, "nothing was asked, and nothing deleted");
}

#[test]
fn a_download_shows_how_far_it_is_and_goes_on_after_an_interrupt() {
    let (home, server) =
        (tempfile::tempdir().unwrap(), TcpServer::start(&one_file(), Some(20_000)));
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let line = ["checkpoint", "download", "tinker://run-1/external_weights/hf", "-o", "out"];
    let mut terminal = Terminal::start(&line, env, home.path(), 120);
    terminal.wait_for("/39.1 KB");
    terminal.press("\u{3}");
    let (code, shown) = terminal.end();
    assert_eq!(code, 130, "{shown}");
    assert!(shown.contains("out/run-1_external_weights_hf.part"), "{shown}");
    let target = home.path().join("out/run-1_external_weights_hf");
    assert!(!target.exists() && home.path().join("out/run-1_external_weights_hf.part").exists());

    server.go_on();
    let (code, shown) = Terminal::start(&line, env, home.path(), 120).end();
    assert_eq!(code, 0, "{shown}");
    let expected = recorded("tty-checkpoint-download");
    assert_eq!(rows(&screen(&shown), None), expected, "{shown}");
    let file = fs::read(target.join("adapter_model.safetensors")).unwrap();
    assert_eq!(file.len(), 40_000);
    assert!(!home.path().join("out/run-1_external_weights_hf.part").exists());
}

#[test]
fn an_error_names_the_server_and_without_colours_has_no_escapes() {
    let home = tempfile::tempdir().unwrap();
    // A port that was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{free}");
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    for setting in [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "xterm")] {
        let env = env.into_iter().chain([setting]);
        let line = ["run", "list", "--retry-for", "0"];
        let (code, shown) = Terminal::start(&line, env, home.path(), 120).end();
        assert_eq!(code, 5, "{shown}");
        assert!(shown.contains(&url) && shown.contains("refused"), "{shown}");
        assert!(!shown.contains('\u{1b}'), "nothing was drawn that could be cleared: {shown:?}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let replies = file("run-list-all-pages.reply.json").unwrap();
    let (home, server) = (tempfile::tempdir().unwrap(), TcpServer::start(&replies, None));
    let mut child = Command::new(env!("CARGO_BIN_EXE_tinkex"))
        .args(["run", "list", "--limit", "0"])
        .env_clear()
        .envs([KEY, ("TINKER_BASE_URL", &*server.url()), ("HOME", home.path().to_str().unwrap())])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(0));
    assert_eq!(String::from_utf8(ended.stderr).unwrap(), "");
}

#[test]
fn without_a_terminal_there_is_neither_progress_nor_colour() {
    let replies = file("run-list-all-pages.reply.json").unwrap();
    let (home, server) = (tempfile::tempdir().unwrap(), TcpServer::start(&replies, None));
    let ended = Command::new(env!("CARGO_BIN_EXE_tinkex"))
        .args(["run", "list", "--limit", "0"])
        .env_clear()
        .envs([KEY, ("TINKER_BASE_URL", &*server.url()), ("HOME", home.path().to_str().unwrap())])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let out = String::from_utf8(ended.stdout).unwrap();
    assert_eq!(rows(&out, None), recorded("tty-run-list-all-pages"));
    assert!(!out.contains('\u{1b}'));
    assert_eq!(String::from_utf8(ended.stderr).unwrap(), "");
}

#[test]
fn retries_are_told_on_a_terminal() {
    let replies = file("error-retry-after-header.reply.json").unwrap();
    // The wait is the server's to choose: none.
    let replies = replies.replace("\"retry-after\": \"2\"", "\"retry-after-ms\": \"1\"");
    let (home, server) = (tempfile::tempdir().unwrap(), TcpServer::start(&replies, None));
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let (code, shown) = Terminal::start(&["run", "list"], env, home.path(), 120).end();
    assert_eq!(code, 0, "{shown}");
    assert!(shown.contains("retrying at once (429)"), "{shown}");
}
