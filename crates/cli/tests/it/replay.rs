//! Replays the recorded commands of the Python CLI and compares requests, tables, files and errors.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::{Arc, Mutex};

use futures_util::FutureExt as _;
use serde_json::Value;
use tinkex::Env;
use tinkex_cli::{Environment, Input, Interrupt, LogScope, Terminals};

use crate::capture::{self, Capture, file};
use crate::compare::{contains_all, rows};
use crate::scripted_server::ScriptedServer;

/// Recordings that end with an error, with the exit code and the texts that the message must contain.
///
/// `!` before the code means that the error is found before any request is sent.
const EXPECTED_FAILURES: &[(&str, &str, &[&str])] = &[
    ("auth-credential-cmd-plain-server", "3", &["TINKER_API_KEY"]),
    ("auth-login-401", "3", &["Invalid API key"]),
    ("auth-login-500-text", "5", &["500"]),
    ("auth-login-already", "1", &["already logged in", "auth logout"]),
    ("auth-login-bad-json", "1", &["key_id"]),
    ("auth-login-empty", "3", &["no API key"]),
    ("auth-login-eof", "3", &["no API key"]),
    ("auth-login-unreachable", "5", &["connection to the server failed"]),
    ("auth-logout-corrupt-file", "1", &["credentials.json"]),
    (
        "auth-logout-generated-server-error",
        "6",
        &["43", "Example Org", "tinker-cli-host", "/keys/43"],
    ),
    ("auth-logout-none", "3", &["no default credential", "auth login"]),
    ("auth-status-401", "3", &[]),
    ("auth-status-402", "1", &[]),
    ("auth-status-no-credentials", "3", &["TINKER_API_KEY"]),
    ("auth-whoami-jwt-disabled", "3", &["plain API key"]),
    ("auth-whoami-token-401", "3", &[]),
    ("billing-usage-403", "3", &[]),
    ("billing-usage-bad-date", "!2", &["monday"]),
    ("checkpoint-delete-bad-date", "!2", &["yesterday"]),
    ("checkpoint-delete-bad-prefix", "!2", &["run-1/weights/0001"]),
    ("checkpoint-delete-bad-structure", "!2", &["tinker://run-1/0001"]),
    ("checkpoint-delete-bad-type", "!2", &["bogus", "sampler_weights"]),
    ("checkpoint-delete-both", "!2", &["--run-id"]),
    ("checkpoint-delete-filters-no-run", "!2", &["--run-id"]),
    ("checkpoint-delete-nothing", "!2", &["tinker://RUN", "--run-id"]),
    ("checkpoint-delete-partial-failure", "6", &["sampler_weights/final"]),
    ("checkpoint-delete-prompt-default", "!0", &[]),
    ("checkpoint-delete-prompt-eof", "!1", &["no answer"]),
    ("checkpoint-delete-prompt-n", "!0", &[]),
    ("checkpoint-download-404", "4", &[]),
    ("checkpoint-download-bad-path", "!2", &["run-1/weights/0001"]),
    ("checkpoint-download-blob-404", "4", &[]),
    ("checkpoint-download-exists", "!1", &["run-1_external_weights_hf", "--force"]),
    ("checkpoint-download-no-files", "4", &["tinker://run-1/external_weights/hf"]),
    ("checkpoint-download-sampler", "!2", &["sampler_weights", "weights"]),
    ("checkpoint-download-unsafe", "1", &["../../evil"]),
    ("checkpoint-info-bad-kind", "!2", &["tinker://run-1/foo/0001"]),
    ("checkpoint-info-bad-prefix", "!2", &["run-1/weights/0001"]),
    ("checkpoint-info-bad-structure", "!2", &["tinker://run-1/0001"]),
    ("checkpoint-info-not-found", "4", &["tinker://run-1/weights/9999"]),
    ("checkpoint-info-run-404", "4", &["run-9"]),
    ("checkpoint-publish-404", "4", &[]),
    ("checkpoint-publish-bad-prefix", "!2", &["weights/0001"]),
    ("checkpoint-publish-bad-structure", "!2", &["tinker://run-1"]),
    ("checkpoint-push-hf-derived-repo", "4", &[]),
    ("checkpoint-push-hf-no-adapter", "1", &["adapter_config.json"]),
    ("checkpoint-push-hf-not-logged-in", "!3", &["HF_TOKEN"]),
    ("checkpoint-push-hf-sampler", "!2", &["sampler_weights"]),
    ("checkpoint-set-ttl-both", "!2", &["--ttl", "--remove"]),
    ("checkpoint-set-ttl-neither", "!2", &["--ttl"]),
    ("checkpoint-set-ttl-out-of-range", "1", &[]),
    ("error-400", "1", &[]),
    ("error-401", "3", &[]),
    ("error-401-config-stage", "3", &["API key"]),
    ("error-402-billing", "1", &[]),
    ("error-403", "3", &[]),
    ("error-403-config-stage", "3", &[]),
    ("error-404", "4", &[]),
    ("error-404-empty-body", "4", &[]),
    ("error-404-text-body", "4", &[]),
    ("error-408-timeout-status", "5", &["--retry-for"]),
    ("error-409-conflict", "1", &[]),
    ("error-410", "1", &[]),
    ("error-418", "1", &[]),
    ("error-422", "1", &[]),
    ("error-429-rate-limit", "5", &["--retry-for"]),
    ("error-500-internal", "5", &["--retry-for"]),
    ("error-503-text-body", "5", &["--retry-for"]),
    ("error-bad-key-prefix", "!3", &["tml-"]),
    ("error-config-stage-500", "5", &[]),
    ("error-connection-refused", "5", &["connection to the server failed", "TINKER_BASE_URL"]),
    ("error-connection-refused-auth-status", "5", &["connection to the server failed"]),
    ("error-connection-refused-model-list", "5", &["connection to the server failed"]),
    ("error-corrupt-credentials", "1", &["credentials.json"]),
    ("error-no-credentials", "!3", &["TINKER_API_KEY", "auth login"]),
    ("error-no-credentials-model-list", "!3", &["TINKER_API_KEY", "auth login"]),
    ("error-not-json", "1", &["TINKER_BASE_URL"]),
    ("error-read-timeout", "5", &["timed out"]),
    ("error-read-timeout-pyqwest", "5", &["timed out"]),
    ("error-schema", "1", &["training_run_id"]),
    ("error-sigint", "130", &["interrupted"]),
    ("error-sigint-prompt", "!130", &["interrupted"]),
    ("model-list-nomatch", "4", &["zzz", "tml:organization:org-9", "model list"]),
    ("run-list-bad-column", "!2", &["nope", "checkpoint_time"]),
    ("session-export-trace-404", "4", &[]),
    ("session-export-trace-blob-403", "3", &["expired"]),
    ("session-export-trace-failed", "1", &[]),
    ("usage-bad-format", "!2", &["yaml", "table"]),
    ("usage-bad-int", "!2", &["abc", "--limit"]),
    ("usage-extra-argument", "!2", &["'b'"]),
    ("usage-group-noargs", "!2", &["list"]),
    ("usage-missing-argument", "!2", &["RUN_ID"]),
    ("usage-prefix-abbrev", "!2", &["--lim", "--limit"]),
    ("usage-unknown-command", "!2", &["frobnicate"]),
    ("usage-unknown-option", "!2", &["--nope"]),
    ("usage-unknown-subcommand", "!2", &["frob"]),
];

/// Returns the expected table. It differs from the recording where our output differs on purpose;
/// `None` skips the comparison.
fn expected_table(name: &str) -> Option<String> {
    match name {
        // Without a terminal, cells are not truncated.
        "checkpoint-list-80col" => file("checkpoint-list.table.txt"),
        "run-list-80col" => file("run-list.table.txt"),
        // Markup is printed literally, and control characters are escaped.
        "run-info-odd-text" => {
            let text = file("run-info-odd-text.table.txt").unwrap();
            let text = text.replace("│ x ", "│ [red]x[/red] ");
            let text = text.replace("│ a                                    │", "│ a\\nb │");
            Some(
                text.lines()
                    .filter(|line| !line.contains("│ b "))
                    .map(|l| format!("{l}\n"))
                    .collect(),
            )
        }
        // We print an empty table with title and columns, and accept options that Python rejects.
        "billing-usage-empty"
        | "billing-checkpoint-storage-empty"
        | "usage-format-after-command"
        | "usage-version-flag" => None,
        // The program name and version are ours.
        "version" => Some(format!("tinkex {}\n", env!("CARGO_PKG_VERSION"))),
        // We do not wrap a title that is wider than its table.
        "checkpoint-push-hf" => {
            let text = file("checkpoint-push-hf.table.txt").unwrap();
            let (first, rest) = text.split_once('\n').unwrap();
            Some(format!("{} {}", first.trim(), rest.trim_start()))
        }
        // We report failed deletions on standard error.
        "checkpoint-delete-partial-failure" => Some("Deleted 1 checkpoint(s)\n".to_owned()),
        _ => file(&format!("{name}.table.txt")),
    }
}

/// Returns whether `tty.rs` replays the recording.
pub(crate) fn is_replayed_elsewhere(capture: &Capture) -> bool {
    capture.is_terminal()
}

/// Output stream that keeps what is written. Clones share the bytes.
#[derive(Clone, Default)]
pub(crate) struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Sink {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

/// Exit code, output and requests of a replayed command.
pub(crate) struct ReplayOutput {
    pub(crate) exit: u8,
    pub(crate) out: String,
    pub(crate) err: String,
    requests: Vec<Value>,
    pub(crate) home: tempfile::TempDir,
    pub(crate) work: tempfile::TempDir,
}

/// Runs the recorded command. With `interactive`, standard input is a terminal, so prompts appear.
pub(crate) async fn run(capture: &Capture, json: bool, interactive: bool) -> ReplayOutput {
    run_as(capture, &capture.line(json), interactive).await
}

/// Runs a command that sends no request.
pub(crate) async fn run_line(line: &[String]) -> ReplayOutput {
    let version = capture::all().into_iter().find(|capture| capture.name == "version");
    run_as(&version.unwrap(), line, false).await
}

/// Runs another command in the environment of a recording.
pub(crate) async fn run_as(capture: &Capture, line: &[String], interactive: bool) -> ReplayOutput {
    let (home, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    capture.prepare(home.path(), work.path());
    let env = capture.env(home.path());
    let interrupt = Interrupt::default();
    let interrupted = capture.name.starts_with("error-sigint");
    let server =
        ScriptedServer::new(&capture.replies_text(), interrupted.then(|| interrupt.clone()));
    let (out, err, http) = (Sink::default(), Sink::default(), server.clone());
    let (silent_input, _writer) = std::io::pipe().unwrap();
    let input = match capture.name.as_str() {
        "error-sigint-prompt" => {
            // Interrupt a prompt that is never answered.
            interrupt.press();
            Input::new(std::io::BufReader::new(silent_input))
        }
        _ => Input::new(std::io::Cursor::new(capture.stdin().to_owned())),
    };
    let mut environment = Environment {
        variables: Env::from_pairs(env.iter().map(|(name, value)| (name.as_str(), value.as_str()))),
        folder: work.path().to_owned(),
        out: Box::new(out.clone()),
        err: Box::new(err.clone()),
        input,
        terminals: Terminals { input: interactive, ..Terminals::default() },
        interrupt,
        log_scope: LogScope::ThisThread,
        prepare: Box::new(move |client| client.http(http.clone())),
    };
    let args = ["tinkex"].into_iter().chain(line.iter().skip(1).map(String::as_str));
    let line = args.map(Into::into).collect();
    let exit = tinkex_cli::run(&mut environment, line).await.code();
    ReplayOutput { exit, out: out.text(), err: err.text(), requests: server.requests(), home, work }
}

/// Returns the distinct requests as text, without telemetry and heartbeats.
fn distinct_requests(requests: &[Value]) -> BTreeSet<String> {
    let relevant = |request: &&Value| {
        let path = request["path"].as_str().unwrap();
        !path.ends_with("/telemetry") && !path.ends_with("/session_heartbeat")
    };
    let describe = |request: &Value| {
        let text = |key: &str| match &request[key] {
            Value::Null => String::new(),
            Value::Object(map) if map.is_empty() => String::new(),
            value => value.to_string(),
        };
        // The program name in the metadata differs.
        let body = text("body").replace("tinkex checkpoint download", "tinker checkpoint download");
        let body = body.replace(r#","detail":null"#, "").replace(r#""detail":null,"#, "");
        // The model card and the encoding of a hub commit differ.
        let hub = request["path"].as_str().unwrap().starts_with("/api/")
            && !request["path"].as_str().unwrap().starts_with("/api/v1/");
        let body = if hub { String::new() } else { body };
        // The Python SDK sends this request without the `x-sdk-method` header.
        let unnamed = request["path"] == "/api/v1/weights_info";
        let headers = if unnamed { String::new() } else { text("headers") };
        format!("{} {} {} {body} {headers}", text("method"), text("path"), text("query"))
    };
    requests.iter().filter(relevant).map(describe).collect()
}

fn check_files(capture: &Capture, ours: &ReplayOutput) {
    let name = &capture.name;
    for (file, content) in capture.files_after() {
        let written = fs::read(ours.work.path().join(&file));
        let written = written.unwrap_or_else(|error| panic!("{name}: {file}: {error}"));
        match content.as_str() {
            Some(text) => {
                assert_eq!(String::from_utf8(written).unwrap().replace("\r\n", "\n"), text);
            }
            None => assert_eq!(written.len() as u64, content.as_u64().unwrap(), "{name}: {file}"),
        }
    }
    let partial_files = |folder: &Path| -> usize {
        let entries = fs::read_dir(folder).unwrap();
        entries
            .filter(|entry| entry.as_ref().unwrap().path().to_str().unwrap().contains(".part"))
            .count()
    };
    if ours.exit == 0 {
        assert_eq!(partial_files(ours.work.path()), 0, "{name}: a partial download is left");
    }
    if let Some(expected) = capture.credentials_after() {
        let path = ours.home.path().join(".tinker/credentials.json");
        let text = fs::read_to_string(&path).unwrap();
        if Some(&text) == capture.credentials_before().as_ref() {
            let parsed = |text: &str| serde_json::from_str::<Value>(text).ok();
            assert_eq!(parsed(&text), parsed(expected), "{name}: the credentials changed");
            return;
        }
        assert_eq!(text, expected, "{name}");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, 0o600, "{name}");
        }
    }
}

/// Checks that an error contains the HTTP status, the server's message and the `expected` texts.
fn check_error(capture: &Capture, ours: &ReplayOutput, expected: &[&str], json: bool) {
    let name = &capture.name;
    let mut expected: Vec<String> = expected.iter().map(|text| (*text).to_owned()).collect();
    if let Some((status, message)) =
        capture.error_response().filter(|_| !name.starts_with("auth-login"))
    {
        expected.push(status.to_string());
        expected.extend(message.map(|message| message.trim().to_owned()));
    }
    if json {
        let lines: Vec<&str> = ours.err.lines().collect();
        // A prompt may precede the document.
        let prompted = name.contains("prompt");
        assert!(prompted || lines.len() == 1, "{name}: one document: {}", ours.err);
        let line = lines.last().unwrap();
        let error: Value = serde_json::from_str(line).unwrap();
        for key in ["kind", "message", "status", "detail", "hint", "request"] {
            assert!(error["error"].get(key).is_some(), "{name}: {key}");
        }
        return;
    }
    for text in expected {
        assert!(ours.err.contains(&text), "{name}: {text:?} is not in {}", ours.err);
    }
}

/// Covers T7.1.1, T7.1.2, T7.1.3, T7.2.1.
#[tokio::test(start_paused = true)]
async fn recorded_commands_behave_like_the_python_cli() {
    let mut unused: BTreeSet<&str> = EXPECTED_FAILURES.iter().map(|(name, ..)| *name).collect();
    assert_eq!(unused.len(), EXPECTED_FAILURES.len(), "a name occurs twice");
    let (mut printed, mut failed) = (String::new(), Vec::new());
    for capture in capture::all().iter().filter(|capture| !is_replayed_elsewhere(capture)) {
        let name = capture.name.as_str();
        let failure = EXPECTED_FAILURES.iter().find(|(known, ..)| *known == name);
        unused.remove(name);
        let accepted = ["usage-format-after-command", "usage-version-flag"].contains(&name);
        let (code, expected) = match failure {
            Some((_, code, expected)) => (*code, *expected),
            None if capture.exit() == 0 || accepted => ("0", &[][..]),
            None => panic!("{name} fails and is missing from EXPECTED_FAILURES"),
        };
        for json in [false, true] {
            // Catch panics to report all failing recordings, not only the first.
            let case = AssertUnwindSafe(replay(capture, json, code, expected)).catch_unwind();
            match case.await {
                Ok(output) => printed += &output,
                Err(_) => {
                    failed.push(if json { format!("{name} --json") } else { name.to_owned() });
                }
            }
        }
    }
    assert_eq!(failed, Vec::<String>::new());
    assert_eq!(unused, BTreeSet::new(), "no such recordings");
    let keys = ["tml-test-0000", "tml-pasted-key", "tml-bad", "tml-minted", "tml-fromcmd", "eyJ"];
    for key in keys {
        assert!(!printed.contains(key), "{key} was printed");
    }
}

/// Runs one recording, checks the result, and returns everything it printed.
async fn replay(capture: &Capture, json: bool, code: &str, expected: &[&str]) -> String {
    let name = capture.name.as_str();
    let prompts = name.contains("prompt") || name == "checkpoint-delete-run-id";
    let ours = run(capture, json, prompts).await;
    let ReplayOutput { exit, out, err, .. } = &ours;
    // CSV and JSON cannot both go to standard output.
    let conflict = json && ["billing-usage-csv", "billing-checkpoint-storage-csv"].contains(&name);
    let code = if conflict { "!2" } else { code };
    assert_eq!(exit.to_string(), code.trim_start_matches('!'), "{name}: {out}{err}");

    let sent = distinct_requests(&ours.requests);
    if code.starts_with('!') {
        assert_eq!(sent, BTreeSet::new(), "{name}: a request was sent");
    } else if name != "usage-format-after-command" {
        let mut expected = distinct_requests(&capture.requests());
        let mut sent = sent;
        if name == "checkpoint-push-hf-derived-repo" {
            // We create a missing revision first, so the requests to the hub differ.
            let tinker_api = |request: &String| request.contains("/api/v1/");
            expected.retain(tinker_api);
            sent.retain(tinker_api);
        }
        let extra: Vec<_> = sent.difference(&expected).collect();
        let missing: Vec<_> = expected.difference(&sent).collect();
        assert!(
            extra.is_empty() && missing.is_empty(),
            "{name}: extra: {extra:#?} missing: {missing:#?}"
        );
    }

    let partial = name == "checkpoint-delete-partial-failure";
    if *exit != 0 && !partial && !name.starts_with("auth-status") {
        if !name.starts_with("error-connection-refused-auth-status") {
            assert_eq!(out, "", "{name}: an error goes to standard error");
        }
    } else if json {
        check_document(capture, &ours);
    } else if let Some(theirs) = expected_table(name) {
        assert_eq!(rows(out, Some(ours.work.path())), result_rows(&theirs), "{name}: {err}");
    }
    if *exit != 0 {
        check_error(capture, &ours, expected, json);
    }
    check_files(capture, &ours);
    format!("{out}{err}")
}

fn check_document(capture: &Capture, ours: &ReplayOutput) {
    let name = capture.name.as_str();
    if name == "usage-version-flag" {
        return;
    }
    let document: Value = serde_json::from_str(&ours.out)
        .unwrap_or_else(|error| panic!("{name}: one document: {error}: {}", ours.out));
    // Error messages of partial failures differ.
    let theirs = file(&format!("{name}.json")).filter(|_| !name.contains("partial"));
    if let Some(theirs) = theirs {
        let theirs = serde_json::from_str(&theirs).unwrap();
        contains_all(&document, &theirs, ours.work.path())
            .unwrap_or_else(|difference| panic!("{name}: {difference}"));
    }
}

/// Returns the rows of the Python CLI's result, without prompts and links before it.
fn result_rows(text: &str) -> Vec<Vec<String>> {
    let result = text.rfind("[y/N]: ").map_or(text, |at| &text[at + "[y/N]: ".len()..]);
    let link = |row: &Vec<String>| row[0].starts_with("Create an API Key");
    rows(result, None).into_iter().filter(|row| !link(row)).collect()
}

#[tokio::test(start_paused = true)]
async fn confirmation_without_a_terminal_fails_and_deletes_nothing() {
    for capture in capture::all() {
        if !capture.name.starts_with("checkpoint-delete-prompt") {
            continue;
        }
        let ours = run(&capture, false, false).await;
        assert_eq!(ours.exit, 2, "{}", capture.name);
        assert!(ours.err.contains("--yes"), "{}", ours.err);
        assert!(!ours.requests.iter().any(|request| request["method"] == "DELETE"));
    }
}
