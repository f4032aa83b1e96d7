//! Terminal sessions of the Python CLI, replayed in a pseudo-terminal.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::capture::{self, file};
use crate::compare::rows;
use crate::tcp_server::TcpServer;
use crate::terminal::{Terminal, screen};

const KEY: (&str, &str) = ("TINKER_API_KEY", "tml-test-0000");

/// Returns a script with the two runs of the recorded screen.
fn two_runs() -> String {
    let mut replies: Value = serde_json::from_str(&file("run-list.reply.json").unwrap()).unwrap();
    let body = &mut replies["replies"][0]["body"];
    body["training_runs"].as_array_mut().unwrap().truncate(2);
    body["cursor"]["total_count"] = 2.into();
    replies.to_string()
}

/// Returns a script with a checkpoint that has one file of 40,000 bytes.
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

/// Returns the final screen of a recording as rows.
fn recorded(name: &str) -> Vec<Vec<String>> {
    rows(&screen(&file(&format!("{name}.txt")).unwrap()), None)
}

/// Every terminal recording must be named in this file.
#[test]
fn every_terminal_recording_has_a_test() {
    let tests = include_str!("tty.rs");
    for capture in capture::all().iter().filter(|capture| capture.is_terminal()) {
        assert!(tests.contains(&format!("\"{}\"", capture.name)), "{}", capture.name);
    }
}

#[test]
fn table_is_colored_unless_colors_are_disabled() {
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(&two_runs(), None);
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let (code, shown) = Terminal::start(&["run", "list"], env, home.path(), 120).end();
    assert_eq!((code, rows(&screen(&shown), None)), (0, recorded("tty-run-list")), "{shown}");
    for colored in ["\u{1b}[96mrun-1", "\u{1b}[1mRun ID", "\u{1b}[3m"] {
        assert!(shown.contains(colored), "{shown}");
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
fn fetching_pages_shows_progress() {
    let replies = file("run-list-all-pages.reply.json").unwrap();
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(&replies, None);
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
fn rejected_key_and_bad_path_print_plain_messages() {
    let replies = file("error-401.reply.json").unwrap();
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(&replies, None);
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let (code, shown) = Terminal::start(&["run", "list"], env, home.path(), 120).end();
    // The recording "tty-error-401" prints a Python dictionary.
    assert_eq!(code, 3);
    assert!(shown.contains("Invalid API key (status 401)") && !shown.contains("{'"), "{shown}");
    // The recording "tty-unexpected-error-traceback" prints a traceback.
    let line = ["checkpoint", "publish", "tinker://run-1"];
    let (code, shown) = Terminal::start(&line, env, home.path(), 120).end();
    assert_eq!(code, 2);
    assert!(shown.contains("tinker://run-1") && !shown.contains("Traceback"), "{shown}");
}

#[test]
fn typed_key_is_masked() {
    let replies = file("auth-login.reply.json").unwrap();
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(&replies, None);
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
        // The recording "tty-auth-login-ctrl-c" ends with 1.
        assert_eq!(code, if keys.len() > 1 { 130 } else { 3 }, "{shown}");
    }
    assert!(!home.path().join(".tinker").exists());
}

#[test]
fn deletion_asks_for_confirmation_and_shows_progress() {
    let replies = file("checkpoint-delete-prompt-y.reply.json").unwrap();
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(&replies, None);
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

    let before = server.script.requests().len();
    let mut terminal = Terminal::start(&line, env, home.path(), 120);
    terminal.wait_for("[y/N]: ");
    terminal.press("\u{3}");
    let (code, shown) = terminal.end();
    assert_eq!(code, 130, "{shown}");
    assert!(screen(&shown).contains("\nerror: interrupted"), "{shown}");
    assert!(screen(&shown).contains("[y/N]: "), "the prompt was erased: {shown}");
    assert_eq!(server.script.requests().len(), before, "a request was sent");
}

#[test]
fn download_shows_progress_and_resumes_after_an_interrupt() {
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(&one_file(), Some(20_000));
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

    server.resume();
    let (code, shown) = Terminal::start(&line, env, home.path(), 120).end();
    assert_eq!(code, 0, "{shown}");
    let expected = recorded("tty-checkpoint-download");
    assert_eq!(rows(&screen(&shown), None), expected, "{shown}");
    let file = fs::read(target.join("adapter_model.safetensors")).unwrap();
    assert_eq!(file.len(), 40_000);
    assert!(!home.path().join("out/run-1_external_weights_hf.part").exists());
}

#[test]
fn export_shows_the_progress_of_the_download_and_of_the_files() {
    let mut script: Value = serde_json::from_str(&one_file()).unwrap();
    script["replies"].as_array_mut().unwrap().push(json!({
        "method": "POST", "path": "/api/v1/weights_info", "status": 200,
        "body": { "base_model": "org/base", "is_lora": true },
    }));
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(&script.to_string(), Some(20_000));
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let line = ["export", "tinker://run-1/external_weights/hf", "--format", "peft"];
    let line = [&line[..], &["--to", "out/adapter"]].concat();
    let mut terminal = Terminal::start(&line, env, home.path(), 120);
    terminal.wait_for("Downloading the checkpoint");
    terminal.wait_for("/39.1 KB");
    terminal.press("\u{3}");
    let (code, shown) = terminal.end();
    assert_eq!(code, 130, "{shown}");
    assert!(!screen(&shown).contains("Downloading"), "{shown}");
    assert!(!home.path().join("out").exists(), "nothing is left");

    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/qwen3");
    let base = golden.to_str().unwrap();
    let adapter = golden.join("adapter");
    let line = ["export", adapter.to_str().unwrap(), "--base", base, "--to", "merged"];
    let (code, shown) = Terminal::start(&line, env, home.path(), 120).end();
    assert_eq!(code, 0, "{shown}");
    assert!(shown.contains("Writing merged") && shown.contains(" left"), "{shown}");
    let last = screen(&shown);
    assert!(!last.contains("Writing merged") && last.contains("Written to"), "{last}");
}

#[test]
fn import_shows_that_it_is_running() {
    let script = r#"{"base_url":"http://127.0.0.1:18765/i","replies":[]}"#;
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(script, None);
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/qwen3/adapter");
    let line = ["import", golden.to_str().unwrap()];
    let (code, shown) = Terminal::start(&line, env, home.path(), 200).end();
    assert_eq!(code, 7, "{shown}");
    assert!(shown.contains("importing "), "{shown}");
    let last = screen(&shown);
    assert!(!last.contains("importing ") && last.contains("cannot import adapters"), "{last}");
}

#[test]
fn connection_error_names_the_server_without_escapes() {
    let home = tempfile::tempdir().unwrap();
    // The listener is dropped, so nothing listens on the port.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{free}");
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    for setting in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let env = env.into_iter().chain([setting]);
        let line = ["run", "list", "--retry-for", "0"];
        let (code, shown) = Terminal::start(&line, env, home.path(), 120).end();
        assert_eq!(code, 5, "{shown}");
        assert!(shown.contains(&url) && shown.contains("refused"), "{shown}");
        assert!(!shown.contains('\u{1b}'), "escape sequences were printed: {shown:?}");
    }
}

#[test]
fn closed_standard_output_is_not_an_error() {
    let replies = file("run-list-all-pages.reply.json").unwrap();
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(&replies, None);
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
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

#[test]
fn piped_output_has_neither_progress_nor_color() {
    let replies = file("run-list-all-pages.reply.json").unwrap();
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(&replies, None);
    let output = Command::new(env!("CARGO_BIN_EXE_tinkex"))
        .args(["run", "list", "--limit", "0"])
        .env_clear()
        .envs([KEY, ("TINKER_BASE_URL", &*server.url()), ("HOME", home.path().to_str().unwrap())])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    assert_eq!(rows(&out, None), recorded("tty-run-list-all-pages"));
    assert!(!out.contains('\u{1b}'));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

#[test]
fn retries_are_reported_on_a_terminal() {
    let replies = file("error-retry-after-header.reply.json").unwrap();
    // Replace the two-second delay by one millisecond.
    let replies = replies.replace("\"retry-after\": \"2\"", "\"retry-after-ms\": \"1\"");
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(&replies, None);
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let (code, shown) = Terminal::start(&["run", "list"], env, home.path(), 120).end();
    assert_eq!(code, 0, "{shown}");
    assert!(shown.contains("retrying now (429)"), "{shown}");
}

/// A sample that waits for the shared backoff is announced like any other retry.
#[test]
fn samples_held_by_a_rate_limit_are_reported_on_a_terminal() {
    let post = |path: &str, body: Value| json!({"method": "POST", "path": path, "status": 200, "body": body});
    let limited = json!({"status": 429, "headers": {"retry-after-ms": "1"}, "body": {}});
    let rejected = json!({"status": 400, "body": {"detail": "scripted"}});
    let replies = json!({"base_url": "http://a.test", "replies": [
        {"method": "GET", "path": "/api/v1/get_server_capabilities", "status": 200,
         "body": {"supported_models": [{"model_name": "base"}]}},
        post("/api/v1/create_session", json!({"session_id": "s"})),
        post("/api/v1/create_sampling_session", json!({"sampling_session_id": "s:sample:0"})),
        {"method": "POST", "path": "/api/v1/asample", "replies": [limited, rejected]},
    ]});
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(&replies.to_string(), None);
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let command = ["sample", "base", "--tokens", "1,2"];
    let (code, shown) = Terminal::start(&command, env, home.path(), 120).end();
    assert_ne!(code, 0, "{shown}");
    assert!(shown.contains("retrying now (429)"), "{shown}");
}

/// Text of a server that clears the screen and shows other text in another order.
const SPOOFED: &str = "a\u{1b}[2J\u{9b}2J\u{202e}exe.txt";
/// The same text on a terminal.
const ESCAPED: &str = "a\\u{1b}[2J\\u{9b}2J\\u{202e}exe.txt";

#[test]
fn text_of_a_server_cannot_control_the_terminal() {
    let mut runs: Value = serde_json::from_str(&two_runs()).unwrap();
    runs["replies"][0]["body"]["training_runs"][0]["base_model"] = SPOOFED.into();
    let failure = json!({"base_url": "http://a.test", "replies": [
        {"method": "GET", "path": "/api/v1/training_runs", "status": 400,
         "body": {"detail": SPOOFED}},
    ]});
    for (replies, arguments) in [
        (&runs, &["run", "list"][..]),
        (&runs, &["run", "list", "-f", "csv"]),
        (&runs, &["run", "list", "-f", "plain"]),
        (&failure, &["run", "list"]),
    ] {
        let home = tempfile::tempdir().unwrap();
        let server = TcpServer::start(&replies.to_string(), None);
        let url = server.url();
        let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
        let (_, shown) = Terminal::start(arguments, env, home.path(), 250).end();
        assert!(shown.contains(ESCAPED), "{arguments:?}: {shown:?}");
        for control in ["\u{1b}[2J", "\u{9b}", "\u{202e}"] {
            assert!(!shown.contains(control), "{arguments:?}: {shown:?}");
        }
    }
    // JSON has the same text with escapes.
    let home = tempfile::tempdir().unwrap();
    let server = TcpServer::start(&runs.to_string(), None);
    let url = server.url();
    let env = [KEY, ("TINKER_BASE_URL", &*url), ("HOME", home.path().to_str().unwrap())];
    let (_, shown) = Terminal::start(&["run", "list", "--json"], env, home.path(), 250).end();
    assert!(shown.contains("a\\u001b[2J\\u009b2J\\u202eexe.txt"), "{shown:?}");
}

/// A terminal gets the text of a model without its escape sequences; a pipe gets it verbatim.
#[tokio::test]
async fn decoded_text_cannot_control_the_terminal() {
    let sandbox = crate::sandbox::Sandbox::new();
    let text = "one\n\ttwo \u{1b}[2J\u{202e}x";
    let args = ["tokenizer", "encode", "tinkex/tiny", text, "--format", "plain"];
    let ids = sandbox.run_args(args).await.ok().out;
    let line = format!("tokenizer decode tinkex/tiny {}", ids.trim());
    assert_eq!(sandbox.run(&line).await.ok().out, format!("{text}\n"));
    let (code, shown) = Terminal::start_in(&sandbox, 80, &line).end();
    assert_eq!(code, 0, "{shown}");
    assert!(!shown.contains("\u{1b}[2J") && !shown.contains('\u{202e}'), "{shown:?}");
    assert!(shown.contains("\ttwo \\u{1b}[2J\\u{202e}x"), "{shown:?}");
}
