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
use crate::compare::{has_all, rows};
use crate::scripted_server::ScriptedServer;

/// How captures that failed in the reference, or should have, end here: the exit code, and what the
/// message has to mention. `!` before the code: nothing is asked of the server, since the mistake
/// can be seen before.
const EXPECTED_FAILURES: &[(&str, &str, &[&str])] = &[
    ("auth-credential-cmd-plain-server", "3", &["TINKER_API_KEY"]),
    ("auth-login-401", "3", &["Invalid API key"]),
    ("auth-login-500-text", "5", &["500"]),
    ("auth-login-already", "1", &["logged in already", "auth logout"]),
    ("auth-login-bad-json", "1", &["key_id"]),
    ("auth-login-empty", "3", &["no API key"]),
    ("auth-login-eof", "3", &["no API key"]),
    ("auth-login-unreachable", "5", &["no connection"]),
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
    ("checkpoint-delete-nothing", "!2", &["PATHS", "--run-id"]),
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
    ("error-connection-refused", "5", &["no connection", "TINKER_BASE_URL"]),
    ("error-connection-refused-auth-status", "5", &["no connection"]),
    ("error-connection-refused-model-list", "5", &["no connection"]),
    ("error-corrupt-credentials", "1", &["credentials.json"]),
    ("error-no-credentials", "!3", &["TINKER_API_KEY", "auth login"]),
    ("error-no-credentials-model-list", "!3", &["TINKER_API_KEY", "auth login"]),
    ("error-not-json", "1", &["TINKER_BASE_URL"]),
    ("error-read-timeout", "5", &["in time"]),
    ("error-read-timeout-pyqwest", "5", &["in time"]),
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

/// Where this program does better on purpose, and what it says instead.
fn expected_table(name: &str) -> Option<String> {
    match name {
        // Nothing is cut where no terminal limits it.
        "checkpoint-list-80col" => file("checkpoint-list.table.txt"),
        "run-list-80col" => file("run-list.table.txt"),
        // Cells are literal, and control characters visible.
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
        // An empty table keeps its title and columns, and what was no use is understood.
        "billing-usage-empty"
        | "billing-checkpoint-storage-empty"
        | "usage-format-after-command"
        | "usage-version-flag" => None,
        // Ours is another program.
        "version" => Some(format!("tinkex {}\n", env!("CARGO_PKG_VERSION"))),
        // A title that is wider than its table stays on one line.
        "checkpoint-push-hf" => {
            let text = file("checkpoint-push-hf.table.txt").unwrap();
            let (first, rest) = text.split_once('\n').unwrap();
            Some(format!("{} {}", first.trim(), rest.trim_start()))
        }
        // What failed is told on standard error.
        "checkpoint-delete-partial-failure" => Some("Deleted 1 checkpoint(s)\n".to_owned()),
        _ => file(&format!("{name}.table.txt")),
    }
}

/// The commands that other tests replay.
pub(crate) fn is_elsewhere(capture: &Capture) -> bool {
    capture.is_terminal()
}

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

/// What came of a command line.
pub(crate) struct ReplayOutput {
    pub(crate) exit: u8,
    pub(crate) out: String,
    pub(crate) err: String,
    seen: Vec<Value>,
    pub(crate) home: tempfile::TempDir,
    pub(crate) work: tempfile::TempDir,
}

/// Runs it as it was recorded. `answers`: whether somebody is there to answer questions.
pub(crate) async fn run(capture: &Capture, json: bool, answers: bool) -> ReplayOutput {
    run_as(capture, &capture.line(json), answers).await
}

/// Runs a line that asks nobody.
pub(crate) async fn run_line(line: &[String]) -> ReplayOutput {
    let version = capture::all().into_iter().find(|capture| capture.name == "version");
    run_as(&version.unwrap(), line, false).await
}

/// The same with another command line.
pub(crate) async fn run_as(capture: &Capture, line: &[String], answers: bool) -> ReplayOutput {
    let (home, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    capture.prepare(home.path(), work.path());
    let env = capture.env(home.path());
    let interrupt = Interrupt::default();
    let stopped = capture.name.starts_with("error-sigint");
    let server = ScriptedServer::new(&capture.replies_text(), stopped.then(|| interrupt.clone()));
    let (out, err, http) = (Sink::default(), Sink::default(), server.clone());
    let (silence, _kept) = std::io::pipe().unwrap();
    let input = match capture.name.as_str() {
        "error-sigint-prompt" => {
            // At a question that is never answered.
            interrupt.press();
            Input::new(std::io::BufReader::new(silence))
        }
        _ => Input::new(std::io::Cursor::new(capture.stdin().to_owned())),
    };
    let mut environment = Environment {
        variables: Env::from_pairs(env.iter().map(|(name, value)| (name.as_str(), value.as_str()))),
        folder: work.path().to_owned(),
        out: Box::new(out.clone()),
        err: Box::new(err.clone()),
        input,
        terminals: Terminals { input: answers, ..Terminals::default() },
        interrupt,
        log_scope: LogScope::ThisThread,
        prepare: Box::new(move |client| client.http(http.clone())),
    };
    let words = ["tinkex"].into_iter().chain(line.iter().skip(1).map(String::as_str));
    let line = words.map(Into::into).collect();
    let exit = tinkex_cli::run(&mut environment, line).await.code();
    ReplayOutput { exit, out: out.text(), err: err.text(), seen: server.seen(), home, work }
}

/// What is asked of the server, once each, without telemetry and what keeps a session alive.
fn calls(requests: &[Value]) -> BTreeSet<String> {
    let counts = |request: &&Value| {
        let path = request["path"].as_str().unwrap();
        !path.ends_with("/telemetry") && !path.ends_with("/session_heartbeat")
    };
    let call = |request: &Value| {
        let text = |key: &str| match &request[key] {
            Value::Null => String::new(),
            Value::Object(map) if map.is_empty() => String::new(),
            value => value.to_string(),
        };
        // Whoever made it says so itself.
        let body = text("body").replace("tinkex checkpoint download", "tinker checkpoint download");
        let body = body.replace(r#","detail":null"#, "").replace(r#""detail":null,"#, "");
        // The words of a model card are ours, and so is how they are packed.
        let hub = request["path"].as_str().unwrap().starts_with("/api/")
            && !request["path"].as_str().unwrap().starts_with("/api/v1/");
        let body = if hub { String::new() } else { body };
        // The SDK asks this one for itself, and gives the method no name.
        let own = request["path"] == "/api/v1/weights_info";
        let headers = if own { String::new() } else { text("headers") };
        format!("{} {} {} {body} {headers}", text("method"), text("path"), text("query"))
    };
    requests.iter().filter(counts).map(call).collect()
}

fn check_files(capture: &Capture, ours: &ReplayOutput) {
    let name = &capture.name;
    for (file, content) in capture.files_after() {
        let written = fs::read(ours.work.path().join(&file));
        let written = written.unwrap_or_else(|why| panic!("{name}: {file}: {why}"));
        match content.as_str() {
            Some(text) => {
                assert_eq!(String::from_utf8(written).unwrap().replace("\r\n", "\n"), text);
            }
            None => assert_eq!(written.len() as u64, content.as_u64().unwrap(), "{name}: {file}"),
        }
    }
    let parts = |folder: &Path| -> usize {
        let entries = fs::read_dir(folder).unwrap();
        entries
            .filter(|entry| entry.as_ref().unwrap().path().to_str().unwrap().contains(".part"))
            .count()
    };
    if ours.exit == 0 {
        assert_eq!(parts(ours.work.path()), 0, "{name}: nothing is left beside the result");
    }
    if let Some(expected) = capture.credentials_after() {
        let path = ours.home.path().join(".tinker/credentials.json");
        let text = fs::read_to_string(&path).unwrap();
        if Some(&text) == capture.credentials_before().as_ref() {
            let same = |text: &str| serde_json::from_str::<Value>(text).ok();
            assert_eq!(same(&text), same(expected), "{name}: untouched");
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

/// Whether an error says what the reference's said: the status, the server's words, and what is
/// listed above.
fn check_facts(capture: &Capture, ours: &ReplayOutput, facts: &[&str], json: bool) {
    let name = &capture.name;
    let mut wanted: Vec<String> = facts.iter().map(|fact| (*fact).to_owned()).collect();
    if let Some((status, said)) = capture.refusal().filter(|_| !name.starts_with("auth-login")) {
        wanted.push(status.to_string());
        wanted.extend(said.map(|said| said.trim().to_owned()));
    }
    if json {
        let lines: Vec<&str> = ours.err.lines().collect();
        // A question may stand before it.
        let asked = name.contains("prompt");
        assert!(asked || lines.len() == 1, "{name}: one document: {}", ours.err);
        let line = lines.last().unwrap();
        let error: Value = serde_json::from_str(line).unwrap();
        for key in ["kind", "message", "status", "detail", "hint", "request"] {
            assert!(error["error"].get(key).is_some(), "{name}: {key}");
        }
        return;
    }
    for fact in wanted {
        let told = format!("{}{}", ours.err, if json { ours.out.as_str() } else { "" });
        assert!(told.contains(&fact), "{name}: {fact:?} is not in {told}");
    }
}

/// Covers T7.1.1, T7.1.2, T7.1.3, T7.2.1.
#[tokio::test(start_paused = true)]
async fn every_capture_is_replayed() {
    let mut ends: BTreeSet<&str> = EXPECTED_FAILURES.iter().map(|(name, ..)| *name).collect();
    assert_eq!(ends.len(), EXPECTED_FAILURES.len(), "each once");
    let (mut told, mut wrong) = (String::new(), Vec::new());
    for capture in capture::all().iter().filter(|capture| !is_elsewhere(capture)) {
        let name = capture.name.as_str();
        let end = EXPECTED_FAILURES.iter().find(|(known, ..)| *known == name);
        ends.remove(name);
        let better = ["usage-format-after-command", "usage-version-flag"].contains(&name);
        let (code, facts) = match end {
            Some((_, code, facts)) => (*code, *facts),
            None if capture.exit() == 0 || better => ("0", &[][..]),
            None => panic!("{name} failed: how does it end here?"),
        };
        for json in [false, true] {
            // All that is wrong, not only the first of it.
            let case = AssertUnwindSafe(replay(capture, json, code, facts)).catch_unwind();
            match case.await {
                Ok(more) => told += &more,
                Err(_) => wrong.push(if json { format!("{name} --json") } else { name.to_owned() }),
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
    assert_eq!(ends, BTreeSet::new(), "no such captures");
    let keys = ["tml-test-0000", "tml-pasted-key", "tml-bad", "tml-minted", "tml-fromcmd", "eyJ"];
    for key in keys {
        assert!(!told.contains(key), "{key} was told");
    }
}

/// Runs one capture and compares; what it told.
async fn replay(capture: &Capture, json: bool, code: &str, facts: &[&str]) -> String {
    let name = capture.name.as_str();
    let asks = name.contains("prompt") || name == "checkpoint-delete-run-id";
    let ours = run(capture, json, asks).await;
    let ReplayOutput { exit, out, err, .. } = &ours;
    // Two things cannot both go to standard output.
    let twice = json && ["billing-usage-csv", "billing-checkpoint-storage-csv"].contains(&name);
    let code = if twice { "!2" } else { code };
    assert_eq!(exit.to_string(), code.trim_start_matches('!'), "{name}: {out}{err}");

    let seen = calls(&ours.seen);
    if code.starts_with('!') {
        assert_eq!(seen, BTreeSet::new(), "{name}: nothing had to be asked");
    } else if name != "usage-format-after-command" {
        let mut expected = calls(&capture.requests());
        let mut seen = seen;
        if name == "checkpoint-push-hf-derived-repo" {
            // A revision that is not there yet is made first, under the name that the hub gave.
            let ours = |call: &String| call.contains("/api/v1/");
            expected.retain(ours);
            seen.retain(ours);
        }
        let more: Vec<_> = seen.difference(&expected).collect();
        let less: Vec<_> = expected.difference(&seen).collect();
        assert!(more.is_empty() && less.is_empty(), "{name}: more: {more:#?} less: {less:#?}");
    }

    let partly = name == "checkpoint-delete-partial-failure";
    if *exit != 0 && !partly && !name.starts_with("auth-status") {
        if !name.starts_with("error-connection-refused-auth-status") {
            assert_eq!(out, "", "{name}: results only");
        }
    } else if json {
        check_document(capture, &ours);
    } else if let Some(theirs) = expected_table(name) {
        assert_eq!(rows(out, Some(ours.work.path())), result_rows(&theirs), "{name}: {err}");
    }
    if *exit != 0 {
        check_facts(capture, &ours, facts, json);
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
        .unwrap_or_else(|why| panic!("{name}: one document: {why}: {}", ours.out));
    // The words of the server's refusal are ours.
    let theirs = file(&format!("{name}.json")).filter(|_| !name.contains("partial"));
    if let Some(theirs) = theirs {
        let theirs = serde_json::from_str(&theirs).unwrap();
        has_all(&document, &theirs, ours.work.path()).unwrap_or_else(|why| panic!("{name}: {why}"));
    }
}

/// The rows of the reference's result, without the questions before it.
fn result_rows(text: &str) -> Vec<Vec<String>> {
    let answer = text.rfind("[y/N]: ").map_or(text, |at| &text[at + "[y/N]: ".len()..]);
    let link = |row: &Vec<String>| row[0].starts_with("Create an API Key");
    rows(answer, None).into_iter().filter(|row| !link(row)).collect()
}

/// Where nobody can answer, a question is a mistake, and nothing is deleted.
#[tokio::test(start_paused = true)]
async fn questions_need_somebody_to_answer() {
    for capture in capture::all() {
        if !capture.name.starts_with("checkpoint-delete-prompt") {
            continue;
        }
        let ours = run(&capture, false, false).await;
        assert_eq!(ours.exit, 2, "{}", capture.name);
        assert!(ours.err.contains("--yes"), "{}", ours.err);
        assert!(!ours.seen.iter().any(|call| call["method"] == "DELETE"));
    }
}
